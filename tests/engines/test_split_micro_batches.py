"""Micro-batches of a rank: every row once, the budget kept, and as many as the other ranks have."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.engines.batching import fixed_size_parts, runs_of_kin, split_heaviest, split_into_micro_batches

rows = st.lists(st.integers(0, 20), min_size=0, max_size=24).map(lambda x: np.asarray(x, dtype=np.int64))


def rows_of(plan) -> list[int]:
    return sorted(int(row) for part in plan if part is not None for row in part)


@settings(max_examples=120, deadline=None)
@given(rows, st.sampled_from([20, 33, 100]), st.integers(0, 30))
def test_under_a_budget(lengths, budget, others):
    plan = split_into_micro_batches(
        lengths, max_token_len=budget, micro_batch_size=None, agree=lambda count: max(count, others)
    )
    assert rows_of(plan) == list(range(len(lengths)))
    filled = [part for part in plan if part is not None]
    assert all(len(part) > 0 and lengths[part].sum() <= budget for part in filled)
    assert len(plan) >= others
    assert len(filled) >= min(others, len(lengths))
    # stand-ins come last, and only where there are no rows left to split
    assert all(part is None for part in plan[len(filled) :])
    assert len(filled) == len(plan) or len(filled) == len(lengths)


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(1, 7), st.integers(0, 30))
def test_of_a_fixed_size(lengths, size, others):
    own = -(-len(lengths) // size)
    seen = []

    def agree(count: int) -> int:
        seen.append(count)
        return max(count, others)

    plan = split_into_micro_batches(lengths, max_token_len=None, micro_batch_size=size, agree=agree)
    assert seen == [own]
    assert len(plan) == max(own, others)
    assert rows_of(plan) == list(range(len(lengths)))
    assert all(len(part) <= size for part in plan if part is not None)
    if others <= own:
        whole = itertools.chain.from_iterable(part.tolist() for part in plan)
        assert list(whole) == list(range(len(lengths)))


def test_ranks_agree_on_the_largest_count():
    """Three ranks with unequal work, each told the largest of the counts that each would need alone."""
    ranks = [np.asarray([9, 9, 9, 9]), np.asarray([1, 1]), np.asarray([5])]
    alone = [
        len(split_into_micro_batches(x, max_token_len=10, micro_batch_size=None, agree=lambda n: n)) for x in ranks
    ]
    assert alone == [4, 1, 1]
    plans = [
        split_into_micro_batches(x, max_token_len=10, micro_batch_size=None, agree=lambda n: max(alone)) for x in ranks
    ]
    assert [len(plan) for plan in plans] == [4, 4, 4]
    assert [sum(part is None for part in plan) for plan in plans] == [0, 2, 3]


def test_the_heaviest_is_halved_and_single_rows_are_left_alone():
    lengths = np.asarray([100, 1, 2, 3, 4])
    plan = split_heaviest([np.asarray([0]), np.asarray([1, 2]), np.asarray([3, 4])], lengths)
    assert [part.tolist() for part in plan] == [[0], [1, 2], [3], [4]]
    plan = split_heaviest([np.asarray([0, 1, 2])], np.zeros(3, dtype=np.int64))
    assert [part.tolist() for part in plan] == [[0, 1], [2]]


def test_a_rank_without_rows_gets_stand_ins_alone():
    for how in ({"max_token_len": 8, "micro_batch_size": None}, {"max_token_len": None, "micro_batch_size": 2}):
        assert split_into_micro_batches(np.empty(0, np.int64), **how, agree=lambda n: 3) == [None] * 3


def test_a_sample_over_the_budget_is_named():
    with pytest.raises(ValueError, match="sample 1 has 11 tokens, more than max_token_len=10"):
        split_into_micro_batches(np.asarray([3, 11]), max_token_len=10, micro_batch_size=None, agree=lambda n: n)


@pytest.mark.parametrize("size", [None, 0])
def test_some_size_is_needed(size):
    with pytest.raises(ValueError, match="ppo_micro_batch_size_per_gpu"):
        split_into_micro_batches(np.ones(3), max_token_len=None, micro_batch_size=size, agree=lambda n: n)


def test_fixed_size_parts():
    assert [part.tolist() for part in fixed_size_parts(5, 2)] == [[0, 1], [2, 3], [4]]
    assert fixed_size_parts(0, 2) == []


kinships = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(kinships, st.sampled_from([20, 33, 100]))
def test_kin_lie_next_to_each_other(samples, budget):
    lengths, kin = (np.asarray(values, dtype=np.int64) for values in zip(*samples, strict=True))
    plan = split_into_micro_batches(
        lengths, max_token_len=budget, micro_batch_size=None, agree=lambda count: count, kin=kin
    )
    assert rows_of(plan) == list(range(len(lengths)))
    assert all(len(part) > 0 and lengths[part].sum() <= budget for part in plan)
    if len(set(kin)) < len(kin):
        # Every cut between two micro-batches goes through one family at most.
        looks = sum(len(set(kin[part])) for part in plan)
        assert looks <= len(set(kin)) + len(plan) - 1


def test_runs_of_kin_are_of_about_one_size():
    lengths = np.full(40, 10)
    plan = runs_of_kin(lengths, 130, np.arange(40) % 5)
    assert [int(lengths[part].sum()) for part in plan] == [100, 100, 100, 100]
    kin = [set((part % 5).tolist()) for part in plan]
    assert sum(map(len, kin)) == 8  # five families, three cuts
