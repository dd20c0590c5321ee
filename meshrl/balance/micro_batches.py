"""Which samples of a mini-batch go through the model together, under a hard cap of tokens."""

import difflib
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from meshrl.balance.partitions import balanced_partition
from meshrl.balance.workload import Workload

SORT_STRATEGIES: dict[str, Callable[[np.ndarray], float]] = {
    "sum_sq": lambda lengths: float(np.square(lengths.astype(np.float64)).sum()),
    "min": lambda lengths: float(lengths.min(initial=np.iinfo(np.int64).max)),
    "max": lambda lengths: float(lengths.max(initial=0)),
    "mean": lambda lengths: float(lengths.mean()) if len(lengths) else 0.0,
}

# Counts tried between the lower bound and what best-fit is known to reach: most batches succeed at the first.
BALANCED_TRIES = 4


def plan_micro_batches(
    lengths: np.ndarray,
    max_token_len: int,
    *,
    num_batches_divided_by: int = 1,
    min_num_micro_batch: int = 1,
    min_count: int | None = None,
    fixed_count: int | None = None,
    group_size: int = 1,
    workload: Workload | None = None,
    sort_strategy: str | None = None,
    small_at_both_ends: bool = False,
) -> list[np.ndarray]:
    """Micro-batches as arrays of sample numbers, none with more than `max_token_len` tokens; deterministic.

    Their number is the smallest found that is at least `min_num_micro_batch` and `min_count` (what other ranks need)
    and divides by `num_batches_divided_by`, or exactly `fixed_count`. A higher number is reached by splitting; only
    when it exceeds the number of samples are the last micro-batches empty. `group_size` consecutive samples stay
    together. Work is balanced by `workload` (default: tokens) as far as the cap allows.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    units = _unit_lengths(lengths, group_size)
    check_budget(units, max_token_len, group_size)
    work = units.astype(np.float64)
    if workload is not None:
        work = np.asarray(workload(lengths), dtype=np.float64).reshape(-1, group_size).sum(axis=1)
    if fixed_count is not None:
        plan = _fixed_plan(units, work, max_token_len, fixed_count)
    else:
        at_least = max(min_num_micro_batch, min_count or 0)
        plan = _smallest_plan(units, work, max_token_len, at_least, num_batches_divided_by)
    plan = [_samples_of(units_in_batch, group_size) for units_in_batch in plan]
    return order_micro_batches(plan, lengths, sort_strategy, small_at_both_ends)


def order_micro_batches(
    plan: list[np.ndarray], lengths: np.ndarray, sort_strategy: str | None, small_at_both_ends: bool
) -> list[np.ndarray]:
    """Largest first by `sort_strategy` (sum_sq, min, max, mean of the lengths; None keeps the order).

    `small_at_both_ends` then puts the small ones at both ends and the largest in the middle, where a pipeline is full.
    """
    if sort_strategy is None:
        return plan
    if sort_strategy not in SORT_STRATEGIES:
        near = difflib.get_close_matches(sort_strategy, SORT_STRATEGIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown sort_strategy {sort_strategy!r}; did you mean {near!r}? Known: {', '.join(SORT_STRATEGIES)}"
        )
    key = SORT_STRATEGIES[sort_strategy]
    filled = [part for part in plan if len(part)]
    empty = [part for part in plan if not len(part)]
    falling = sorted(filled, key=lambda part: (-key(lengths[part]), int(part[0])))
    if small_at_both_ends:
        falling = falling[::2][::-1] + falling[1::2]
    return falling + empty


def _unit_lengths(lengths: np.ndarray, group_size: int) -> np.ndarray:
    if lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(f"lengths must be a vector of non-negative numbers, got {lengths!r}")
    if group_size < 1 or len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} samples do not divide into groups of {group_size}")
    return lengths.reshape(-1, group_size).sum(axis=1)


def check_budget(units: np.ndarray, max_token_len: int, group_size: int = 1) -> None:
    """Raises where a sample, or a group of samples that stays together, has more tokens than a micro-batch may have."""
    too_long = np.flatnonzero(units > max_token_len)
    if len(too_long):
        first = int(too_long[0])
        what = (
            f"sample {first}" if group_size == 1 else f"the group of samples {_samples_of(first, group_size).tolist()}"
        )
        raise ValueError(
            f"{what} has {units[first]} tokens, more than max_token_len={max_token_len} ({len(too_long)} such in all): "
            "raise the token budget (…_max_token_len_per_gpu) or lower the sequence length"
        )


def _samples_of(units: np.ndarray | int, group_size: int) -> np.ndarray:
    return (np.atleast_1d(units)[:, None] * group_size + np.arange(group_size)).ravel()


def _smallest_plan(
    units: np.ndarray, work: np.ndarray, max_token_len: int, at_least: int, divided_by: int
) -> list[np.ndarray]:
    if divided_by < 1:
        raise ValueError(f"num_batches_divided_by must be at least 1, got {divided_by}")
    # More than half of the cap each: no two of these fit together.
    lower = max(-(-int(units.sum()) // max_token_len), int((units * 2 > max_token_len).sum()), at_least)
    packed = _best_fit(units, max_token_len)
    for attempt in range(BALANCED_TRIES):
        count = _round_up(lower, divided_by) + attempt * divided_by
        plan = _plan_of_count(units, work, max_token_len, count, packed)
        if plan is not None:
            return plan
    plan = _plan_of_count(units, work, max_token_len, _round_up(max(len(packed), lower), divided_by), packed)
    assert plan is not None, "the packing itself is a plan"
    return plan


def _fixed_plan(units: np.ndarray, work: np.ndarray, max_token_len: int, count: int) -> list[np.ndarray]:
    packed = _best_fit(units, max_token_len)
    plan = _plan_of_count(units, work, max_token_len, count, packed)
    if plan is None:
        raise ValueError(
            f"{len(units)} samples with {units.sum()} tokens do not fit into fixed_num_micro_batches={count} "
            f"of at most max_token_len={max_token_len}; {len(packed)} would do"
        )
    return plan


def _plan_of_count(
    units: np.ndarray, work: np.ndarray, max_token_len: int, count: int, packed: list[np.ndarray]
) -> list[np.ndarray] | None:
    """Exactly `count` micro-batches within the cap, balanced if possible, or None if none was found."""
    if count >= len(units):
        return [np.asarray([unit]) for unit in range(len(units))] + [np.empty(0, np.int64)] * (count - len(units))
    balanced_by = [work] if np.array_equal(work, units) else [work, units.astype(np.float64)]
    for measure in balanced_by:
        plan = balanced_partition(measure, count, equal_size=False)
        if max(int(units[part].sum()) for part in plan) <= max_token_len:
            return plan
    return _split_up(packed, work, count) if len(packed) <= count else None


def _best_fit(units: np.ndarray, max_token_len: int) -> list[np.ndarray]:
    """Longest first, each into the fullest micro-batch that still has room for it."""
    room: list[tuple[int, int]] = []  # rising: (room left, bin)
    bins: list[list[int]] = []
    for unit in np.argsort(-units, kind="stable").tolist():
        length = int(units[unit])
        place = bisect_left(room, (length, -1))
        if place == len(room):
            bins.append([unit])
            insort(room, (max_token_len - length, len(bins) - 1))
        else:
            left, number = room.pop(place)
            bins[number].append(unit)
            insort(room, (left - length, number))
    return [np.sort(np.asarray(units_in_bin, dtype=np.int64)) for units_in_bin in bins]


def _split_up(packed: list[np.ndarray], work: np.ndarray, count: int) -> list[np.ndarray]:
    """Halve the heaviest micro-batch that has two samples until there are `count`."""
    plan = list(packed)
    while len(plan) < count:
        heaviest = max((p for p in range(len(plan)) if len(plan[p]) > 1), key=lambda p: float(work[plan[p]].sum()))
        part = plan.pop(heaviest)
        plan.extend(part[half] for half in balanced_partition(work[part], 2, equal_size=False, algorithm="lpt"))
    return plan


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
