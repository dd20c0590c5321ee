"""A tool and a reward for examples/tools: the day of the week of a date, which models guess badly."""

import datetime
import re

from meshrl.agents.tools import tool


@tool(timeout=5.0)
def weekday(year: int, month: int, day: int) -> str:
    """Tells the day of the week of a date.

    Args:
        year: such as 2024
        month: 1 to 12
        day: of the month
    """
    return datetime.date(year, month, day).strftime("%A").lower()


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 if the last word of the answer is the day; calling the tool earns nothing by itself."""
    words = re.findall(r"[a-z]+", solution_str.lower())
    return {"score": float(bool(words) and words[-1] == ground_truth), "acc": float(ground_truth in words)}
