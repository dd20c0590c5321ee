"""How a rank cuts its mini-batch into micro-batches, in step with its data-parallel peers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshrl.balance import plan_micro_batches
from meshrl.balance.micro_batches import check_budget


def split_into_micro_batches(
    lengths: np.ndarray,
    *,
    max_token_len: int | None,
    micro_batch_size: int | None,
    agree: Callable[[int], int],
    kin: np.ndarray | None = None,
) -> list[np.ndarray | None]:
    """Row indices of each micro-batch: under a token budget, or of a fixed size when there is none.

    `agree` returns the largest count among the ranks. A rank with fewer micro-batches splits further, and where it has
    not even enough samples for that, adds None: a stand-in to be run without effect. Under a budget, rows that have
    the same number in `kin` come into as few micro-batches as can be.
    """
    if max_token_len is None and not micro_batch_size:
        raise ValueError("without use_dynamic_bsz a micro-batch size is needed: set ppo_micro_batch_size_per_gpu")
    if max_token_len is not None and len(lengths) and lengths.sum() <= max_token_len:
        plan = [np.arange(len(lengths))]
    elif max_token_len is not None and kin is not None and len(set(kin.tolist())) < len(kin):
        plan = runs_of_kin(lengths, max_token_len, kin)
    elif max_token_len is not None:
        plan = [part for part in plan_micro_batches(lengths, max_token_len) if len(part)]
    else:
        plan = fixed_size_parts(len(lengths), micro_batch_size or 1)
    count = agree(len(plan))
    while len(plan) < min(count, len(lengths)):
        plan = split_heaviest(plan, lengths)
    return [*plan, *[None] * (count - len(plan))]


def split_by_units(
    lengths: np.ndarray, rows_together: int, split: Callable[[np.ndarray], list[np.ndarray | None]]
) -> list[np.ndarray | None]:
    """What `split` makes of the lengths of whole units of so many neighbouring rows, as rows."""
    inside = np.arange(rows_together)
    plan = split(lengths.reshape(-1, rows_together).sum(1))
    return [None if part is None else (part[:, None] * rows_together + inside).ravel() for part in plan]


def runs_of_kin(lengths: np.ndarray, max_token_len: int, kin: np.ndarray) -> list[np.ndarray]:
    """Rows next to their kin, cut into the fewest runs of this order that the budget allows, of about the same size."""
    check_budget(lengths, max_token_len)
    _, first, number = np.unique(kin, return_index=True, return_inverse=True)
    order = np.argsort(first[number], kind="stable")
    totals = lengths[order].cumsum()

    def runs(cap: int) -> list[np.ndarray]:
        made, start = [], 0
        while start < len(order):
            end = int(np.searchsorted(totals, (totals[start - 1] if start else 0) + cap, "right"))
            made.append(order[start:end])
            start = end
        return made

    fewest = len(runs(max_token_len))
    low, high = max(int(lengths.max()), -(-int(totals[-1]) // fewest)), max_token_len
    while low < high:
        cap = (low + high) // 2
        low, high = (low, cap) if len(runs(cap)) <= fewest else (cap + 1, high)
    return runs(high)


def split_heaviest(plan: list[np.ndarray], lengths: np.ndarray) -> list[np.ndarray]:
    """Halves the micro-batch with the most tokens among those of more than one row."""
    loads = [int(lengths[part].sum()) if len(part) > 1 else -1 for part in plan]
    at = int(np.argmax(loads))
    left, right = np.array_split(plan[at], 2)
    return [*plan[:at], left, right, *plan[at + 1 :]]


def fixed_size_parts(samples: int, size: int) -> list[np.ndarray]:
    """Neighbouring rows, `size` at a time; the last part may be smaller."""
    return [np.arange(start, min(start + size, samples)) for start in range(0, samples, size)]
