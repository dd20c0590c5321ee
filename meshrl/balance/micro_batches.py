"""Micro-batches under a hard token cap, and the sample order that balances data-parallel ranks.

Planning:            `plan_micro_batches` and `order_micro_batches`, on sequence lengths alone
Cutting:             `rearrange_micro_batches` and `restore_dynamic_batch`, on batches of tensors
Data-parallel order: `order_for_data_parallel` and its metrics
"""

import difflib
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from meshrl.balance.partitions import Workload, balanced_partition

SORT_STRATEGIES: dict[str, Callable[[np.ndarray], float]] = {
    "sum_sq": lambda lengths: float(np.square(lengths.astype(np.float64)).sum()),
    "min": lambda lengths: float(lengths.min(initial=np.iinfo(np.int64).max)),
    "max": lambda lengths: float(lengths.max(initial=0)),
    "mean": lambda lengths: float(lengths.mean()) if len(lengths) else 0.0,
}

# Micro-batch counts tried from the lower bound up, before falling back to the best-fit packing. For most batches the
# first count works.
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
    """Plan micro-batches of at most `max_token_len` tokens each, as arrays of sample indices.

    `lengths` `[samples]` are token counts. The plan is deterministic.

    The number of micro-batches is `fixed_count` if given. Otherwise it is the smallest number found that is a multiple
    of `num_batches_divided_by` and at least `min_num_micro_batch` and `min_count` (the number other ranks need). A
    higher number is reached by splitting micro-batches. The last micro-batches are empty only if the number exceeds
    the number of samples (or of groups). Runs of `group_size` consecutive samples stay together. Work is balanced by
    `workload` (default: tokens) as far as the cap allows.
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
    """Sort micro-batches largest first by `sort_strategy`: sum_sq, min, max or mean of their sample lengths.

    None keeps the order. `small_at_both_ends` then moves the small micro-batches to both ends and the largest to the
    middle, where a pipeline is full. Empty micro-batches come last.
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
    """Raise a ValueError if a sample, or a group that stays together, exceeds the token cap of a micro-batch.

    `units` are the token counts of the groups of `group_size` samples.
    """
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
    # Two units with more than half of the cap each never fit into one micro-batch, hence the second lower bound.
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
    """Return exactly `count` micro-batches within the cap, balanced if possible, or None if no such plan was found."""
    if count >= len(units):
        return [np.asarray([unit]) for unit in range(len(units))] + [np.empty(0, np.int64)] * (count - len(units))
    balanced_by = [work] if np.array_equal(work, units) else [work, units.astype(np.float64)]
    for measure in balanced_by:
        plan = balanced_partition(measure, count, equal_size=False)
        if max(int(units[part].sum()) for part in plan) <= max_token_len:
            return plan
    return _split_up(packed, work, count) if len(packed) <= count else None


def _best_fit(units: np.ndarray, max_token_len: int) -> list[np.ndarray]:
    """Pack units by best-fit decreasing: longest first, each into the fullest micro-batch that still has room."""
    room: list[tuple[int, int]] = []  # (tokens left, index of the bin), in ascending order
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
    """Halve the heaviest micro-batch with at least two units until there are `count` micro-batches."""
    plan = list(packed)
    while len(plan) < count:
        heaviest = max((p for p in range(len(plan)) if len(plan[p]) > 1), key=lambda p: float(work[plan[p]].sum()))
        part = plan.pop(heaviest)
        plan.extend(part[half] for half in balanced_partition(work[part], 2, equal_size=False, algorithm="lpt"))
    return plan


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# Cutting batches (DataProto, TensorDict or dict of tensors) into micro-batches, and restoring the order of results.


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    fixed_num_micro_batches: int | None = None,
    sort_strategy: str = "sum_sq",
    small_at_both_ends: bool = True,
    workload: Workload | None = None,
) -> tuple[list[Any], list[list[int]]]:
    """Cut `batch` into micro-batches of at most `max_token_len` tokens; return the parts and their sample indices.

    With `dp_group` and `same_micro_num_in_dp`, all ranks of the group get the same number of micro-batches (one
    all-reduce). If the samples of one rank break the cap, all ranks raise. `use_dynamic_bsz_balance` orders the
    micro-batches by `sort_strategy`, with small micro-batches at both ends for pipelines. Runs of `force_group_size`
    consecutive samples stay together.
    """
    lengths = sequence_lengths(batch)
    options: dict[str, Any] = {
        "num_batches_divided_by": num_batches_divided_by or 1,
        "min_num_micro_batch": min_num_micro_batch or 1,
        "fixed_count": fixed_num_micro_batches,
        "group_size": force_group_size,
        "workload": workload,
    }
    if dp_group is not None and same_micro_num_in_dp:
        plan = _plan_together(lengths, max_token_len, dp_group, options)
    else:
        plan = plan_micro_batches(lengths, max_token_len, **options)
    if use_dynamic_bsz_balance:
        plan = order_micro_batches(plan, lengths, sort_strategy, small_at_both_ends)
    return [select_samples(batch, part) for part in plan], [part.tolist() for part in plan]


