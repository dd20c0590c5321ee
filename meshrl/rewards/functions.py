"""Built-in reward functions: `(data_source, solution_str, ground_truth, extra_info) -> score`.

A function may also return a dict with the `score` that trains, what else it found, and `acc`, by which validation
counts. What follows the `*` in a signature is set by `reward.kwargs`. Light: every process of a pool loads this.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

from meshrl.rewards.code_tests import code
from meshrl.rewards.judge import judge
from meshrl.rewards.math_answers import math_verify


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
