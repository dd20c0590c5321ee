"""Whole batches over data-parallel ranks: mini-batches stay, counts are equal, work is balanced, groups are kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.balance import get_workload, log_seqlen_unbalance, order_for_data_parallel, seqlen_metrics


def lengths_of(n: int, seed: int = 0) -> np.ndarray:
    return np.minimum(np.exp(np.random.default_rng(seed).normal(7.0, 1.2, n)).astype(np.int64) + 1, 32_768)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3]), st.integers(0, 99))
def test_mini_batches_and_groups_stay(dp: int, mini: int, per: int, group: int, seed: int) -> None:
    batch = dp * mini * per * group
    order = order_for_data_parallel(lengths_of(batch, seed), dp, mini, group_size=group)
    assert np.array_equal(np.sort(order), np.arange(batch))
    if dp == 1:
        assert np.array_equal(order, np.arange(batch))
    size = batch // mini
    for rank_part in np.split(order, dp):
        for number, mini_part in enumerate(np.split(rank_part, mini)):
            assert set(mini_part // size) == {number}
            together = mini_part.reshape(-1, group)
            assert np.array_equal(together // group, np.repeat(together[:, :1] // group, group, axis=1))


def test_loads_are_balanced_in_each_mini_batch_and_in_all() -> None:
    lengths = lengths_of(1024)
    order = order_for_data_parallel(lengths, 8, 4)
    per_rank = lengths[order].reshape(8, 4, 32).sum(-1)
    assert (per_rank.max(axis=0) / per_rank.mean(axis=0)).max() < 1.02
    totals = per_rank.sum(axis=1)
    assert totals.max() / totals.mean() < 1.005
    before = lengths.reshape(8, -1).sum(-1)
    assert before.max() / before.mean() > 1.05, "the control: the given order is not balanced"


def test_groups_fall_apart_only_where_counts_do_not_allow_them() -> None:
    lengths = lengths_of(24)
    kept = order_for_data_parallel(lengths, 2, 1, group_size=4)
    assert all(len(set(run // 4)) == 1 for run in kept.reshape(-1, 4))
    # 24 samples on 4 ranks are 6 each, no multiple of 4.
    order = order_for_data_parallel(lengths, 4, 1, group_size=4)
    assert np.array_equal(np.sort(order), np.arange(24))


def test_workload_is_what_is_balanced() -> None:
    lengths = lengths_of(256, seed=5)
    order = order_for_data_parallel(lengths, 8, 1, workload=get_workload("squared"))
    squares = (lengths.astype(float) ** 2)[order].reshape(8, -1).sum(-1)
    by_tokens = (lengths.astype(float) ** 2)[order_for_data_parallel(lengths, 8, 1)].reshape(8, -1).sum(-1)
    assert squares.max() < by_tokens.max()


def test_metrics_before_and_after() -> None:
    lengths = np.array([1, 2, 3, 10])
    metrics = log_seqlen_unbalance(lengths, [[0, 3], [1, 2]], "global_seqlen")
    assert metrics == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 13,
        "global_seqlen/minmax_diff": 10,
        "global_seqlen/balanced_min": 5,
        "global_seqlen/balanced_max": 11,
        "global_seqlen/mean": 8.0,
    }
    assert seqlen_metrics(lengths, np.array([0, 3, 1, 2]), 2) == metrics


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch of 10 samples .* 2 mini-batches for 3 .* multiple of 6"):
        order_for_data_parallel(lengths_of(10), 3, 2)
