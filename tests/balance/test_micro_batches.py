"""Micro-batch plans: the cap is hard, counts are as asked, nothing is empty that could be split."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.balance import get_workload, plan_micro_batches


def check_plan(lengths: np.ndarray, cap: int, plan: list[np.ndarray]) -> None:
    assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(len(lengths)))
    assert max(lengths[part].sum() for part in plan) <= cap
    assert all(np.array_equal(part, np.sort(part)) for part in plan)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    slack=st.integers(0, 60),
    divide=st.integers(1, 4),
    at_least=st.integers(1, 12),
    other_rank=st.integers(0, 12),
)
def test_cap_count_and_no_needless_empties(
    lengths: list[int], slack: int, divide: int, at_least: int, other_rank: int
) -> None:
    array, cap = np.array(lengths), max(*lengths, 1) + slack
    plan = plan_micro_batches(
        array, cap, num_batches_divided_by=divide, min_num_micro_batch=at_least, min_count=other_rank
    )
    check_plan(array, cap, plan)
    assert len(plan) % divide == 0
    assert len(plan) >= max(at_least, other_rank)
    empty = sum(len(part) == 0 for part in plan)
    assert empty == max(0, len(plan) - len(array))
    squared = plan_micro_batches(array, cap, workload=get_workload("squared"))
    check_plan(array, cap, squared)
    assert all(len(part) for part in squared)


def test_ordinary_batches_are_filled_to_a_thousandth() -> None:
    for seed in range(20):
        lengths = np.minimum(np.exp(np.random.default_rng(seed).normal(6, 1, 200)).astype(int) + 1, 4096)
        plan = plan_micro_batches(lengths, 8192)
        check_plan(lengths, 8192, plan)
        assert len(plan) <= -(-int(lengths.sum()) // int(0.999 * 8192))
        loads = [lengths[part].sum() for part in plan]
        assert max(loads) <= 1.01 * np.mean(loads)


def test_tight_packings_need_more_than_the_sum_says() -> None:
    """Samples just over half of the cap cannot share a micro-batch: 10 of 60 need 10 of 100, not 6."""
    plan = plan_micro_batches(np.full(10, 60), 100)
    assert [len(part) for part in plan] == [1] * 10
    lengths = np.array([60] * 5 + [40] * 5 + [21] * 4)
    plan = plan_micro_batches(lengths, 100)
    check_plan(lengths, 100, plan)
    assert len(plan) == 6


def test_best_fit_reaches_a_count_that_balancing_misses() -> None:
    """Perfect pairs and triples with no room to spare: every micro-batch must be exactly full."""
    generator = np.random.default_rng(3)
    lengths = np.concatenate([[a, 1000 - a] for a in generator.integers(501, 900, 30)])
    plan = plan_micro_batches(lengths, 1000)
    check_plan(lengths, 1000, plan)
    assert len(plan) == 30


def test_a_sample_over_the_cap_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 101 tokens, more than max_token_len=100 \(2 such in all\)"):
        plan_micro_batches(np.array([5, 101, 7, 300]), 100)
    with pytest.raises(ValueError, match=r"the group of samples \[2, 3\] has 120 tokens"):
        plan_micro_batches(np.array([5, 6, 60, 60]), 100, group_size=2)


def test_more_micro_batches_than_samples_are_empty_at_the_end() -> None:
    plan = plan_micro_batches(np.array([3, 4, 5]), 100, num_batches_divided_by=4, sort_strategy="max")
    assert [len(part) for part in plan] == [1, 1, 1, 0]


def test_fixed_count() -> None:
    lengths = np.arange(1, 21)
    plan = plan_micro_batches(lengths, 100, fixed_count=7)
    assert len(plan) == 7
    check_plan(lengths, 100, plan)
    with pytest.raises(ValueError, match=r"210 tokens do not fit into fixed_num_micro_batches=2 .* 3 would do"):
        plan_micro_batches(lengths, 100, fixed_count=2)


def test_groups_stay_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, 24)
    plan = plan_micro_batches(lengths, 60, group_size=3)
    check_plan(lengths, 60, plan)
    for part in plan:
        assert set(part // 3) == {g for g in range(8) if set(range(3 * g, 3 * g + 3)) <= set(part)}
    with pytest.raises(ValueError, match="24 samples do not divide into groups of 5"):
        plan_micro_batches(lengths, 60, group_size=5)


KEYS = {"sum_sq": lambda x: (x**2).sum(), "min": np.min, "max": np.max, "mean": np.mean}


@pytest.mark.parametrize("strategy", KEYS)
def test_sort_strategies(strategy: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 60)
    plan = plan_micro_batches(lengths, 300, sort_strategy=strategy)
    keys = [KEYS[strategy](lengths[part]) for part in plan]
    assert keys == sorted(keys, reverse=True)
    assert keys[0] > keys[-1]
    ends = plan_micro_batches(lengths, 300, sort_strategy=strategy, small_at_both_ends=True)
    keys = [KEYS[strategy](lengths[part]) for part in ends]
    top = int(np.argmax(keys))
    assert keys[: top + 1] == sorted(keys[: top + 1])
    assert keys[top:] == sorted(keys[top:], reverse=True)
    assert abs(top - len(keys) // 2) <= 1


def test_unknown_sort_strategy_and_deterministic() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 60)
    with pytest.raises(ValueError, match="did you mean 'sum_sq'"):
        plan_micro_batches(lengths, 300, sort_strategy="sumsq")
    first, again = (plan_micro_batches(lengths, 300, num_batches_divided_by=4) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(ValueError, match="must be a vector"):
        plan_micro_batches(np.array([1, -2]), 10)
