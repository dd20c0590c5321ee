"""agg_loss against plain loops, and its errors."""

import pytest
import torch

from meshrl.algorithms import LOSS_AGG_MODES, BatchStats, agg_loss

MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
LOSS = torch.arange(20, dtype=torch.float32).reshape(4, 5) / 7 - 1


def slow_agg(loss: torch.Tensor, mask: torch.Tensor, mode: str, horizon: float) -> float:
    rows = [
        [x for x, keep in zip(r, m, strict=True) if keep] for r, m in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    scale = horizon if mode == "seq-mean-token-sum-norm" else 1.0
    return sum(sum(row) / scale for row in rows) / len(rows)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_equals_a_loop(mode: str) -> None:
    expected = slow_agg(LOSS, MASK, mode, horizon=5)
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(expected, rel=1e-6)
    assert agg_loss(LOSS, MASK, mode, stats=BatchStats.of(MASK)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_counts_given_one_by_one_equal_stats(mode: str) -> None:
    by_name = agg_loss(LOSS, MASK, mode, dp_size=3, batch_num_tokens=40, global_batch_size=11, loss_scale_factor=8)
    by_stats = agg_loss(LOSS, MASK, mode, stats=BatchStats(3, 40, 11, 8.0))
    assert by_name.item() == by_stats.item()
    assert by_name.item() != pytest.approx(agg_loss(LOSS, MASK, mode).item(), rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_stands_under_a_zero_of_the_mask_does_not_matter(bad: float) -> None:
    poisoned = LOSS.masked_fill(MASK == 0, bad)
    for mode in LOSS_AGG_MODES:
        assert agg_loss(poisoned, MASK, mode).item() == agg_loss(LOSS, MASK, mode).item()


def test_horizon_must_be_given_with_stats() -> None:
    with pytest.raises(ValueError, match="loss_scale_factor"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", stats=BatchStats(1, 9, 3))


def test_global_counts_are_required_with_several_ranks() -> None:
    with pytest.raises(ValueError, match="batch_num_tokens must be given"):
        agg_loss(LOSS, MASK, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="global_batch_size must be given"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum", dp_size=2)
    with pytest.raises(ValueError, match="dp_size=2 needs num_tokens"):
        agg_loss(LOSS, MASK, "token-mean", stats=BatchStats(dp_size=2))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="did you mean 'token-mean'"):
        agg_loss(LOSS, MASK, "token-meen")
    with pytest.raises(ValueError, match=r"loss_mask has shape \(3, 5\) but loss_mat has \(4, 5\)"):
        agg_loss(LOSS, MASK[:3], "token-mean")
    with pytest.raises(ValueError, match="no response token"):
        agg_loss(LOSS, torch.zeros_like(MASK), "token-mean")
    with pytest.raises(ValueError, match="no response token"):
        agg_loss(LOSS, torch.zeros_like(MASK), "seq-mean-token-mean", stats=BatchStats(1, 0, 0))


def test_stats_add_up() -> None:
    parts = BatchStats.of(MASK[:2]) + BatchStats.of(MASK[2:])
    assert parts == BatchStats.of(MASK) == BatchStats(1, 9, 3, 5.0)
    with pytest.raises(ValueError, match="loss_scale_factor of the parts differs"):
        BatchStats.of(MASK) + BatchStats.of(MASK[:, :3])
    with pytest.raises(ValueError, match="dp_size must be at least 1"):
        BatchStats(dp_size=0)
