"""Mathematical answers, compared by what they mean: `math_verify` (extra `math`)."""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any

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
