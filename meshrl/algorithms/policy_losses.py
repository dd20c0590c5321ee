"""The registry of policy losses, and all policy losses but those of `covariance_losses.py`.

Every loss takes tensors `[B, T]` and returns `(loss, metrics)`. The loss is this micro-batch's share of the global loss
times `stats.dp_size`. Each metric is an additive share of its global value, so that the sum over all micro-batches and
ranks is exact for every split.

* `register_policy_loss`, `get_policy_loss_fn`: register and find a loss by its name.
* `reduce_policy_loss`, `loss_without`, `clipped_surrogate`: parts that several losses share.
* vanilla (PPO), gspo, geo_mean, sapo, cispo, dppo_tv, dppo_kl: losses that bound the step of a token or sequence.
* gpg, dro: losses without a clip.
* decoupled, icepop, topr, bypass_mode: losses for data that another policy than the trainer's sampled.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from meshrl.algorithms.kl import log_ratio
from meshrl.algorithms.masking import BatchStats, agg_loss, check_matrix, masked_mean, resolve_stats, token_mean_metric
from meshrl.algorithms.policy_config import PolicyLossConfig, field_of
from meshrl.algorithms.rollout_correction import (
    RolloutCorrectionConfig,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from meshrl.registry import POLICY_LOSSES, unknown_name

Metrics = dict[str, torch.Tensor]


class PolicyLossFn(Protocol):
    """The signature of all policy losses. Tensors are `[B, T]` (batch, response length)."""

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
        stats: BatchStats | None = None,
    ) -> tuple[torch.Tensor, Metrics]: ...


_ZERO_WITH_ADVANTAGE: set[Callable[..., Any]] = set()


def register_policy_loss(
    name: str, zero_where_advantage_is_zero: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a policy loss under `name`.

    `zero_where_advantage_is_zero` declares that a sample whose advantages are all zero has no gradient.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        if zero_where_advantage_is_zero:
            _ZERO_WITH_ADVANTAGE.add(function)
        return POLICY_LOSSES.register(name)(function)

    return enter


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the policy loss registered as `name`, or load the user's function at `file.py:name`."""
    return POLICY_LOSSES.get(name)


def is_zero_where_advantage_is_zero(name: str) -> bool:
    """Return whether samples whose advantages are all zero have no gradient in this loss, and can be skipped."""
    return POLICY_LOSSES.get(name) in _ZERO_WITH_ADVANTAGE


def check_loss_inputs(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
) -> None:
    """Raise `ValueError` unless the tensors of a policy loss are matrices `[B, T]` of the same shape."""
    check_matrix(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        rollout_is_weights=rollout_is_weights,
    )


def reduce_policy_loss(
    token_losses: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    rollout_is_weights: torch.Tensor | None,
    stats: BatchStats | None,
    token_metrics: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, Metrics]:
    """Weight and aggregate token losses `[B, T]`, and turn `token_metrics` `[B, T]` into additive shares of means."""
    stats = resolve_stats(stats, response_mask)
    if rollout_is_weights is not None:
        token_losses = token_losses * rollout_is_weights.detach()
    loss = agg_loss(token_losses, response_mask, loss_agg_mode, stats=stats)
    metrics = {name: token_mean_metric(values, response_mask, stats) for name, values in token_metrics.items()}
    metrics["actor/pg_loss"] = loss.detach().float() / stats.dp_size
    return loss, metrics


def behaviour_weights(name: str, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the importance weights without gradient, and raise `ValueError` if the loss `name` lacks its weights."""
    if weights is None:
        raise ValueError(
            f"policy loss {name!r} needs rollout_is_weights, the untruncated ratio of old_log_prob to the rollout's: "
            "keep rollout_log_probs (rollout.calculate_log_probs=true)"
        )
    return weights.detach()


def loss_without(
    left_out: torch.Tensor,
    weights: torch.Tensor,
    loss_fn: PolicyLossFn,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    stats: BatchStats | None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute `loss_fn` with weight 0 for the tokens in the mask `left_out`.

    Tokens with weight 0 still count as tokens in the normalisation.
    """
    stats = resolve_stats(stats, response_mask)
    kept = weights.masked_fill(left_out, 0.0)
    loss, metrics = loss_fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, kept, stats)
    metrics["actor/rollout_masked_frac"] = token_mean_metric(left_out.float(), response_mask, stats)
    return loss, metrics


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's pessimistic loss max(-A r, -A clip(r, 1-low, 1+high)) per token, as `[B, T]`.

    Also return the mask of the tokens whose clipped loss is the larger.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, clipped), clipped > plain


