"""Programs scored by their tests."""

import json

import pytest

from meshrl.rewards.functions import Printed, code, extract_code, read_tests
from meshrl.rewards.sandbox.backends import SandboxError
from meshrl.rewards.sandbox.checks import read_checks
from meshrl.rewards.sandbox.run import chosen_backend, run_checks

DOUBLE = "Here it is:\n```python\nprint(2 * int(input()))\n```\nDone."
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.fixture(autouse=True, scope="module")
def granted():
    try:
        chosen_backend()
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
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], (0.0, "wrong")),
        (ADD, "assert subtract(1, 2) == 3", (0.0, "failed")),
        ("import os\nos._exit(0)", "assert 1 == 1", (0.0, "failed")),
        ("this is no program", "pass", (0.0, "failed")),
        ("def add(a, b):\n    return object()", "assert add(1, 2) == 3", (0.0, "not plain")),
        (
            "def add(a, b):\n    return 1 / 0",
            "try:\n    add(1, 2)\nexcept ZeroDivisionError:\n    pass",
            (1.0, "passed"),
        ),
    ],
)
def test_programs_with_checks(answer, tests, wanted):
    found = score(answer, tests)
    assert (found["score"], found["code_status"]) == wanted


def test_a_program_that_never_answers():
    found = score("def add(a, b):\n    while True: pass", "add(1, 2)", limits={"seconds": 1.5})
    assert (found["score"], found["code_status"]) == (0.0, "timeout")


RESULTS = """
import datetime, decimal, fractions
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
Point = namedtuple("Point", "x y")
VALUES = [
    None, True, 3, -(7 ** 90), 0.1, -0.0, float("inf"), 1 + 2j, "a\\ud800\\n", b"\\xff", bytearray(b"x"), [1, [2.0]],
    (1, (2,)), {1, 2}, frozenset([3]), {1: "a", (2, 3): {4}}, OrderedDict(a=1), defaultdict(None, a=1), Counter("aab"),
    deque([1], 3), range(2, 9, 3), decimal.Decimal("0.10"), fractions.Fraction(1, 3), datetime.date(2020, 1, 2),
    datetime.time(3, 4), datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.timedelta(1, 2, 3), Point(1, 2),
]
"""


def test_plain_data_keeps_its_values_and_types():
    checks = (
        RESULTS + "found = values()\nassert len(found) == len(VALUES)\n"
        "for got, wanted in zip(found, VALUES):\n"
        "    assert got == wanted and repr(got) == repr(wanted), (got, wanted)\n"
        "    assert type(got).__name__ == type(wanted).__name__\n"
        "back = same(VALUES)\nassert repr(back) == repr(VALUES)\n"
        "assert str(nan()) == 'nan'"
    )
    program = RESULTS + "def values(): return VALUES\ndef same(x): return x\ndef nan(): return float('nan')"
    assert score(program, checks)["code_status"] == "passed"


STACK = """
class EmptyError(ValueError): pass
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
    def has(self, value): return True
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise EmptyError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, at): return self.items[at]
    def __str__(self): return f"Stack({self.items})"
def chain(): return Node(1, Node(2))
def twice(function, value): return function(function(value))
def rotate(values): values.insert(0, values.pop())
def count():
    n = 0
    while True:
        yield n
        n += 1
TOTAL = 5
def sum(a, b): return a + b
"""
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"


@pytest.mark.parametrize(
    "checks",
    [
        "s = Stack([1])\ns.push(3)\nassert s.pop() == 3 and s.items == [1] and len(s) == 1",
        "assert list(Stack([1])) == [1] and Stack([1])[0] == 1 and 1 in Stack([1])",
        "assert str(Stack([1])) == 'Stack([1])' and Stack.limit == 3 and isinstance(Stack(), Stack)",
        "try:\n    Stack().pop()\n    assert False\nexcept EmptyError as error:\n    assert str(error) == 'empty'",
        "assert chain().value == 1 and chain().next.value == 2 and chain().next.next is None",
        "assert twice(lambda x: x + 1, 3) == 5",
        "a = [1, 2, 3]\nrotate(a)\nassert a == [3, 1, 2]",
        "numbers = count()\nassert [next(numbers) for _ in range(3)] == [0, 1, 2]",
        "assert TOTAL == 5",
        "assert sum(1, 2) == 3",
        "assert math.isclose(TOTAL, 5)",
        "def check(candidate):\n    assert candidate([2, 1]) is None\ncheck(rotate)",
        {"checks": "def check(candidate):\n    assert candidate([2, 1]) is None", "entry_point": "rotate"},
        {"checks": "assert sum(abs(-1), 2) == 3", "entry_point": "sum"},
        "def test_total():\n    assert TOTAL == 5\n\ndef test_sum(a=1):\n    assert Stack([a]).pop() == 1",
        UNITTEST + "        with self.assertRaises(EmptyError):\n            Stack().pop()\nunittest.main()",
        "import sys\nassert TOTAL == 5\nsys.exit()",
    ],
)
def test_forms_of_checks(checks):
    assert score(STACK, checks)["code_status"] == "passed"