def _plan_together(
    lengths: np.ndarray, max_token_len: int, dp_group: dist.ProcessGroup, options: dict[str, Any]
) -> list[np.ndarray]:
    """Plan on each rank alone, agree on the largest count by an all-reduce, and replan if this rank had fewer.

    The cap is checked on every rank. A rank that cannot keep the cap makes the other ranks raise as well.
    """
    error: ValueError | None = None
    plan: list[np.ndarray] = []
    try:
        plan = plan_micro_batches(lengths, max_token_len, **options)
    except ValueError as raised:
        # Raised after the all-reduce only, because the other ranks wait in the all-reduce for this rank's failure flag.
        error = raised
    on_gpu = "nccl" in dist.get_backend(dp_group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    agreed = torch.tensor([len(plan), int(error is not None)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
    count, failed = (int(number) for number in agreed.tolist())
    if error is not None:
        try:
            raise error
        finally:
            # The traceback holds this frame, which would keep the process group and its threads alive to the end.
            error = None
    if failed:
        raise ValueError(
            f"another data-parallel rank cannot keep max_token_len={max_token_len}; its error names the sample"
        )
    if count == len(plan):
        return plan
    return plan_micro_batches(lengths, max_token_len, **options | {"min_count": count})


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    **options: Any,
) -> tuple[list[Any], list[list[int]]]:
    """Call `rearrange_micro_batches` under the name that code with a DataProto uses.

    `restore_dynamic_batch` puts the results back in the order of the samples.
    """
    return rearrange_micro_batches(
        data,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
        **options,
    )


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Reorder concatenated micro-batch results `[samples, ...]` into the order of the original samples.

    `batch_idx_list` holds the sample indices of each micro-batch, as `rearrange_micro_batches` returned them.
    """
    order = np.asarray([index for part in batch_idx_list for index in part], dtype=np.int64)
    count = len(data.unbind()) if data.is_nested else data.shape[0]
    if len(order) != count or not np.array_equal(np.sort(order), np.arange(count)):
        raise ValueError(f"batch_idx_list with {len(order)} entries is no permutation of the {count} rows of data")
    back = np.empty_like(order)
    back[order] = np.arange(count)
    return _select_rows(data, back)


def sequence_lengths(batch: Any) -> np.ndarray:
    """Return the token count of each sample, `[samples]` int64.

    The counts come from nested `input_ids`, or else from the number of ones in `attention_mask`.
    """
    tensors = batch.batch if hasattr(batch, "select_idxs") else batch
    ids = tensors["input_ids"] if "input_ids" in tensors.keys() else None
    if ids is not None and ids.is_nested:
        return ids.offsets().diff().cpu().numpy().astype(np.int64)
    if "attention_mask" not in tensors.keys():
        raise ValueError(f"the batch needs attention_mask or nested input_ids; it has {sorted(tensors.keys())}")
    return tensors["attention_mask"].sum(-1).cpu().numpy().astype(np.int64)


def select_samples(batch: Any, samples: np.ndarray) -> Any:
    """Select samples of a DataProto (by its `select_idxs`), a TensorDict or a dict.

    Values without a sample dimension pass through.
    """
    if hasattr(batch, "select_idxs"):
        return batch.select_idxs(torch.from_numpy(samples))
    rows = {key: _select_value(batch[key], samples) for key in batch.keys()}
    if isinstance(batch, dict):
        return rows
    return type(batch)(rows, batch_size=[len(samples)])


def _select_value(value: Any, samples: np.ndarray) -> Any:
    if isinstance(value, torch.Tensor):
        return _select_rows(value, samples) if value.dim() else value
    if isinstance(value, np.ndarray):
        return value[samples] if value.ndim else value
    if isinstance(value, Mapping):
        return {key: _select_value(inner, samples) for key, inner in value.items()}
    return value


def _select_rows(data: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if not data.is_nested:
        return data[torch.from_numpy(rows).to(data.device)]
    if len(rows) == 0 and data.layout is torch.jagged:  # torch cannot build a nested tensor without rows
        no_rows = torch.zeros(1, dtype=torch.int64, device=data.device)
        return torch.nested.nested_tensor_from_jagged(data.values()[:0], no_rows)
    parts = data.unbind()
    return torch.nested.as_nested_tensor([parts[row] for row in rows.tolist()], layout=data.layout)


def pad_sequences_to_fixed_length(batch: Any, target_length: int, pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Pad every sequence tensor on the right from `[..., width]` to `[..., target_length]`, for one static shape.

    All tensors of the width of `attention_mask` are padded. `input_ids` are padded with `pad_token_id`,
    `position_ids` continue counting, and all other tensors are padded with 0.
    """
    width = batch["attention_mask"].shape[-1]
    if width > target_length:
        raise ValueError(f"sequences are padded to {width} already, more than target_length={target_length}")
    extra = target_length - width
    padded: dict[str, torch.Tensor] = {}
    for key in batch.keys():
        value = batch[key]
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[-1] != width:
            padded[key] = value
        elif key == "position_ids":
            steps = torch.arange(1, extra + 1, device=value.device, dtype=value.dtype)
            padded[key] = torch.cat([value, value[..., -1:] + steps], dim=-1)
        else:
            padded[key] = torch.nn.functional.pad(value, (0, extra), value=pad_token_id if key == "input_ids" else 0)
    return padded


# Sample order of a whole batch: every data-parallel rank gets equally many samples and nearly equal work.


def order_for_data_parallel(
    lengths: np.ndarray,
    dp_size: int,
    mini_batches: int = 1,
    algorithm: str = "auto",
    group_size: int = 1,
    workload: Workload | None = None,
) -> np.ndarray:
    """Return the permutation `[samples]` that balances work over `dp_size` ranks.

    Reorder the batch with the permutation and cut it into `dp_size` equal parts, one per rank.

    Mini-batches keep their samples: the m-th of the `mini_batches` equal parts of each rank holds samples of the m-th
    part of the original order. Counts are equal and work is balanced within each mini-batch. Runs of `group_size`
    samples stay on one rank if a mini-batch is a multiple of `group_size * dp_size`. With one rank the order is
    unchanged.
    """
    lengths = np.asarray(lengths)
    batch = len(lengths)
    if dp_size < 1 or mini_batches < 1 or batch % (dp_size * mini_batches):
        raise ValueError(
            f"a batch of {batch} samples does not divide into {mini_batches} mini-batches for {dp_size} data-parallel "
            f"ranks: it must be a multiple of {dp_size * mini_batches}"
        )
    if dp_size == 1:
        return np.arange(batch)
    work = np.asarray(lengths if workload is None else workload(lengths), dtype=np.float64)
    size = batch // mini_batches
    unit = group_size if group_size > 1 and size % (group_size * dp_size) == 0 else 1
    loads = np.zeros(dp_size)
    rank_samples: list[list[np.ndarray]] = [[] for _ in range(dp_size)]
    for start in range(0, batch, size):
        unit_work = work[start : start + size].reshape(-1, unit).sum(axis=1)
        parts = balanced_partition(unit_work, dp_size, equal_size=True, algorithm=algorithm)
        part_work = np.array([unit_work[part].sum() for part in parts])
        # The heaviest part goes to the rank with the least work so far, so that the ranks' totals balance as well.
        for rank, part in zip(np.argsort(loads, kind="stable"), np.argsort(-part_work, kind="stable"), strict=True):
            loads[rank] += part_work[part]
            rank_samples[rank].append((start + parts[part][:, None] * unit + np.arange(unit)).ravel())
    return np.concatenate([samples for rank in rank_samples for samples in rank])


def log_seqlen_unbalance(
    seqlen_list: Sequence[int] | np.ndarray, partitions: Sequence[Sequence[int]] | Sequence[np.ndarray], prefix: str
) -> dict[str, float]:
    """Return metrics `prefix/...` on the token sums of the parts before and after balancing.

    "Before" means equal consecutive runs of the given order.
    """
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    before = np.array([part.sum() for part in np.array_split(lengths, len(partitions))])
    after = np.array([lengths[np.asarray(part, dtype=np.int64)].sum() for part in partitions])
    return {
        f"{prefix}/min": int(before.min()),
        f"{prefix}/max": int(before.max()),
        f"{prefix}/minmax_diff": int(before.max() - before.min()),
        f"{prefix}/balanced_min": int(after.min()),
        f"{prefix}/balanced_max": int(after.max()),
        f"{prefix}/mean": float(lengths.sum() / len(partitions)),
    }


def seqlen_metrics(
    lengths: np.ndarray, order: np.ndarray, dp_size: int, prefix: str = "global_seqlen"
) -> dict[str, float]:
    """Return the metrics of `log_seqlen_unbalance` for a permutation from `order_for_data_parallel`."""
    return log_seqlen_unbalance(lengths, np.split(np.asarray(order), dp_size), prefix)