@register_policy_loss("vanilla", zero_where_advantage_is_zero=True)
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute PPO's clipped loss (arXiv:1707.06347), with the dual clip of negative advantages (arXiv:1912.09729).

    The dual clip bounds the loss of tokens with negative advantage at -A c, where c is `clip_ratio_c` (default 3.0).
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    ratio_c = 3.0 if parameters.clip_ratio_c is None else parameters.clip_ratio_c
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    losses, clipped = clipped_surrogate(log_r.exp(), advantages, parameters.low, parameters.high)
    ceiling = -advantages * ratio_c
    beyond = (advantages < 0) & (losses > ceiling)
    return reduce_policy_loss(
        torch.where(beyond, ceiling, losses),
        response_mask,
        loss_agg_mode,
        rollout_is_weights,
        stats,
        {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": beyond, "actor/ppo_kl": -log_r},
    )


# Policy losses that bound the step of a token or sequence (GSPO, GMPO, SAPO, CISPO, DPPO), and losses without a clip
# (GPG, DRO).


@register_policy_loss("gspo", zero_where_advantage_is_zero=True)
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the GSPO loss (arXiv:2507.18071): PPO's clip on the ratio of the sequence.

    The sequence ratio is the geometric mean of the token ratios. Every token has the value of that ratio with its own
    gradient (the token variant of the paper), so advantages may differ within a sequence. The paper's objective is the
    aggregation mode seq-mean-token-mean.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    sequence_log_r = masked_mean(log_r, response_mask, dim=-1).detach()
    ratio = (sequence_log_r[:, None] + log_prob - log_prob.detach()).exp()
    losses, clipped = clipped_surrogate(ratio, advantages, parameters.low, parameters.high)
    metrics = {
        "actor/pg_clipfrac": clipped,
        "actor/pg_clipfrac_lower": torch.zeros_like(clipped),
        "actor/ppo_kl": -log_r,
    }
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("geo_mean", zero_where_advantage_is_zero=True)
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the GMPO loss (arXiv:2507.20673): minus advantage times the geometric mean of clipped token ratios.

    The clip range of the log-ratio is [-clip_ratio_low, clip_ratio_high]. Only steps in the direction of the advantage
    are clipped. The loss is per sequence: it uses the sequence's mean advantage and the geometric mean of
    `rollout_is_weights`. The paper's objective is the aggregation mode seq-mean-token-mean.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    bounded = log_r.clamp(-parameters.low, parameters.high)
    pessimistic = torch.where(advantages >= 0, torch.minimum(log_r, bounded), torch.maximum(log_r, bounded))
    sequence_ratio = masked_mean(pessimistic, response_mask, dim=-1).exp()
    sequence_losses = -masked_mean(advantages, response_mask, dim=-1) * sequence_ratio
    if rollout_is_weights is not None:
        log_weights = rollout_is_weights.detach().clamp(min=1e-10).log()
        sequence_losses = sequence_losses * masked_mean(log_weights, response_mask, dim=-1).exp()
    losses = sequence_losses[:, None].expand_as(log_r)
    beyond = log_r != bounded
    metrics = {
        "actor/pg_clipfrac": beyond & (advantages > 0),
        "actor/pg_clipfrac_lower": beyond & (advantages < 0),
        "actor/ppo_kl": -log_r,
    }
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, None, stats, metrics)


