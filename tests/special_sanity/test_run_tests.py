"""The runner of the tests: failures and crashes are repeated, and counted whatever the second run says."""

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


CRASH = """
def test_crash():
    import os
    os.abort()
"""
FLAKY_CRASH = FLAKY.replace("    assert not first", "    import os\n    if first: os.abort()")
TEST = "test_it.py::test_flaky\n"


@pytest.mark.parametrize(
    ("tests", "workers", "status", "flaky", "said"),
    [
        ("def test_good(): pass", 0, 0, "", "FLAKY: 0"),
        (FLAKY + "def test_good(): pass", 0, 0, TEST, "FLAKY: 1 failed beside others"),
        (FLAKY + "def test_bad(): assert 0", 0, 1, TEST, "FLAKY: 1 failed beside others"),
        ("def test_bad(): assert 0", 0, 1, "", "FLAKY: 0"),
        ("import nothing_of_this_name", 0, 2, "", "FLAKY: 0"),
        ("import nothing_of_this_name", 1, 2, "", "FLAKY: 0"),
        ("", 0, 5, "", "FLAKY: 0"),
        (FLAKY_CRASH + "def test_good(): pass", 1, 0, TEST, "FLAKY: 1 failed beside others"),
        (CRASH, 0, 134, "", "CRASHED: pytest was ended by SIGABRT"),
        (FLAKY + CRASH, 1, 134, "", "not known:\n  test_it.py::test_crash\n  test_it.py::test_flaky\n"),
    ],
    ids=[
        "good", "flaky", "flaky and bad", "bad", "broken", "broken for a worker", "empty", "a worker's crash",
        "a crash", "a crash in both runs",
    ],
)  # fmt: skip
def test_failures_are_repeated_and_counted(tmp_path, tests, workers, status, flaky, said):
    (tmp_path / "test_it.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = subprocess.run(
        [sys.executable, str(RUNNER), "results", "test_it.py", "-n", str(workers), "--dist", "loadfile"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert (tmp_path / "results" / "flaky.txt").read_text() == flaky
    assert said in ended.stdout
