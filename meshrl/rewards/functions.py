"""Built-in reward functions: `(data_source, solution_str, ground_truth, extra_info) -> score`.

A function may also return a dict with the training reward `score`, the validation metric `acc` and further columns.
Parameters after the `*` in a signature are set by `reward.kwargs`. This module avoids heavy imports, because every
process of a pool loads it.

* `math_verify`: comparison of mathematical expressions.
* `code`, `extract_code`, `read_tests`: programs, which run in a sandbox against tests.
* `exact_match`, `format_match`: comparison of texts.
* `sort_digits`, `coin_toss`: the rewards of the demo.
* `nothing`: zero, if a reward model alone gives the reward.
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

# Comparison of mathematical expressions by value: `math_verify` (needs the extra `math`).

INSTALL = "the reward function math_verify needs the package math-verify: pip install 'meshrl[math]'"


def math_verify(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, timeout: int = 5
) -> dict[str, float]:
    """Return 1 if the last expression of the response equals the reference in value: 1/2 is \\frac{1}{2} is 0.5.

    `timeout` bounds each parsing and the comparison, in seconds. Outside the main thread there is no such bound, so
    hard expressions should be scored with the manager `prime`.
    """
    if ground_truth is None:
        raise ValueError("math_verify needs a reference: give the data a 'ground_truth' column")
    library = _library()
    # The library implements timeouts by signals, which only the main thread may handle.
    seconds = timeout if threading.current_thread() is threading.main_thread() else None
    gold = library.parse(_as_latex(str(ground_truth)), parsing_timeout=seconds)
    if not gold:
        raise ValueError(f"the reference {str(ground_truth)!r} is no mathematical expression")
    answer = library.parse(solution_str, parsing_timeout=seconds)
    right = float(bool(answer) and library.verify(gold, answer, timeout_seconds=seconds))
    return {"score": right, "acc": right, "parsed": float(bool(answer))}


def _as_latex(text: str) -> str:
    """Return a reference as LaTeX math, in dollar signs unless the text is marked as math already."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


@cache
def _library() -> Any:
    try:
        import math_verify as library
    except ImportError as error:
        raise ImportError(INSTALL) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # the library warns at every call without a timeout
    return library


# Responses that contain a program, which runs in a sandbox against tests.

# Fences come in pairs, whatever the language of a block. ```words``` within one line are a pair as well, but no block.
BLOCK = re.compile(r"```[^`\n]+```|```[ \t]*([^\s`]*)[^`\n]*\n(.*?)```", re.DOTALL)
PYTHON = ("", "py", "python", "python3")


# The keys of a programming task's reference, if the reference is a mapping.
INPUTS, CHECKS = {"inputs", "outputs", "fn_name"}, {"checks", "entry_point"}


@dataclass(frozen=True)
class Printed:
    """A test of a program by its standard input and its expected standard output."""

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
    """Return 1 if the program in the response passes all tests, or with `partial` the share of tests passed.

    The program is the last Python block of the response, or the whole response without a block. The reference, as an
    object or its JSON, has one of these forms:

    * `{"inputs": [...], "outputs": [...]}` for programs that read standard input and print. With `"fn_name": NAME`, the
      inputs are arguments of calls of that function.
    * Checks, which are Python code that uses the program's functions: one text, a list of texts that count one each, or
      `{"checks": ..., "entry_point": NAME}`.

    `limits` are the fields of `meshrl.rewards.sandbox.run.Limits`. The program has access only to its interpreter and
    its own folder. Its output is compared in this process. Checks run in a second sandbox, to which the program's
    functions return plain data.
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
    """Describe the sandbox that `code` uses with these arguments. Raise `ValueError` if no sandbox works here."""
    _limits(kwargs.get("limits") or {})
    wanted = {name: kwargs[name] for name in ("interpreter", "strict", "sandbox") if name in kwargs}
    try:
        return chosen_backend(**wanted).describe()
    except SandboxError as error:
        raise ValueError(str(error)) from error


def extract_code(text: str) -> str:
    """Return the last fenced block of Python or without a language, or the whole text without such a block."""
    blocks = [found[2] for found in BLOCK.finditer(text) if found[2] is not None and found[1].lower() in PYTHON]
    return blocks[-1] if blocks else text


def read_tests(ground_truth: Any) -> list[Printed | Checks]:
    """Parse the reference of a programming task into tests. Raise `ValueError` for a reference of another form."""
    tests = ground_truth
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = ground_truth  # for example Python code that begins with a list
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
        texts = [given["checks"]] if isinstance(given["checks"], str) else given["checks"]
        if not texts:
            raise ValueError("the ground_truth of a programming task has an empty list of checks: give at least one")
        return [read_checks(text, given.get("entry_point")) for text in texts]
    inputs, outputs = list(given.get("inputs", ())), list(given.get("outputs", ()))
    if not len(inputs) == len(outputs) > 0:
        raise ValueError(f"tests need as many outputs as inputs, at least one: got {len(outputs)} and {len(inputs)}")
    pairs = zip(inputs, outputs, strict=True)
    if "fn_name" in given:
        return [call_checks(given["fn_name"], value, wanted) for value, wanted in pairs]
    return [Printed(str(value), str(wanted)) for value, wanted in pairs]


def _lines(text: str) -> list[str]:
    """Split a text into lines, without trailing white space and without empty lines at the end."""
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
    """Return 1 if the response equals the reference, except for white space around both.

    `extract` is a regular expression. If given, its last match in the response is compared: the first group, or the
    whole match of an expression without groups. The score is 0 without a match.
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
    """Return 1 if the whole response (or with `whole=False` any part) matches `pattern`. `.` matches line ends."""
    match = re.fullmatch if whole else re.search
    return float(match(pattern, solution_str.strip(), re.DOTALL) is not None)


def sort_digits(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the response is the prompt's digits in ascending order. The check needs no reference answer."""
    digits = extra_info["digits"]
    return float(solution_str == "".join(sorted(digits)))


def coin_toss(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return a pseudo-random reward of 0 or 1 for the control arm of the demo.

    The coin depends only on the response and on `extra_info`, which holds the prompt's digits. `acc` is the result of
    `sort_digits`, so that validation still measures correctness.
    """
    coin = zlib.crc32(repr((extra_info, solution_str)).encode()) & 1
    return {"score": float(coin), "acc": sort_digits(data_source, solution_str, ground_truth, extra_info)}


def nothing(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return zero. The config uses this function if only a reward model scores responses."""
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