@register_policy_loss("sapo", zero_where_advantage_is_zero=True)
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the SAPO loss (arXiv:2511.20347), with a soft gate 4/tau * sigmoid(tau (r - 1)) instead of the clip.

    tau is `tau_pos` for positive advantages and `tau_neg` for all others. The paper aggregates by seq-mean-token-mean.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    tau = torch.where(advantages > 0, parameters.tau_pos, parameters.tau_neg)
    gate = torch.sigmoid(tau * (log_r.exp() - 1.0)) * (4.0 / tau)
    metrics = _unclipped_metrics(log_r)
    return reduce_policy_loss(-advantages * gate, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("cispo", zero_where_advantage_is_zero=True)
def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the CISPO loss (arXiv:2506.13585): minus advantage times log-prob, weighted by the clipped ratio.

    The weight is a constant without gradient, so that clipped tokens keep their gradient.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_r.detach().exp()
    weight = ratio.clamp(1.0 - parameters.low, 1.0 + parameters.high)
    metrics = _unclipped_metrics(log_r) | {"actor/pg_clipfrac": ratio != weight}
    losses = -advantages * weight * log_prob
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("dppo_tv", zero_where_advantage_is_zero=True)
def compute_policy_loss_dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the DPPO loss (arXiv:2602.04879) with a trust region in total variation.

    A token contributes while its probability has moved by at most clip_ratio (`_low`, `_high`) in the direction of its
    advantage.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    moved = log_prob.detach().exp() - old_log_prob.exp()
    inside = torch.where(advantages > 0, moved <= parameters.high, moved >= -parameters.low)
    return _divergence_masked_loss(
        old_log_prob, log_prob, advantages, response_mask, inside, loss_agg_mode, parameters, rollout_is_weights, stats
    )


@register_policy_loss("dppo_kl", zero_where_advantage_is_zero=True)
def compute_policy_loss_dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the DPPO loss (arXiv:2602.04879) with a trust region in binary KL.

    The binary KL compares the distributions over two outcomes: the sampled token, or any other token. A token
    contributes while this KL is at most clip_ratio (`_low`, `_high`), or if its probability moved against its
    advantage.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    new, old = log_prob.detach(), old_log_prob
    # The small constant keeps the logarithm finite if a probability is 1 in float32.
    other = torch.log((1.0 - old.exp() + 1e-8) / (1.0 - new.exp() + 1e-8))
    divergence = old.exp() * (old - new) + (1.0 - old.exp()) * other
    rising = (divergence <= parameters.high) | (new <= old)
    falling = (divergence <= parameters.low) | (new >= old)
    inside = torch.where(advantages > 0, rising, falling)
    return _divergence_masked_loss(
        old_log_prob, log_prob, advantages, response_mask, inside, loss_agg_mode, parameters, rollout_is_weights, stats
    )


def _divergence_masked_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    inside: torch.Tensor,
    loss_agg_mode: str,
    parameters: PolicyLossConfig,
    rollout_is_weights: torch.Tensor | None,
    stats: BatchStats | None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute -A * min(r, clip_ratio_c) * log-prob on the tokens in the mask `inside`, with a constant weight.

    The cap `clip_ratio_c` of the ratio defaults to 20.0.
    """
    cap = 20.0 if parameters.clip_ratio_c is None else parameters.clip_ratio_c
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_r.detach().exp()
    losses = -advantages * ratio.clamp(max=cap) * log_prob * inside
    metrics = {
        "actor/pg_clipfrac": ~inside,
        "actor/pg_clipfrac_lower": (ratio > cap) & inside,
        "actor/ppo_kl": -log_r,
    }
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("gpg", zero_where_advantage_is_zero=True)
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the GPG loss (arXiv:2504.02546): the plain policy gradient -A * log-prob."""
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    PolicyLossConfig.read(config)  # raises for a config that the loss cannot use
    metrics = _unclipped_metrics(log_ratio(log_prob, old_log_prob, response_mask))
    return reduce_policy_loss(-advantages * log_prob, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the DRO loss (arXiv:2405.19107): -A * log-prob + dro_beta / 2 * (log-ratio)^2.

    The quadratic term pulls the policy back to the old policy and replaces the clip.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    beta = PolicyLossConfig.read(config).dro_beta
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    losses = -advantages * log_prob + 0.5 * beta * log_r.square()
    metrics = _unclipped_metrics(log_r)
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


def _unclipped_metrics(log_r: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics of a loss without clipping: clip fractions of 0, and the KL to the old policy."""
    nothing = torch.zeros_like(log_r)
    return {"actor/pg_clipfrac": nothing, "actor/pg_clipfrac_lower": nothing, "actor/ppo_kl": -log_r}


# Policy losses for data that a policy other than the trainer's sampled: decoupled PPO, IcePop, TOPR, bypass mode.


@register_policy_loss("decoupled", zero_where_advantage_is_zero=True)
def compute_policy_loss_decoupled(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the decoupled PPO loss (arXiv:2110.00641, arXiv:2505.24298).

    PPO clips around the proximal policy `old_log_prob`. Each token is weighted by the ratio of the proximal policy to
    the behaviour policy. `rollout_is_weights` is this ratio, untruncated. Tokens whose ratio exceeds
    `behaviour_weight_cap` are left out.
    """
    parameters = PolicyLossConfig.read(config)
    return _masked_weight_loss(
        "decoupled",
        (0.0, parameters.behaviour_weight_cap),
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        stats,
    )


@register_policy_loss("icepop", zero_where_advantage_is_zero=True)
def compute_policy_loss_icepop(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the IcePop loss (arXiv:2510.18855): PPO's clipped loss, weighted by the ratio trainer / rollout.

    `rollout_is_weights` is this ratio, untruncated. Tokens whose ratio is outside [icepop_low, icepop_high] are left
    out.
    """
    parameters = PolicyLossConfig.read(config)
    return _masked_weight_loss(
        "icepop",
        (parameters.icepop_low, parameters.icepop_high),
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        stats,
    )


@register_policy_loss("topr", zero_where_advantage_is_zero=True)
def compute_policy_loss_topr(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the TOPR loss (arXiv:2503.14286): a policy gradient whose negative samples fade as their ratio falls.

    A token of negative advantage is weighted by its sequence's ratio, truncated at 1. The sequence ratio is the
    product of the token ratios and has no gradient. All other tokens have weight 1. The paper's objective is the
    aggregation mode seq-mean-token-sum.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    PolicyLossConfig.read(config)  # raises for a config that the loss cannot use
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    sequence_log_r = log_r.detach().sum(-1, keepdim=True)
    tapered = advantages < 0
    weights = torch.where(tapered, sequence_log_r.clamp(max=0.0).exp(), 1.0)
    metrics = {
        "actor/pg_clipfrac": tapered & (sequence_log_r > 0),
        "actor/pg_clipfrac_lower": torch.zeros_like(tapered),
        "actor/ppo_kl": -log_r,
    }
    losses = -advantages * weights * log_prob
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


def _masked_weight_loss(
    name: str,
    bounds: tuple[float, float],
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None,
    stats: BatchStats | None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute PPO's clipped loss, weighted by `rollout_is_weights` inside `bounds` and by 0 outside.

    Tokens with weight 0 still count as tokens in the normalisation.
    """
    weights = behaviour_weights(name, rollout_is_weights)
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, weights)
    return loss_without(
        (weights < bounds[0]) | (weights > bounds[1]),
        weights,
        compute_policy_loss_vanilla,
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        stats,
    )


@register_policy_loss("bypass_mode", zero_where_advantage_is_zero=True)
def compute_policy_loss_bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute a loss with two policies only: the current policy, and the rollout policy in `old_log_prob`.

    `config.policy_loss.rollout_correction` (or `config.rollout_correction`) selects the correction. With `loss_type`
    ppo_clip, PPO's ratio to the rollout policy is itself the correction. With reinforce, -A * log-prob is weighted by
    the importance weights of `rollout_is`. Tokens that `rollout_rs` rejects have no loss, but still count in the
    normalisation, which is therefore the same for every split.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    correction = _find_correction(config)
    weights = torch.ones_like(log_prob)
    rejected = torch.zeros_like(response_mask, dtype=torch.bool)
    has_tokens = bool(response_mask.any())
    log_r = (log_prob - old_log_prob).detach()
    if correction.rollout_rs is not None and has_tokens:
        kept, _ = compute_rollout_rejection_mask(
            log_r, response_mask, correction.rollout_rs, correction.rollout_rs_threshold
        )
        rejected = response_mask.bool() & ~kept.bool()
    if correction.loss_type == "reinforce" and correction.rollout_is is not None and has_tokens:
        weights, _ = compute_rollout_correction_weights(
            log_r, response_mask, correction.rollout_is, correction.rollout_is_threshold
        )
    loss_fn = compute_policy_loss_gpg if correction.loss_type == "reinforce" else compute_policy_loss_vanilla
    return loss_without(
        rejected,
        weights,
        loss_fn,
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        stats,
    )


def _find_correction(config: Any) -> RolloutCorrectionConfig:
    for source in (field_of(config, "policy_loss"), config):
        found = field_of(source, "rollout_correction")
        if found is not None:
            correction = RolloutCorrectionConfig.read(found)
            break
    else:
        correction = RolloutCorrectionConfig()
    if correction.loss_type not in ("ppo_clip", "reinforce"):
        raise unknown_name("rollout_correction.loss_type", correction.loss_type, ["ppo_clip", "reinforce"])
    if correction.rollout_is_batch_normalize:
        raise ValueError(
            "rollout_is_batch_normalize needs the whole batch at once and cannot be used in bypass_mode, where weights "
            "are computed inside each micro-batch"
        )
    return correction