def test_failing_forms_fail():
    """The control of the test above: what passes there is looked at."""
    for wrong in (
        {"checks": "def check(candidate):\n    assert candidate([2, 1]) == 1", "entry_point": "rotate"},
        "def test_total():\n    assert TOTAL == 6",
        UNITTEST + "        self.assertEqual(TOTAL, 6)\nunittest.main()",
        "assert sum(1, 2) == 4",
        "import sys\nsys.exit(1)",
    ):
        assert score(STACK, wrong)["code_status"] == "wrong", wrong


@pytest.mark.parametrize(
    "checks",
    [
        "assert Stack() == Stack()",
        "assert Stack() != Stack()",
        "assert chain() < 3",
        "assert chain().has(3)",
        "assert chain()['value']",
        "try:\n    assert chain() == 3\nexcept BaseException:\n    pass",
    ],
)
def test_objects_are_not_compared(checks):
    assert score(STACK, checks)["code_status"] == "not plain"


@pytest.mark.parametrize(
    ("checks", "named"),
    [
        ("assert eval(str(f(1))) == 1", r"eval \(line 1\)"),
        ("x = 1\nimport pickle\nassert pickle.loads(f(1)) == 1", r"pickle \(line 2\)"),
        ("from unittest import mock\nf(1)", "mock"),
        (
            "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    f(1)",
            r"redirect_stdout \(line 2\)",
        ),
        ("import inspect\nassert 'for' not in inspect.getsource(f)", "inspect"),
        ("assert globals()['f'](1) == 1", "globals"),
        ("f(1)\nassert open('out.txt').read() == '1'", "open"),
        ("def check(candidate):\n    assert candidate(1) == 1", "never call it"),
        (
            "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n    assert f(x) == 1",
            r"test_f\(\) \(line 3\)",
        ),
        ("class T:\n    def test(self):\n        assert f(1) == 1", "check nothing"),
        ("assert f(1 == 1", "no Python"),
        ("assert sorted(set([1])) == [1]", "set, sorted.*entry_point"),
    ],
)
def test_checks_that_cannot_be_used_are_refused_by_name(checks, named):
    with pytest.raises(ValueError, match=named):
        read_tests(checks)


@pytest.mark.parametrize(
    ("checks", "named"),
    [
        ("import no_such_module\nassert f(1) == 1", "no_such_module"),
        ("class Own:\n    pass\nf(Own())", "type Own, which is not plain data"),
    ],
)
def test_checks_that_fail_by_themselves_are_refused_when_they_run(checks, named):
    with pytest.raises(ValueError, match=named):
        score("def f(x): return x", checks)


def test_an_error_of_the_program_is_not_the_checks_fault():
    assert score("def f(x): import no_such_module", "f(1)")["code_status"] == "failed"


@pytest.mark.parametrize(
    ("answer", "given", "wanted", "status"),
    [
        ("def f(a, b): return a + b", [1, 2], 3, "passed"),
        ("def f(a, b): return a + b", "1\n2", "3", "passed"),
        ("def f(a, b): return a + b", [1, 2], [3], "passed"),
        ("def f(a, b): return a + b", [1, 2], 4, "wrong"),
        ("class Solution:\n    def f(self, a, b): return (a, {b: None})", [1, 2], [1, {"2": None}], "passed"),
        ("def f(a): return a", ["x"], "x", "passed"),
    ],
)
def test_calls_of_a_function_by_name(answer, given, wanted, status):
    assert score(answer, {"inputs": [given], "outputs": [wanted], "fn_name": "f"})["code_status"] == status


def test_keys_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="has difficulty, which means nothing here"):
        read_tests({"inputs": ["1"], "outputs": ["1"], "difficulty": 3})
    with pytest.raises(ValueError, match="empty list of checks"):
        read_tests({"checks": []})
    with pytest.raises(ValueError, match="has inputs, which means nothing here"):
        read_tests({"checks": "assert f(1)", "inputs": ["1"]})
    assert read_tests({"inputs": ["1"], "outputs": ["1"], "fn_name": None}) == [Printed("1", "1")]


def test_programs_run_as_their_own_main_module():
    program = "import dataclasses, pickle, sys\n@dataclasses.dataclass\nclass A:\n    x: int\nexec = print = None\n"
    program += (
        "def same(): return pickle.loads(pickle.dumps(A(3))).x\ndef argv(): return sys.argv, __name__, __file__\n"
    )
    program += "def names(): return sorted(name for name in globals() if not name.startswith('__'))\n"
    checks = "assert same() == 3\nassert argv() == (['main.py'], '__main__', 'main.py')\n"
    checks += "assert names() == ['A', 'argv', 'dataclasses', 'exec', 'names', 'pickle', 'print', 'same', 'sys']"
    assert score(program, checks)["code_status"] == "passed"
    assert score("def f():\n    return sys.argv", "f()")["score"] == 0.0  # what the program did not import is not there
    assert score("x = 1", "#" * 2_000_000 + "\nassert x == 1")["score"] == 1.0


def test_the_verdict_says_why():
    verdict = run_checks("def f(x): return x", read_checks("assert f(2) == 3, 'two'"))
    assert (verdict.status, verdict.why) == ("wrong", "AssertionError: two")


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
    assert [test.checks for test in read_tests("[f(x) for x in 'ab']")] == ["[f(x) for x in 'ab']"]


def test_a_limit_that_there_is_not():
    with pytest.raises(ValueError, match="no limit second: it has seconds, memory_mb"):
        score("1", "pass", limits={"second": 1})
