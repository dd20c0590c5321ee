"""Built-in reward functions: `(data_source, solution_str, ground_truth, extra_info) -> score`."""

from __future__ import annotations

import zlib
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


def coin_toss(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """A reward that knows nothing: the control arm of an experiment. Depends on the answer and the prompt alone."""
    return float(zlib.crc32(repr((extra_info, solution_str)).encode()) & 1)


BUILT_IN = {"exact_match": exact_match, "sort_digits": sort_digits, "coin_toss": coin_toss}
