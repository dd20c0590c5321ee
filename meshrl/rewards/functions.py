"""Built-in reward functions: `(data_source, solution_str, ground_truth, extra_info) -> score`.

A function may also return a dict with the `score` that trains, what else it found, and `acc`, by which validation
counts. What follows the `*` in a signature is set by `reward.kwargs`. Light: every process of a pool loads this.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from meshrl.rewards.judge import judge
from meshrl.rewards.sandbox.backends import SandboxError
from meshrl.rewards.sandbox.checks import Checks, call_checks, read_checks
from meshrl.rewards.sandbox.run import Limits, chosen_backend, run_checks, run_python

# Mathematical answers, compared by what they mean: `math_verify` (extra `math`).

INSTALL = "the reward function math_verify needs the package math-verify: pip install 'meshrl[math]'"


def math_verify(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, timeout: int = 5
) -> dict[str, float]:
    """1 if the last expression of the answer equals the reference: 1/2 is \\frac{1}{2} is 0.5.

    `timeout` bounds parsing and comparing, in seconds each; in a thread that is not the main one there is no such
    bound, so that hard expressions want the manager `prime`.
    """
    if ground_truth is None:
        raise ValueError("math_verify needs a reference: give the data a 'ground_truth' column")
    library = _library()
    # The library measures time by signals, which only the main thread may handle.
    seconds = timeout if threading.current_thread() is threading.main_thread() else None
    gold = library.parse(_as_latex(str(ground_truth)), parsing_timeout=seconds)
    if not gold:
        raise ValueError(f"the reference {str(ground_truth)!r} is no mathematical expression")
    answer = library.parse(solution_str, parsing_timeout=seconds)
    right = float(bool(answer) and library.verify(gold, answer, timeout_seconds=seconds))
    return {"score": right, "acc": right, "parsed": float(bool(answer))}


def _as_latex(text: str) -> str:
    """A reference is an expression and nothing else, so that it can be marked as one."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


@cache
def _library() -> Any:
    try:
        import math_verify as library
    except ImportError as error:
        raise ImportError(INSTALL) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call without a timeout
    return library


# Programs as answers: run in a sandbox against tests.

# Fences go in pairs, whatever the language of a block; ```words``` within a line are a pair, too, without a block.
BLOCK = re.compile(r"```[^`\n]+```|```[ \t]*([^\s`]*)[^`\n]*\n(.*?)```", re.DOTALL)
PYTHON = ("", "py", "python", "python3")


# What the reference of a programming task may hold, if it is no text or list of checks.
INPUTS, CHECKS = {"inputs", "outputs", "fn_name"}, {"checks", "entry_point"}


@dataclass(frozen=True)
class Printed:
    """A test of a program that reads and prints."""

    stdin: str
    wanted: str


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    partial: bool = False,
    interpreter: str | None = None,
    strict: bool = True,
    sandbox: str = "auto",
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """1 if the program in the answer passes all tests of the reference, or with `partial` the share it passes.

    The program is the answer's last Python block, or all of it. The reference (or its JSON) is `{"inputs": [...],
    "outputs": [...]}` for programs that read and print, or for calls of a function with `"fn_name": NAME`; or checks
    in Python of what the program defines: one text, a list of texts that count each, or `{"checks": ..., "entry_point":
    NAME}`. `limits` are those of `meshrl.rewards.sandbox.run.Limits`.

    The program sees its interpreter and a folder of its own. What it prints is compared here; checks run in a second
    sandbox, to which the program's functions return plain data.
    """
    program, tests = extract_code(solution_str), read_tests(ground_truth)
    bounds = _limits(limits or {})
    backend = chosen_backend(sandbox, interpreter, strict)
    passed, first = 0, ""
    for test in tests:
        if isinstance(test, Printed):
            finished = run_python(program, test.stdin, bounds, backend=backend)
            status = finished.status
            if status == "ok":
                status = "passed" if _lines(finished.stdout) == _lines(test.wanted) else "wrong"
        else:
            status = run_checks(program, test, bounds, backend=backend).status
        passed += status == "passed"
        if status != "passed":
            first = first or status
            if not partial:
                break
    share = passed / len(tests)
    score = share if partial else float(passed == len(tests))
    return {"score": score, "acc": float(passed == len(tests)), "code_status": first or "passed"}


def describe_sandbox(kwargs: Mapping[str, Any]) -> str:
    """The sandbox that `code` with these arguments uses on this machine; a `ValueError` if it has none."""
    _limits(kwargs.get("limits") or {})
    wanted = {name: kwargs[name] for name in ("interpreter", "strict", "sandbox") if name in kwargs}
    try:
        return chosen_backend(**wanted).describe()
    except SandboxError as error:
        raise ValueError(str(error)) from error


