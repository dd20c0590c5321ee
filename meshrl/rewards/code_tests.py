"""Programs as answers: run in a sandbox against tests."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from meshrl.rewards.sandbox.run import Finished, Limits, run_python

# Fences go in pairs, whatever the language of a block; ```words``` within a line are a pair, too, without a block.
BLOCK = re.compile(r"```[^`\n]+```|```[ \t]*([^\s`]*)[^`\n]*\n(.*?)```", re.DOTALL)
PYTHON = ("", "py", "python", "python3")


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    partial: bool = False,
    interpreter: str | None = None,
    strict: bool = True,
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """1 if the program in the answer passes all tests of the reference, or with `partial` the share it passes.

    The program is the answer's last Python block, or all of it. The reference (or its JSON) is `{"inputs": [...],
    "outputs": [...]}` for programs that read and print, or checks in Python that run after the program: one text, or a
    list of texts that count each. `limits` are those of `meshrl.rewards.sandbox.run.Limits`.

    Checks come into the sandbox when the program's code has run, so that it cannot read them. They share its
    interpreter, though: a program written against them (a result that is equal to everything, a look at its callers,
    `meshrl.rewards.sandbox.launch` spoken by the program itself) can still pass. Programs that read and print cannot.
    """
    program, tests = extract_code(solution_str), read_tests(ground_truth)
    bounds = _limits(limits or {})
    passed, first = 0, ""
    for checks, stdin, wanted in tests:
        told = None
        if checks is not None:
            # Said after the last check: a program that ends before, even with exit code 0, has not passed.
            wanted = secrets.token_hex(16)
            told = (checks, wanted)
        finished = run_python(program, stdin, bounds, interpreter=interpreter, strict=strict, checks=told)
        right = _passed(finished, wanted, only_end=checks is not None)
        passed += right
        if not right:
            first = first or ("wrong" if finished.status == "ok" else finished.status)
            if not partial:
                break
    share = passed / len(tests)
    score = share if partial else float(passed == len(tests))
    return {"score": score, "acc": float(passed == len(tests)), "code_status": first or "passed"}


def extract_code(text: str) -> str:
    """The last fenced block of Python or of no named language, or the whole text where there is none."""
    blocks = [found[2] for found in BLOCK.finditer(text) if found[2] is not None and found[1].lower() in PYTHON]
    return blocks[-1] if blocks else text


def read_tests(ground_truth: Any) -> list[tuple[str | None, str, str]]:
    """Each test as (checks to append or None, standard input, wanted output)."""
    tests = ground_truth
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = ground_truth  # Python that begins with a list, say
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= set(tests):
        inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
        if len(inputs) == len(outputs) > 0:
            return [(None, str(given), str(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
        raise ValueError(f"tests need as many outputs as inputs, at least one: got {len(outputs)} and {len(inputs)}")
    if isinstance(tests, str) and tests.strip():
        return [(tests, "", "")]
    if isinstance(tests, Sequence) and not isinstance(tests, str) and tests and all(isinstance(t, str) for t in tests):
        return [(test, "", "") for test in tests]
    raise ValueError(
        "the ground_truth of a programming task must be {inputs: [...], outputs: [...]}, a text of Python checks or a "
        f"list of them; got {str(ground_truth)[:80]!r}"
    )


def _passed(finished: Finished, wanted: str, only_end: bool) -> bool:
    said = _lines(finished.stdout)
    return finished.status == "ok" and (said[-1:] if only_end else said) == _lines(wanted)


def _lines(text: str) -> list[str]:
    """Lines without trailing white space, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _limits(given: Mapping[str, float]) -> Limits:
    known = {entry.name: entry.type for entry in fields(Limits)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"the sandbox has no limit {', '.join(unknown)}: it has {', '.join(known)}")
    whole = {"processes", "files", "open_files"}
    values: dict[str, Any] = {name: int(value) if name in whole else float(value) for name, value in given.items()}
    return Limits(**values)
