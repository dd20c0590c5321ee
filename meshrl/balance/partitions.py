"""Splitting numbers into k parts of nearly equal sums, by name.

`equal_size=True` also asks for equal counts. The work is the number given per item; see `workload.py` for turning
lengths into tokens, squared lengths or FLOPs. Everything here is deterministic: the budget of `auto` is compared with
estimated costs, not with a clock, so that every rank that plans the same batch gets the same plan.
"""

import difflib
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from meshrl.balance.exact import exact_is_cheap, exact_partition
from meshrl.balance.karmarkar_karp import karmarkar_karp, karmarkar_karp_seconds
from meshrl.balance.swaps import refine_by_swaps

Partition = list[np.ndarray]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | np.ndarray,
    k_partitions: int,
    equal_size: bool,
    algorithm: str = "auto",
    workload: Callable[[np.ndarray], np.ndarray] | None = None,
    time_budget_s: float = 0.1,
) -> list[list[int]]:
    """k lists of item numbers, each rising, with nearly equal sums of work (`workload(lengths)`, or the lengths).

    `algorithm`: kk, greedy, greedy_improved, lpt, dp, or auto (the best of those whose estimated cost is within
    `time_budget_s`).
    """
    lengths = np.asarray(seqlen_list)
    work = np.asarray(lengths if workload is None else workload(lengths), dtype=np.float64)
    return [part.tolist() for part in balanced_partition(work, k_partitions, equal_size, algorithm, time_budget_s)]


def balanced_partition(
    work: np.ndarray, k: int, equal_size: bool, algorithm: str = "auto", time_budget_s: float = 0.1
) -> Partition:
    """The array form of `get_seqlen_balanced_partitions`."""
    _check(work, k, equal_size)
    if algorithm == "auto":
        names = _affordable(len(work), k, equal_size, time_budget_s)
    elif algorithm in ALGORITHMS:
        names = [algorithm]
    else:
        near = difflib.get_close_matches(algorithm, [*ALGORITHMS, "auto"], n=1, cutoff=0.0)[0]
        known = ", ".join(["auto", *ALGORITHMS])
        raise ValueError(f"unknown balance algorithm {algorithm!r}; did you mean {near!r}? Known: {known}")
    candidates = [ALGORITHMS[name](work, k, equal_size) for name in names]
    best = min(candidates, key=lambda parts: max(work[part].sum() for part in parts))
    return [np.sort(part) for part in best]


def _check(work: np.ndarray, k: int, equal_size: bool) -> None:
    if k < 1:
        raise ValueError(f"k_partitions must be at least 1, got {k}")
    if work.ndim != 1 or len(work) < k:
        raise ValueError(f"{len(work)} items cannot fill k_partitions={k} parts: every part needs at least one")
    if equal_size and len(work) % k:
        raise ValueError(f"equal_size needs a multiple of k_partitions: {len(work)} items do not divide by {k}")
    bad = np.flatnonzero(~np.isfinite(work) | (work < 0))
    if len(bad):
        raise ValueError(f"seqlen_list must be finite and not negative: item {bad[0]} is {work[bad[0]]}")


def _affordable(n: int, k: int, equal_size: bool, time_budget_s: float) -> list[str]:
    if exact_is_cheap(n, k):
        return ["dp"]
    names = ["lpt"]
    if karmarkar_karp_seconds(n, k, equal_size) <= time_budget_s:
        names.append("kk")
    return names


def greedy(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Items in their given order, each to the part with the least work that has room."""
    return _assign_in_order(work, np.arange(len(work)), k, equal_size)


def greedy_improved(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Items by falling work, each to the part with the least work that has room."""
    return _assign_in_order(work, np.argsort(-work, kind="stable"), k, equal_size)


def _assign_in_order(work: np.ndarray, order: np.ndarray, k: int, equal_size: bool) -> Partition:
    room = len(work) // k if equal_size else len(work)
    heap = [(0.0, 0, part) for part in range(k)]
    parts: list[list[int]] = [[] for _ in range(k)]
    for item, amount in zip(order.tolist(), work[order].tolist(), strict=True):
        load, count, part = heapq.heappop(heap)
        parts[part].append(item)
        if count + 1 < room:
            heapq.heappush(heap, (load + amount, count + 1, part))
    return _without_empty([np.asarray(part, dtype=np.int64) for part in parts], work)


def _without_empty(parts: Partition, work: np.ndarray) -> Partition:
    """Give every empty part (possible where items have no work) one item of the part with the most items."""
    for number, part in enumerate(parts):
        if len(part) == 0:
            donor = max(range(len(parts)), key=lambda i: len(parts[i]))
            smallest = parts[donor][np.argmin(work[parts[donor]])]
            parts[donor] = parts[donor][parts[donor] != smallest]
            parts[number] = np.asarray([smallest], dtype=np.int64)
    return parts


def lpt(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Longest first. With equal sizes: rounds of k items, the longest to the least loaded part, then swaps."""
    if not equal_size:
        return greedy_improved(work, k, equal_size)
    rounds = np.argsort(-work, kind="stable").reshape(-1, k)
    loads = np.zeros(k)
    members = np.empty((k, len(rounds)), dtype=np.int64)
    for number, items in enumerate(rounds):
        lightest_first = np.argsort(loads, kind="stable")
        members[lightest_first, number] = items
        loads[lightest_first] += work[items]
    return list(refine_by_swaps(work, members))


def dp(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """The exact optimum, for small inputs."""
    return exact_partition(work, k, equal_size)


def kk(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Karmarkar–Karp differencing."""
    return _without_empty(karmarkar_karp(work, k, equal_size), work)


ALGORITHMS: dict[str, Callable[[np.ndarray, int, bool], Partition]] = {
    "kk": kk,
    "greedy": greedy,
    "greedy_improved": greedy_improved,
    "lpt": lpt,
    "dp": dp,
}
