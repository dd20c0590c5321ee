"""Which tokens Clip-Cov and KL-Cov choose."""

import pytest
import torch

from meshrl.algorithms import BatchStats, PolicyLossConfig, add_covariance_stats, get_policy_loss_fn
from meshrl.algorithms.covariance_losses import token_keys


def batch(ties: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    old = -2 * torch.rand(8, 25, generator=generator)
    if ties:
        old = old.masked_fill(torch.rand(8, 25, generator=generator) < 0.6, 0.0)
    advantages = torch.randn(8, 1, generator=generator).expand(8, 25).contiguous()
    if ties:
        advantages = torch.where(advantages > 0, 1.0, -1.0)
    mask = (torch.rand(8, 25, generator=generator) < 0.8).long()
    return old, advantages, mask


def affected(
    name: str, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **config: float
) -> torch.Tensor:
    """Tokens whose gradient differs from that of the loss with nothing chosen."""
    gradients = []
    for loss_name, parameters in ((name, PolicyLossConfig(**config)), ("vanilla", PolicyLossConfig(clip_ratio=100.0))):
        new = (old + 0.01).requires_grad_()
        get_policy_loss_fn(loss_name)(old, new, advantages, mask, config=parameters)[0].backward()
        gradients.append(new.grad)
    return ((gradients[0] - gradients[1]).abs() > 1e-9) & mask.bool()


def covariance(old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = mask.bool()
    return (advantages - advantages[kept].mean()) * (old - old[kept].mean())


@pytest.mark.parametrize("ties", [False, True])
def test_kl_cov_penalises_exactly_the_largest(ties: bool) -> None:
    old, advantages, mask = batch(ties)
    chosen = affected("kl_cov", old, advantages, mask, kl_cov_ratio=0.1, clip_ratio=100.0)
    count = int(0.1 * int(mask.sum()))
    assert int(chosen.sum()) == count
    cov = covariance(old, advantages, mask)
    assert cov[chosen].min() >= cov[mask.bool()].sort(descending=True).values[count - 1] - 1e-6


def test_clip_cov_drops_its_share_within_the_band() -> None:
    old, advantages, mask = batch()
    chosen = affected(
        "clip_cov", old, advantages, mask, clip_cov_ratio=0.05, clip_cov_lb=0.1, clip_cov_ub=0.8, clip_ratio=100.0
    )
    assert int(chosen.sum()) == int(0.05 * int(mask.sum()))
    cov = covariance(old, advantages, mask)
    assert bool(((cov > 0.1) & (cov < 0.8))[chosen].all())
    in_band = ((cov > 0.1) & (cov < 0.8) & mask.bool()).sum()
    assert in_band > chosen.sum(), "the hash had a choice to make"


def test_an_empty_band_drops_nothing() -> None:
    old, advantages, mask = batch()
    assert not affected("clip_cov", old, advantages, mask, clip_cov_lb=50.0, clip_cov_ub=60.0, clip_ratio=100.0).any()


def test_keys_depend_on_the_sample_and_place_only() -> None:
    old, _, mask = batch(ties=True)
    keys = token_keys(old, mask.bool())
    torch.testing.assert_close(token_keys(old[3:5], mask[3:5].bool()), keys[3:5])
    wider = torch.nn.functional.pad(old, (2, 3)), torch.nn.functional.pad(mask, (2, 3)).bool()
    torch.testing.assert_close(token_keys(*wider)[:, 2:-3][mask.bool()], keys[mask.bool()])
    assert len(keys[mask.bool()].unique()) == int(mask.sum())
    assert int(keys.min()) >= 0
    spread = keys[mask.bool()].double() / 2**62
    assert spread.mean().item() == pytest.approx(0.5, abs=0.1)


def test_other_losses_need_nothing() -> None:
    old, advantages, mask = batch()
    stats = BatchStats.of(mask)
    assert add_covariance_stats(stats, "vanilla", old, advantages, mask) is stats
    with pytest.raises(ValueError, match="selects no token"):
        add_covariance_stats(stats, "kl_cov", old, advantages, torch.zeros_like(mask))
