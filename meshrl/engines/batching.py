"""Micro-batches: how a rank cuts its mini-batch, in step with its data-parallel peers, and how results are merged.

- `split_into_micro_batches`, `split_by_units`: under a token budget or of a fixed size.
- `in_batch_order`, `column_in_batch_order`, `add_metrics`: results of micro-batches and ranks.
- `split_for_pipeline`: micro-batches in number and order for a pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.balance import balanced_partition, order_micro_batches, plan_micro_batches
from meshrl.balance.micro_batches import check_budget
from meshrl.data.batch import object_array
from meshrl.telemetry.time_ledger import booked


def split_into_micro_batches(
    lengths: np.ndarray,
    *,
    max_token_len: int | None,
    micro_batch_size: int | None,
    agree: Callable[[int], int],
    kin: np.ndarray | None = None,
) -> list[np.ndarray | None]:
    """Return the row indices of each micro-batch: under a token budget, or of a fixed size if there is no budget.

    `agree` returns the largest count among the ranks. A rank with fewer micro-batches splits further. If it lacks
    samples for that, it adds None: a stand-in that runs without effect. Under a budget, rows with the same number in
    `kin` are kept in as few micro-batches as possible.
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
    """Apply `split` to units of `rows_together` neighbouring rows, and return its micro-batches as row indices."""
    inside = np.arange(rows_together)
    plan = split(lengths.reshape(-1, rows_together).sum(1))
    return [None if part is None else (part[:, None] * rows_together + inside).ravel() for part in plan]


def runs_of_kin(lengths: np.ndarray, max_token_len: int, kin: np.ndarray) -> list[np.ndarray]:
    """Order rows so that kin are neighbours, and cut this order into micro-batches of similar size.

    The number of micro-batches is the smallest that the token budget allows for this order.
    """
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
    """Halve the micro-batch with the most tokens among the micro-batches of more than one row."""
    loads = [int(lengths[part].sum()) if len(part) > 1 else -1 for part in plan]
    at = int(np.argmax(loads))
    left, right = np.array_split(plan[at], 2)
    return [*plan[:at], left, right, *plan[at + 1 :]]


def fixed_size_parts(samples: int, size: int) -> list[np.ndarray]:
    """Return neighbouring rows, `size` at a time; the last part may be smaller."""
    return [np.arange(start, min(start + size, samples)) for start in range(0, samples, size)]


# Merging the results of a batch's micro-batches and ranks.


def in_batch_order(rows: Sequence[np.ndarray | None], outputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the outputs of all micro-batches on the host, in batch order; stand-ins (None) are left out."""
    real = [(part, output) for part, output in zip(rows, outputs, strict=True) if part is not None]
    order = torch.from_numpy(np.concatenate([part for part, _ in real])).argsort()
    return {name: torch.cat([output[name] for _, output in real]).cpu()[order] for name in real[0][1]}


def column_in_batch_order(rows: Sequence[np.ndarray | None], columns: Sequence[Sequence[Any]]) -> np.ndarray:
    """Merge the micro-batches' columns of Python values, one per sample, in batch order; stand-ins are left out."""
    real = [(part, column) for part, column in zip(rows, columns, strict=True) if part is not None]
    together = np.empty(sum(len(part) for part, _ in real), object)
    for part, column in real:
        together[part] = object_array(column)
    return together


def add_metrics(parts: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Add metrics over micro-batches and the group's ranks; for names that end in `_max`, take the largest."""
    names = sorted(parts[0], key=lambda name: name.endswith("_max"))
    sums = sum(not name.endswith("_max") for name in names)
    table = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in parts])
    added, largest = table[:, :sums].sum(0), table[:, sums:].amax(0)
    if group is not None:
        with booked("wait_peers"):
            dist.all_reduce(added, group=group)
            if len(largest):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, [*added.tolist(), *largest.tolist()], strict=True))


# Micro-batches for a pipeline: a number that the schedule accepts, even work, small micro-batches at both ends.


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
    """Return the row indices of each micro-batch, as many on every data-parallel rank; None marks a stand-in.

    The number of micro-batches is divisible by `multiple`, the group size of the interleaved schedule. `largest`
    returns the maximum over the ranks.
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
    """Return equally many micro-batches with more even token counts, or `plan` if those exceed the budget."""
    parts = balanced_partition(lengths.astype(np.float64), len(plan), equal_size=False, algorithm=algorithm)
    if any(not len(part) or lengths[part].sum() > max_token_len for part in parts):
        return plan
    return [np.sort(np.asarray(part)) for part in parts]
