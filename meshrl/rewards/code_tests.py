"""Programs as answers: run in a sandbox against tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshrl.rewards.sandbox.backends import SandboxError
from meshrl.rewards.sandbox.checks import Checks, call_checks, read_checks
from meshrl.rewards.sandbox.run import Limits, chosen_backend, run_checks, run_python

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
