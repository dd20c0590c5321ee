"""Micro-batches for a pipeline: a count that the schedule takes, even work, small ones at both ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshrl.balance import balanced_partition, order_micro_batches
from meshrl.engines.micro_batches import split_into_micro_batches


def split_for_pipeline(
    lengths: np.ndarray,
    *,
    max_token_len: int | None,
    micro_batch_size: int | None,
    stages: int,
    multiple: int,
    algorithm: str,
    largest: Callable[[int], int],
) -> list[np.ndarray | None]:
    """Row indices of each micro-batch; None marks a stand-in. Their number is the same on all data-parallel ranks.

    It is a `multiple` of what the interleaved schedule takes at a time; `largest` gives the maximum over the ranks.
    """
    plan = split_into_micro_batches(
        lengths,
        max_token_len=max_token_len,
        micro_batch_size=micro_batch_size,
        agree=lambda count: -(-largest(count) // multiple) * multiple,
    )
    if stages == 1:
        return plan
    real = [part for part in plan if part is not None]
    if max_token_len is not None:
        real = _balanced(real, lengths, max_token_len, algorithm)
    # A pipeline fills and drains at its ends: the largest micro-batches belong where it is full.
    ordered = order_micro_batches(real, lengths, "sum_sq", small_at_both_ends=True)
    return [*ordered, *[None] * (len(plan) - len(real))]


def _balanced(plan: list[np.ndarray], lengths: np.ndarray, max_token_len: int, algorithm: str) -> list[np.ndarray]:
    """The same number of micro-batches with more even tokens, if the budget of tokens allows them."""
    parts = balanced_partition(lengths.astype(np.float64), len(plan), equal_size=False, algorithm=algorithm)
    if any(not len(part) or lengths[part].sum() > max_token_len for part in parts):
        return plan
    return [np.sort(np.asarray(part)) for part in parts]
