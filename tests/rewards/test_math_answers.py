"""Mathematical answers compared by meaning, and what is said where the library is not there."""

import subprocess
import sys
import threading

import pytest


def test_without_the_library_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from meshrl.rewards.functions import BUILT_IN\n"
        "try: BUILT_IN['math_verify']('s', '1', '1', {})\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'meshrl[math]'" in done.stdout


@pytest.fixture(scope="module")
def score():
    pytest.importorskip("math_verify")
    from meshrl.rewards.functions import math_verify

    return lambda answer, truth: math_verify("s", answer, truth, {})


@pytest.mark.parametrize(
    ("answer", "truth", "wanted"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", 1),
        ("It is $0.5$", r"\frac{1}{2}", 1),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", 1),
        ("The answer is 42", 42, 1),
        (r"\boxed{0.51}", r"\frac{1}{2}", 0),
        ("I do not know", "7", 0),
        ("", "7", 0),
    ],
)
def test_equal_by_meaning(score, answer, truth, wanted):
    found = score(answer, truth)
    assert (found["score"], found["acc"]) == (wanted, wanted)
    assert found["parsed"] == float(answer not in ("I do not know", ""))


def test_a_reference_that_is_missing_or_no_expression(score):
    with pytest.raises(ValueError, match="'ground_truth' column"):
        score("1", None)
    with pytest.raises(ValueError, match="no mathematical expression"):
        score("1", "")


def test_other_threads_may_ask_too(score):
    found = []
    thread = threading.Thread(target=lambda: found.append(score(r"\boxed{2}", "1 + 1")))
    thread.start()
    thread.join()
    assert found[0]["score"] == 1
