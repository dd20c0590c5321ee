"""The runner of the tests: failures are repeated, and counted whatever the second run says."""

import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "run_tests.py"
FLAKY = """
def test_flaky(tmp_path_factory):
    import pathlib
    mark = pathlib.Path(__file__).with_name("mark")
    first = not mark.exists()
    mark.touch()
    assert not first
"""


@pytest.mark.parametrize(
    ("tests", "status", "flaky", "said"),
    [
        ("def test_good(): pass", 0, "", "FLAKY: 0"),
        (FLAKY + "def test_good(): pass", 0, "test_it.py::test_flaky\n", "FLAKY: 1 failed beside others"),
        (FLAKY + "def test_bad(): assert 0", 1, "test_it.py::test_flaky\n", "FLAKY: 1 failed beside others"),
        ("def test_bad(): assert 0", 1, "", "FLAKY: 0"),
        ("import nothing_of_this_name", 2, "", "FLAKY: 0"),
        ("", 5, "", "FLAKY: 0"),
    ],
    ids=["good", "flaky", "flaky and bad", "bad", "broken", "empty"],
)
def test_failures_are_repeated_and_counted(tmp_path, tests, status, flaky, said):
    (tmp_path / "test_it.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = subprocess.run(
        [sys.executable, str(RUNNER), "results", "test_it.py", "-n", "0", "--dist", "loadfile", "--durations=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert (tmp_path / "results" / "flaky.txt").read_text() == flaky
    assert said in ended.stdout
