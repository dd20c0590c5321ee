"""Which tokens Clip-Cov, KL-Cov and M2PO choose."""

import math

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


def m2po_by_hand(
    weights: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, threshold: float
) -> tuple[set[tuple[int, int]], float]:
    """One token after the other is left out, the furthest first, until the mean of what is left fits."""
    squares = {(r, t): math.log(float(weights[r, t])) ** 2 for r, t in mask.nonzero().tolist()}
    may_go = [at for at in squares if float(advantages[at]) * math.log(float(weights[at])) > 0]
    gone: set[tuple[int, int]] = set()
    while may_go and sum(squares.values()) / len(squares) > threshold:
        gone.add(max(may_go, key=squares.__getitem__))
        may_go = [at for at in may_go if at not in gone]
        squares = {at: square for at, square in squares.items() if at not in gone}
    return gone, sum(squares.values()) / max(1, len(squares))


@pytest.mark.parametrize("threshold", [1e-4, 0.04, 0.1, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_m2po_leaves_out_the_fewest_and_furthest_tokens(seed: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = -0.1 - torch.rand(6, 8, generator=generator)
    mask = (torch.rand(6, 8, generator=generator) < 0.8).long()
    advantages = torch.randn(6, 8, generator=generator)
    log_weights = 0.7 * torch.randn(6, 8, generator=generator)
    # What has moved against its advantage is never left out: with more of that no bound could be kept.
    weights = torch.where(advantages * log_weights > 0, log_weights, 0.2 * log_weights).exp()
    gone, rest = m2po_by_hand(weights, advantages, mask, threshold)
    new = (old + 0.01).requires_grad_()
    loss, metrics = get_policy_loss_fn("m2po")(
        old, new, advantages, mask, config={"m2_threshold": threshold}, rollout_is_weights=weights
    )
    loss.backward()
    left = {(r, t) for r, t in mask.nonzero().tolist()} - gone
    assert {(r, t) for r, t in new.grad.nonzero().tolist()} == left
    assert metrics["actor/rollout_masked_frac"].item() == pytest.approx(len(gone) / int(mask.sum()))
    wanted = sum(-float(advantages[at] * weights[at]) * math.exp(0.01) for at in left) / int(mask.sum())
    assert loss.item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    if threshold in (0.04, 0.1):
        # The control: half the bound leaves out more.
        assert gone != m2po_by_hand(weights, advantages, mask, threshold / 2)[0]
        assert rest <= threshold
    assert bool(gone) == (threshold < 5)


def test_m2po_tells_equal_tokens_apart_and_needs_the_ratio() -> None:
    old, advantages, mask = -torch.rand(4, 5), torch.ones(4, 5), torch.ones(4, 5).long()
    weights = torch.full((4, 5), math.exp(0.3))
    weights[:, 0] = 1.0
    loss_fn = get_policy_loss_fn("m2po")
    _, metrics = loss_fn(old, old, advantages, mask, rollout_is_weights=weights)
    # 16 tokens of 0.09 and 4 of 0: with 13 of them left out, 3 * 0.09 / 7 fits; with 12, 4 * 0.09 / 8 does not.
    assert metrics["actor/rollout_masked_frac"].item() == pytest.approx(13 / 20)
    _, metrics = loss_fn(old, old, -advantages, mask, rollout_is_weights=weights)
    assert metrics["actor/rollout_masked_frac"].item() == 0
    with pytest.raises(ValueError, match="'m2po' needs rollout_is_weights"):
        loss_fn(old, old, advantages, mask)