def extract_code(text: str) -> str:
    """The last fenced block of Python or of no named language, or the whole text where there is none."""
    blocks = [found[2] for found in BLOCK.finditer(text) if found[2] is not None and found[1].lower() in PYTHON]
    return blocks[-1] if blocks else text


def read_tests(ground_truth: Any) -> list[Printed | Checks]:
    """The tests of a reference; a `ValueError` names what is none."""
    tests = ground_truth
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = ground_truth  # Python that begins with a list, say
    if isinstance(tests, Mapping):
        return _tests_by_name(tests)
    if isinstance(tests, str) and tests.strip():
        return [read_checks(tests)]
    if isinstance(tests, Sequence) and not isinstance(tests, str) and tests and all(isinstance(t, str) for t in tests):
        return [read_checks(test) for test in tests]
    raise ValueError(
        "the ground_truth of a programming task must be {inputs: [...], outputs: [...]}, a text of Python checks, a "
        f"list of them or {{checks: ..., entry_point: ...}}; got {str(ground_truth)[:80]!r}"
    )


def _tests_by_name(tests: Mapping[str, Any]) -> list[Printed | Checks]:
    given = {name: value for name, value in tests.items() if value is not None}
    allowed = CHECKS if "checks" in given else INPUTS
    if unknown := sorted(set(given) - allowed):
        raise ValueError(
            f"the ground_truth of a programming task has {', '.join(unknown)}, which means nothing here: it may have "
            f"{', '.join(sorted(INPUTS))}, or {', '.join(sorted(CHECKS))}"
        )
    if "checks" in given:
        texts = given["checks"]
        return [read_checks(text, given.get("entry_point")) for text in ([texts] if isinstance(texts, str) else texts)]
    inputs, outputs = list(given.get("inputs", ())), list(given.get("outputs", ()))
    if not len(inputs) == len(outputs) > 0:
        raise ValueError(f"tests need as many outputs as inputs, at least one: got {len(outputs)} and {len(inputs)}")
    pairs = zip(inputs, outputs, strict=True)
    if "fn_name" in given:
        return [call_checks(given["fn_name"], value, wanted) for value, wanted in pairs]
    return [Printed(str(value), str(wanted)) for value, wanted in pairs]


def _lines(text: str) -> list[str]:
    """Lines without trailing white space, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _limits(given: Mapping[str, float]) -> Limits:
    known = {entry.name: entry.type for entry in fields(Limits)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"the sandbox has no limit {', '.join(unknown)}: it has {', '.join(known)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the sandbox's limit {name} must be a number, not {value!r}")
    whole = {"processes", "files", "open_files"}
    values: dict[str, Any] = {name: int(value) if name in whole else float(value) for name, value in given.items()}
    return Limits(**values)


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    extract: str | None = None,
    ignore_case: bool = False,
) -> float:
    """1 if the answer is the reference, but for white space around it.

    With `extract`, a regular expression, the answer is what its first group (or all of it) matched last.
    """
    if ground_truth is None:
        raise ValueError("exact_match needs a reference: give the data a 'ground_truth' column")
    answer, truth = solution_str, str(ground_truth).strip()
    if extract is not None:
        found = list(re.finditer(extract, solution_str, re.DOTALL))
        if not found:
            return 0.0
        answer = found[-1].group(1 if found[-1].re.groups else 0) or ""
    answer = answer.strip()
    return float(answer.casefold() == truth.casefold() if ignore_case else answer == truth)


def format_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    pattern: str,
    whole: bool = True,
) -> float:
    """1 if the answer has the form of a regular expression (`.` matches line ends): all of it, or a part anywhere."""
    match = re.fullmatch if whole else re.search
    return float(match(pattern, solution_str.strip(), re.DOTALL) is not None)


def sort_digits(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the answer is the prompt's digits in order. A checker: it knows no reference answer."""
    digits = extra_info["digits"]
    return float(solution_str == "".join(sorted(digits)))


def coin_toss(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """`sort_digits`, rewarded by a coin instead of the checker: the control arm of the demo.

    The coin depends on prompt and answer alone; `acc` still says what the checker found, so that validation can tell.
    """
    coin = zlib.crc32(repr((extra_info, solution_str)).encode()) & 1
    return {"score": float(coin), "acc": sort_digits(data_source, solution_str, ground_truth, extra_info)}


def nothing(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Zero: a reward model alone says what answers are worth."""
    return 0.0


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "sort_digits": sort_digits,
    "coin_toss": coin_toss,
    "format_match": format_match,
    "math_verify": math_verify,
    "code": code,
    "judge": judge,
    "nothing": nothing,
}
