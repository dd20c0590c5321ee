"""The critic's loss and the entropy against scalar references."""

import math

import pytest
import torch

from meshrl.algorithms import BatchStats, compute_entropy_loss, compute_value_loss, entropy_from_logits


def test_value_loss_equals_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    predictions, returns, values = (torch.randn(4, 5, generator=generator) for _ in range(3))
    mask = (torch.rand(4, 5, generator=generator) < 0.6).long()
    losses, clips = [], []
    for v, r, o, m in zip(*(t.view(-1).tolist() for t in (predictions, returns, values, mask)), strict=True):
        if m:
            plain, clipped = (v - r) ** 2, (min(max(v, o - 0.3), o + 0.3) - r) ** 2
            losses.append(max(plain, clipped) / 2)
            clips.append(clipped > plain)
    loss, fraction = compute_value_loss(predictions, returns, values, mask, 0.3)
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert fraction.item() == pytest.approx(sum(clips) / len(clips))
    assert 0 < fraction.item() < 1
    by_name, _ = compute_value_loss(
        predictions, returns, values, mask, 0.3, dp_size=2, batch_num_tokens=50, global_batch_size=9
    )
    by_stats, _ = compute_value_loss(predictions, returns, values, mask, 0.3, stats=BatchStats(2, 50, 9))
    assert by_name.item() == by_stats.item() == pytest.approx(sum(losses) / 50 * 2, rel=1e-5)


def test_value_loss_checks_shapes() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="values has shape"):
        compute_value_loss(ones, ones, ones[:1], ones, 0.5)


def test_entropy_equals_the_definition() -> None:
    logits = torch.tensor([[[1.0, -2.0, 0.5], [900.0, -900.0, 0.0]], [[0.0, float("-inf"), 0.0], [7.0, 7.0, 7.0]]])
    expected = []
    for row in logits.view(-1, 3).double():
        p = torch.softmax(row, 0).tolist()
        expected.append(-sum(x * math.log(x) for x in p if x > 0))
    assert entropy_from_logits(logits).view(-1).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert entropy_from_logits(logits.bfloat16()).dtype is torch.float32
    mask = torch.tensor([[1, 0], [1, 1]])
    loss = compute_entropy_loss(logits, mask)
    assert loss.item() == pytest.approx((expected[0] + expected[2] + expected[3]) / 3, rel=1e-5)
