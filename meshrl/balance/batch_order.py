"""The order of a whole batch that gives every data-parallel rank as many samples and nearly as much work."""

from collections.abc import Sequence

import numpy as np

from meshrl.balance.partitions import balanced_partition
from meshrl.balance.workload import Workload


def order_for_data_parallel(
    lengths: np.ndarray,
    dp_size: int,
    mini_batches: int = 1,
    algorithm: str = "auto",
    group_size: int = 1,
    workload: Workload | None = None,
) -> np.ndarray:
    """A permutation of the samples: reorder with it, cut into `dp_size` equal parts, one a rank.

    Mini-batches stay what they were: the m-th of `mini_batches` equal parts of each rank holds samples of the m-th
    part of the original order, with equal counts and balanced work. Runs of `group_size` samples stay on one rank where
    a mini-batch is a multiple of `group_size * dp_size`. With one rank the order is unchanged.
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
        # The heaviest part to the rank that has done least, so that whole ranks balance over the mini-batches too.
        for rank, part in zip(np.argsort(loads, kind="stable"), np.argsort(-part_work, kind="stable"), strict=True):
            loads[rank] += part_work[part]
            rank_samples[rank].append((start + parts[part][:, None] * unit + np.arange(unit)).ravel())
    return np.concatenate([samples for rank in rank_samples for samples in rank])


def log_seqlen_unbalance(
    seqlen_list: Sequence[int] | np.ndarray, partitions: Sequence[Sequence[int]] | Sequence[np.ndarray], prefix: str
) -> dict[str, float]:
    """Token sums of the parts before (equal runs of the given order) and after balancing, named `prefix/...`."""
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
    """The metrics of `log_seqlen_unbalance` for an order from `order_for_data_parallel`."""
    return log_seqlen_unbalance(lengths, np.split(np.asarray(order), dp_size), prefix)
