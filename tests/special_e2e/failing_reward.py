"""A reward that fails on some answers, each in its own way."""

import math


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Raises, returns NaN or no number on answers that begin with 1, 2 or 3; else the number of different digits."""
    first = solution_str[:1]
    if first == "1":
        raise KeyError("one")
    if first == "2":
        return math.nan
    if first == "3":
        return "three"
    return len(set(solution_str)) / 10
