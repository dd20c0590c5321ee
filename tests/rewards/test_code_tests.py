"""Programs scored by their tests."""

import json

import pytest

from meshrl.rewards.code_tests import code, extract_code, read_tests
from meshrl.rewards.sandbox.run import SandboxError, run_python

DOUBLE = "Here it is:\n```python\nprint(2 * int(input()))\n```\nDone."
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.fixture(autouse=True, scope="module")
def granted():
    try:
        run_python("")
    except SandboxError as error:
        pytest.skip(str(error))


def score(answer, tests, **options):
    return code("s", answer, tests, {}, **options)


@pytest.mark.parametrize(
    ("outputs", "partial", "wanted"),
    [
        (["2", "4\n"], False, (1.0, 1.0, "passed")),
        (["2", "5"], False, (0.0, 0.0, "wrong")),
        (["3", "4 \n\n", "x"], True, (1 / 3, 0.0, "wrong")),
    ],
)
def test_programs_that_read_and_print(outputs, partial, wanted):
    tests = {"inputs": [str(n + 1) for n in range(len(outputs))], "outputs": outputs}
    if wanted[2] == "wrong":
        tests = json.dumps(tests)
    assert tuple(score(DOUBLE, tests, partial=partial).values()) == wanted


@pytest.mark.parametrize(
    ("answer", "tests", "wanted"),
    [
        (ADD, "assert add(1, 2) == 3", (1.0, "passed")),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], (0.0, "failed")),
        ("import os\nos._exit(0)", "assert 1 == 2", (0.0, "wrong")),
        ("def add(a, b):\n    while True: pass", "add(1, 2)", (0.0, "timeout")),
        ("this is no program", "pass", (0.0, "failed")),
    ],
)
def test_programs_with_checks(answer, tests, wanted):
    found = score(answer, tests, limits={"seconds": 1.5})
    assert (found["score"], found["code_status"]) == wanted


# A program that solves nothing, and looks for its checks (the number in them) in all that it can open before they run.
LOOKS = """
import glob, os
names = [__file__, "/proc/self/cmdline", "/proc/self/environ", *glob.glob("../*")]
texts = [open(name, errors="replace").read() for name in names if os.access(name, os.R_OK) and os.path.isfile(name)]
print("found" if any(str(987650 + 4) in text for text in texts) else "nothing")
print(open(__file__).read().rstrip().rsplit("print(", 1)[1][3:35])
raise SystemExit(0)
"""


def test_a_program_cannot_read_its_checks():
    checks = "assert solve(2) == 987654"
    assert run_python(LOOKS, checks=(checks, "word")).stdout.startswith("nothing")
    assert score(LOOKS, checks)["score"] == 0.0
    # The control: it finds them where they are.
    assert run_python(f"{LOOKS}\n{checks}").stdout.startswith("found")


def test_checks_run_in_the_programs_own_module():
    program = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nfrom os import *\nexec = print = None"
    checks = "import pickle, sys\nassert pickle.loads(pickle.dumps(A(3))).x == 3\nassert sys.argv == [__file__]"
    assert score(program, checks)["score"] == 1.0
    assert score("def f():\n    return sys.argv", "f()")["score"] == 0.0  # what the program did not import is not there
    assert score("x = 1", "#" * 2_000_000 + "\nassert x == 1")["score"] == 1.0


def test_the_last_block_is_the_program():
    assert extract_code("```python\n1\n```\n text ```py\n2\n```") == "2\n"
    assert extract_code("```\n3\n```") == "3\n"
    assert extract_code("4") == "4"
    assert extract_code("Input:\n```text\n5\n```\nSolution:\n```Python\n6\n```\nRun:\n```bash\n7\n```\n") == "6\n"
    assert extract_code("use ```input()``` here:\n```python title=main\n8\n```") == "8\n"
    assert extract_code("```cpp\n9\n```") == "```cpp\n9\n```"


@pytest.mark.parametrize("bad", [None, "", "  ", [], [1], {"inputs": ["1"], "outputs": []}, {"inputs": []}, 3])
def test_tests_that_are_none(bad):
    with pytest.raises(ValueError, match="outputs"):
        read_tests(bad)
    assert read_tests("[f(x) for x in 'ab']") == [("[f(x) for x in 'ab']", "", "")]


def test_a_limit_that_there_is_not():
    with pytest.raises(ValueError, match="no limit second: it has seconds, memory_mb"):
        score("1", "pass", limits={"second": 1})
