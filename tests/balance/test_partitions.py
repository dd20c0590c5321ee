"""Partitioners: valid, deterministic, exact where they say so, and good."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.balance import ALGORITHMS, get_seqlen_balanced_partitions, get_workload
from meshrl.balance.partitions import refine_by_swaps

EVERY = [*ALGORITHMS, "auto"]


def lengths_of(n: int, seed: int = 0) -> np.ndarray:
    """Heavy-tailed lengths, as responses have them."""
    draws = np.exp(np.random.default_rng(seed).normal(7.0, 1.2, n))
    return np.minimum(draws.astype(np.int64) + 1, 32_768)


def loads(lengths: np.ndarray, parts: list[list[int]]) -> np.ndarray:
    return np.array([lengths[part].sum() for part in parts])


def check_partition(n: int, k: int, equal_size: bool, parts: list[list[int]]) -> None:
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(n))
    assert all(part == sorted(part) and part for part in parts)
    if equal_size:
        assert {len(part) for part in parts} == {n // k}


@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 5),
    per_part=st.integers(1, 4),
    extra=st.integers(0, 4),
    equal_size=st.booleans(),
    seed=st.integers(0, 1000),
    high=st.sampled_from([1, 3, 1000]),
)
def test_every_algorithm_gives_a_partition(
    k: int, per_part: int, extra: int, equal_size: bool, seed: int, high: int
) -> None:
    n = k * per_part + (0 if equal_size else extra)
    lengths = np.random.default_rng(seed).integers(0, high, n)
    for algorithm in EVERY:
        if algorithm != "dp" or n <= 10:
            parts = get_seqlen_balanced_partitions(lengths.tolist(), k, equal_size, algorithm)
            check_partition(n, k, equal_size, parts)


def brute_force(lengths: np.ndarray, k: int, equal_size: bool) -> int:
    best = int(lengths.sum())
    for places in itertools.product(range(k), repeat=len(lengths)):
        counts = np.bincount(places, minlength=k)
        if counts.min() and (not equal_size or counts.max() == len(lengths) // k):
            best = min(best, int(np.bincount(places, weights=lengths, minlength=k).max()))
    return best


@pytest.mark.parametrize(
    ("n", "k", "equal_size"), [(7, 2, False), (8, 2, True), (7, 3, False), (6, 3, True), (4, 4, True)]
)
@pytest.mark.parametrize("seed", range(4))
def test_dp_is_the_optimum(n: int, k: int, equal_size: bool, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 100, n)
    optimum = brute_force(lengths, k, equal_size)
    assert loads(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size, "dp")).max() == optimum
    assert loads(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size, "auto")).max() == optimum


def test_dp_refuses_what_is_too_large() -> None:
    with pytest.raises(ValueError, match="for small inputs: 60 items in 7 parts"):
        get_seqlen_balanced_partitions(lengths_of(60), 7, False, "dp")


def test_karmarkar_karp_by_hand() -> None:
    """8 7 6 5 4 in two: differencing leaves 16 and 14 (the optimum is 15)."""
    lengths = np.array([8, 7, 6, 5, 4])
    parts = get_seqlen_balanced_partitions(lengths, 2, False, "kk")
    assert sorted(loads(lengths, parts)) == [14, 16]


@pytest.mark.parametrize(("n", "k", "limit"), [(512, 8, 1.01), (1024, 8, 1.01), (4096, 64, 1.02)])
@pytest.mark.parametrize("seed", range(3))
def test_the_default_balances_equal_sizes(n: int, k: int, limit: float, seed: int) -> None:
    lengths = lengths_of(n, seed)
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size=True)
    assert loads(lengths, parts).max() <= limit * lengths.sum() / k
    in_order = loads(lengths, np.arange(n).reshape(k, -1).tolist())
    assert in_order.max() > limit * lengths.sum() / k, "the unbalanced order is the control"


@pytest.mark.parametrize(("k", "size"), [(2, 8), (5, 30), (16, 64)])
def test_swaps_repair_the_worst_start(k: int, size: int) -> None:
    """From parts of neighbours in sorted order, exchanges alone come close to the mean, and never make it worse."""
    work = np.sort(lengths_of(k * size)).astype(float)
    start = np.arange(k * size).reshape(k, size)
    refined = refine_by_swaps(work, start.copy())
    check_partition(k * size, k, True, [sorted(part) for part in refined.tolist()])
    assert work[start].sum(1).max() > 1.5 * work.sum() / k
    assert work[refined].sum(1).max() < 1.02 * work.sum() / k


@pytest.mark.parametrize("algorithm", EVERY)
def test_the_same_input_gives_the_same_parts(algorithm: str) -> None:
    lengths = lengths_of(12) if algorithm == "dp" else lengths_of(256)
    first = get_seqlen_balanced_partitions(lengths, 4, True, algorithm)
    assert all(get_seqlen_balanced_partitions(lengths, 4, True, algorithm) == first for _ in range(3))


def test_workload_decides_what_is_balanced() -> None:
    lengths = np.array([8, 4, 4, 4, 4, 8])
    squared = get_seqlen_balanced_partitions(lengths, 2, False, workload=get_workload("squared"))
    assert sorted(loads(lengths**2, squared)) == [96, 96]
    lopsided = np.array([8, 4, 4, 2, 2, 2, 2])
    by_tokens = get_seqlen_balanced_partitions(lopsided, 2, False)
    by_square = get_seqlen_balanced_partitions(lopsided, 2, False, workload=get_workload("squared"))
    assert loads(lopsided**2, by_square).max() < loads(lopsided**2, by_tokens).max()
    assert loads(lopsided, by_tokens).max() < loads(lopsided, by_square).max()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="did you mean 'greedy_improved'"):
        get_seqlen_balanced_partitions([1, 2], 2, False, "greedy_improve")
    with pytest.raises(ValueError, match="3 items cannot fill k_partitions=4"):
        get_seqlen_balanced_partitions([1, 2, 3], 4, False)
    with pytest.raises(ValueError, match="3 items do not divide by 2"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, True)
    with pytest.raises(ValueError, match="item 1 is -2"):
        get_seqlen_balanced_partitions([1, -2], 1, False)
    with pytest.raises(ValueError, match="at least 1"):
        get_seqlen_balanced_partitions([1, 2], 0, False)
