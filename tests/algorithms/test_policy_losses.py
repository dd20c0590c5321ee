"""Every policy loss against a slow scalar reference, and what they promise."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from meshrl.algorithms import (
    POLICY_LOSSES,
    BatchStats,
    PolicyLossConfig,
    add_covariance_stats,
    get_policy_loss_fn,
    is_zero_where_advantage_is_zero,
    register_policy_loss,
)

SEQUENCE_LOSSES = {"gspo", "geo_mean"}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(r: float, a: float, c: PolicyLossConfig) -> float:
    return max(-a * r, -a * clip(r, 1 - c.low, 1 + c.high))


def dual(r: float, a: float, c: PolicyLossConfig) -> float:
    loss = ppo(r, a, c)
    return min(loss, -a * (c.clip_ratio_c or 3.0)) if a < 0 else loss


def cispo(new: float, old: float, a: float, c: PolicyLossConfig) -> float:
    return -a * clip(math.exp(new - old), 1 - c.low, 1 + c.high) * new


def sapo(r: float, a: float, c: PolicyLossConfig) -> float:
    tau = c.tau_pos if a > 0 else c.tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))


def dppo(new: float, old: float, a: float, c: PolicyLossConfig, kind: str) -> float:
    p, q = math.exp(new), math.exp(old)
    if kind == "tv":
        inside = p - q <= c.high if a > 0 else q - p <= c.low
    else:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        inside = (divergence <= c.high or p <= q) if a > 0 else (divergence <= c.low or p >= q)
    return -a * min(p / q, c.clip_ratio_c or 20.0) * new if inside else 0.0


TOKEN_REFERENCES = {
    "vanilla": lambda new, old, a, w, c: dual(math.exp(new - old), a, c) * w,
    "cispo": lambda new, old, a, w, c: cispo(new, old, a, c) * w,
    "sapo": lambda new, old, a, w, c: sapo(math.exp(new - old), a, c) * w,
    "gpg": lambda new, old, a, w, c: -a * new * w,
    "dro": lambda new, old, a, w, c: (-a * new + c.dro_beta / 2 * (new - old) ** 2) * w,
    "dppo_tv": lambda new, old, a, w, c: dppo(new, old, a, c, "tv") * w,
    "dppo_kl": lambda new, old, a, w, c: dppo(new, old, a, c, "kl") * w,
    "decoupled": lambda new, old, a, w, c: dual(math.exp(new - old), a, c) * (w if w <= c.behaviour_weight_cap else 0),
    "icepop": lambda new, old, a, w, c: dual(math.exp(new - old), a, c) * (w if 0.5 <= w <= 5.0 else 0),
}


def example(seed: int = 0, batch: int = 5, length: int = 7) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    old = -0.05 - 2 * torch.rand(batch, length, generator=generator)
    mask = (torch.rand(batch, length, generator=generator) < 0.75).long()
    mask[:, 0] = 1
    return SimpleNamespace(
        old=old,
        new=(old + 0.6 * torch.randn(batch, length, generator=generator)).clamp(max=-0.01),
        advantages=2 * torch.randn(batch, length, generator=generator),
        weights=7 * torch.rand(batch, length, generator=generator),
        mask=mask,
    )


def token_mean(values: list[list[float]], mask: torch.Tensor) -> float:
    kept = [v for row, keep in zip(values, mask.tolist(), strict=True) for v, k in zip(row, keep, strict=True) if k]
    return sum(kept) / len(kept)


@pytest.mark.parametrize("name", sorted(TOKEN_REFERENCES))
@pytest.mark.parametrize("seed", range(3))
def test_token_losses_equal_scalar_references(name: str, seed: int) -> None:
    data = example(seed)
    config = PolicyLossConfig(clip_ratio=0.2, clip_ratio_high=0.28, behaviour_weight_cap=4.0)
    rows = zip(*(t.tolist() for t in (data.new, data.old, data.advantages, data.weights)), strict=True)
    expected = [[TOKEN_REFERENCES[name](*token, config) for token in zip(*row, strict=True)] for row in rows]
    loss, metrics = get_policy_loss_fn(name)(
        data.old, data.new, data.advantages, data.mask, "token-mean", config, data.weights
    )
    assert loss.item() == pytest.approx(token_mean(expected, data.mask), rel=1e-5, abs=1e-6)
    assert metrics["actor/pg_loss"].item() == pytest.approx(loss.item())
    kl = token_mean((data.old - data.new).tolist(), data.mask)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(kl, rel=1e-5, abs=1e-6)
    assert not any(value.requires_grad or value.dim() for value in metrics.values())


def sequence_tokens(data: SimpleNamespace, row: int) -> list[tuple[float, float, float, float]]:
    columns = [t for t in range(data.mask.shape[1]) if data.mask[row, t]]
    return [
        (data.new[row, t].item(), data.old[row, t].item(), data.advantages[row, t].item(), data.weights[row, t].item())
        for t in columns
    ]


def test_gspo_equals_scalar_reference() -> None:
    data, config = example(), PolicyLossConfig(clip_ratio=0.1)
    expected = 0.0
    for row in range(5):
        tokens = sequence_tokens(data, row)
        ratio = math.exp(sum(new - old for new, old, _, _ in tokens) / len(tokens))
        expected += sum(ppo(ratio, a, config) for _, _, a, _ in tokens) / len(tokens) / 5
    loss, _ = get_policy_loss_fn("gspo")(data.old, data.new, data.advantages, data.mask, config=config)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """Inside the clip range and with one advantage a sequence, the token form has the gradient of -A * s."""
    data = example()
    advantages = data.advantages[:, :1].expand_as(data.old)
    token = data.new.clone().requires_grad_()
    loss, _ = get_policy_loss_fn("gspo")(
        data.old, token, advantages, data.mask, "seq-mean-token-mean", PolicyLossConfig(clip_ratio=100.0)
    )
    loss.backward()
    direct = data.new.clone().requires_grad_()
    log_ratio = ((direct - data.old) * data.mask).sum(-1) / data.mask.sum(-1)
    (-advantages[:, 0] * log_ratio.exp()).mean().backward()
    torch.testing.assert_close(token.grad, direct.grad)


def test_geo_mean_equals_scalar_reference() -> None:
    data, config = example(), PolicyLossConfig(clip_ratio=0.3)
    advantages = data.advantages[:, :1].expand_as(data.old)
    data.advantages = advantages
    expected = 0.0
    for row in range(5):
        tokens = sequence_tokens(data, row)
        a = tokens[0][2]
        logs = [new - old for new, old, _, _ in tokens]
        bounded = [min(x, clip(x, -0.3, 0.3)) if a > 0 else max(x, clip(x, -0.3, 0.3)) for x in logs]
        weight = math.exp(sum(math.log(w) for *_, w in tokens) / len(tokens))
        expected += -a * math.exp(sum(bounded) / len(tokens)) * weight / 5
    loss, _ = get_policy_loss_fn("geo_mean")(
        data.old, data.new, advantages, data.mask, config=config, rollout_is_weights=data.weights
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_topr_equals_scalar_reference_and_its_weight_is_a_constant() -> None:
    data = example(3)
    data.advantages[0], data.advantages[1] = data.advantages[0].abs(), -data.advantages[1].abs()
    data.new[1] = data.old[1] - 0.1  # an answer below the baseline that has become less likely, and one more likely
    data.new[2] = (data.old[2] + 0.1).clamp(max=-0.01)
    new = data.new.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn("topr")(data.old, new, data.advantages, data.mask)
    loss.backward()
    wanted, gradient, cut = 0.0, torch.zeros_like(data.new), 0
    for row in range(len(data.mask)):
        tokens = data.mask[row].nonzero()[:, 0].tolist()
        ratio = math.exp(sum(float(data.new[row, t] - data.old[row, t]) for t in tokens))
        for t in tokens:
            a = float(data.advantages[row, t])
            weight = min(1.0, ratio) if a < 0 else 1.0
            wanted += -a * weight * float(data.new[row, t]) / len(data.mask)
            gradient[row, t] = -a * weight / len(data.mask)
            cut += a < 0 and ratio > 1
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(new.grad, gradient, rtol=1e-5, atol=1e-6)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(cut / int(data.mask.sum()))
    assert 0 < cut < int(data.mask.sum())
    # The control: with the ratio at work for every sign it would be another loss.
    perturbed, _ = get_policy_loss_fn("topr")(data.old, new, -data.advantages, data.mask)
    assert perturbed.item() != pytest.approx(-wanted, rel=1e-3)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_equals_scalar_reference(loss_type: str) -> None:
    data, parameters = example(), PolicyLossConfig()
    correction = {
        "loss_type": loss_type,
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token_k2",
        "rollout_rs_threshold": 0.4,
    }
    config = SimpleNamespace(policy_loss=SimpleNamespace(rollout_correction=correction))
    expected, rejected = [], []
    for row in range(5):
        line, drops = [], []
        for new, old, a in zip(
            data.new[row].tolist(), data.old[row].tolist(), data.advantages[row].tolist(), strict=True
        ):
            drop = (new - old) ** 2 / 2 > 0.4
            r = math.exp(new - old)
            kept = -a * new * min(r, 1.5) if loss_type == "reinforce" else dual(r, a, parameters)
            line.append(0.0 if drop else kept)
            drops.append(float(drop))
        expected.append(line)
        rejected.append(drops)
    loss, metrics = get_policy_loss_fn("bypass_mode")(data.old, data.new, data.advantages, data.mask, config=config)
    assert loss.item() == pytest.approx(token_mean(expected, data.mask), rel=1e-5)
    assert metrics["actor/rollout_masked_frac"].item() == pytest.approx(token_mean(rejected, data.mask))
    assert 0 < metrics["actor/rollout_masked_frac"].item() < 1


def test_bypass_mode_refuses_what_needs_the_whole_batch() -> None:
    data = example()
    config = SimpleNamespace(rollout_correction={"rollout_is_batch_normalize": True})
    with pytest.raises(ValueError, match="rollout_is_batch_normalize"):
        get_policy_loss_fn("bypass_mode")(data.old, data.new, data.advantages, data.mask, config=config)
    config = SimpleNamespace(rollout_correction={"loss_type": "reinfroce"})
    with pytest.raises(ValueError, match="did you mean 'reinforce'"):
        get_policy_loss_fn("bypass_mode")(data.old, data.new, data.advantages, data.mask, config=config)


def test_vanilla_metrics_count_clipped_tokens() -> None:
    old = torch.full((1, 6), -1.0)
    new = old + torch.log(torch.tensor([[1.5, 1.1, 0.5, 0.5, 4.0, 9.0]]))
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    _, metrics = get_policy_loss_fn("vanilla")(old, new, advantages, mask)
    # Clipped: 1.5 with A > 0 and 0.5 with A < 0. Dual clip: 4.0 with A < 0; the 9.0 is masked.
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 5)
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(1 / 5)


def test_clip_ratio_low_and_high_follow_clip_ratio() -> None:
    data = example()
    run = lambda **c: get_policy_loss_fn("vanilla")(  # noqa: E731
        data.old, data.new, data.advantages, data.mask, config=SimpleNamespace(**c)
    )[0].item()
    assert run(clip_ratio=0.5) == run(clip_ratio=0.1, clip_ratio_low=0.5, clip_ratio_high=0.5)
    assert run(clip_ratio=0.5, clip_ratio_low=None) == run(clip_ratio=0.5)
    assert run(clip_ratio=0.5) != run(clip_ratio=0.2)
    assert run(clip_ratio=0.2, clip_ratio_high=0.5) != run(clip_ratio=0.2)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_zero_advantage_mark_is_true(name: str) -> None:
    data = example()
    data.advantages[1] = 0.0
    new = data.new.clone().requires_grad_()
    config = SimpleNamespace(clip_cov_ratio=0.5, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0.9)
    loss, _ = get_policy_loss_fn(name)(
        data.old, new, data.advantages, data.mask, config=config, rollout_is_weights=data.weights.clamp(0.6, 4.0)
    )
    loss.backward()
    assert bool((new.grad[1] == 0).all()) == is_zero_where_advantage_is_zero(name)
    assert bool((new.grad[0] != 0).any())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_extreme_log_probs_stay_finite(name: str) -> None:
    old = torch.tensor([[-0.0, -1e4, -50.0, -1.0]])
    new = torch.tensor([[-1e4, -0.0, -0.0, float("-inf")]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = get_policy_loss_fn(name)(
        old, new, torch.tensor([[1.0, -1.0, 1.0, 1.0]]), mask, rollout_is_weights=torch.ones(1, 4)
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(new.grad[:, :3]).all())
    assert all(math.isfinite(value.item()) for value in metrics.values())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_metric_names_and_an_empty_micro_batch(name: str) -> None:
    data = example()
    stats = BatchStats.of(data.mask)
    stats = add_covariance_stats(stats, name, data.old, data.advantages, data.mask, None, data.weights)
    nothing = torch.zeros_like(data.mask)
    loss, metrics = get_policy_loss_fn(name)(
        data.old, data.new, data.advantages, nothing, rollout_is_weights=data.weights, stats=stats
    )
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"} <= set(metrics)
    assert loss.item() == 0
    assert all(value.item() == 0 for value in metrics.values())
    with pytest.raises(ValueError, match="no response token"):
        get_policy_loss_fn(name)(
            data.old,
            data.new,
            data.advantages,
            nothing,
            rollout_is_weights=data.weights,
            stats=replace(stats, num_tokens=0, num_sequences=0),
        )


def test_config_is_read_from_objects_dicts_and_nested() -> None:
    nested = OmegaConf.create({"clip_ratio": 0.3, "policy_loss": {"dro_beta": 0.7, "clip_cov_ratio": None}})
    assert PolicyLossConfig.read(nested) == PolicyLossConfig(clip_ratio=0.3, dro_beta=0.7)
    assert PolicyLossConfig.read({"tau_neg": 2}) == PolicyLossConfig(tau_neg=2.0)
    assert PolicyLossConfig.read(None) == PolicyLossConfig()
    with pytest.raises(ValueError, match=r"clip_ratio_c must be greater than 1.0, got 0.5"):
        PolicyLossConfig.read({"clip_ratio_c": 0.5})
    with pytest.raises(ValueError, match=r"kl_cov_ratio is a share of the tokens, at most 1, got 1\.5"):
        PolicyLossConfig.read({"kl_cov_ratio": 1.5})


def test_bad_input() -> None:
    data = example()
    with pytest.raises(ValueError, match="did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")
    with pytest.raises(ValueError, match=r"advantages has shape \(4, 7\)"):
        get_policy_loss_fn("vanilla")(data.old, data.new, data.advantages[:4], data.mask)
    for name in ("decoupled", "icepop"):
        with pytest.raises(ValueError, match="needs rollout_is_weights"):
            get_policy_loss_fn(name)(data.old, data.new, data.advantages, data.mask)
    with pytest.raises(ValueError, match="already registered"):
        register_policy_loss("vanilla")(lambda: None)


def test_a_registered_loss_is_found() -> None:
    @register_policy_loss("test_only_loss")
    def mine() -> None: ...

    assert get_policy_loss_fn("test_only_loss") is mine
    assert not is_zero_where_advantage_is_zero("test_only_loss")
    del POLICY_LOSSES._functions["test_only_loss"]
