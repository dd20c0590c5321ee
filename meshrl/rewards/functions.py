"""Built-in reward functions: `(data_source, solution_str, ground_truth, extra_info) -> score`.

A function may also return a dict with the `score` that trains, what else it found, and `acc`, by which validation
counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the answer is the reference, but for white space around it."""
    if ground_truth is None:
        raise ValueError("exact_match needs a reference: give the data a 'ground_truth' column")
    return float(solution_str.strip() == str(ground_truth).strip())


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


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "sort_digits": sort_digits,
    "coin_toss": coin_toss,
}
