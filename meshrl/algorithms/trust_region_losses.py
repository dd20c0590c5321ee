"""Policy losses that bound a token's or sequence's step: GSPO, GMPO, SAPO, CISPO, DPPO; and the unbounded GPG, DRO."""

from typing import Any

import torch

from meshrl.algorithms.masked import masked_mean
from meshrl.algorithms.policy_config import PolicyLossConfig
from meshrl.algorithms.policy_losses import (
    Metrics,
    check_loss_inputs,
    clipped_surrogate,
    log_ratio,
    reduce_policy_loss,
    register_policy_loss,
)
from meshrl.algorithms.stats import BatchStats


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
    """GSPO (arXiv:2507.18071): PPO's clip on the sequence's ratio, the geometric mean of its tokens' ratios.

    Every token carries that ratio with its own gradient (the token variant of the paper), so advantages may differ
    within a sequence. The paper's objective is the mode seq-mean-token-mean.
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
    """GMPO (arXiv:2507.20673): minus advantage times the geometric mean of ratios that are clipped token by token.

    The clip range is of the log-ratio, [-clip_ratio_low, clip_ratio_high], and only cuts steps in the direction the
    advantage asks for. The loss belongs to the sequence, with its mean advantage and the geometric mean of
    `rollout_is_weights`; the paper's objective is the mode seq-mean-token-mean.
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
    """SAPO (arXiv:2511.20347): a soft gate 4/tau * sigmoid(tau (r - 1)) in place of the clip.

    `tau_pos` for positive advantages, `tau_neg` for the others; the paper aggregates by seq-mean-token-mean.
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
    """CISPO (arXiv:2506.13585): the clipped ratio is a constant weight of log-prob, so no token loses its gradient."""
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
    """DPPO (arXiv:2602.04879) with total variation: a token counts while its probability moved by at most clip_ratio
    (`_low`, `_high`) in the direction its advantage asks for."""
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
    """DPPO (arXiv:2602.04879) with the KL of "this token or another": a token counts while that KL is at most
    clip_ratio (`_low`, `_high`) or its probability moved against its advantage."""
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    new, old = log_prob.detach(), old_log_prob
    # The small constant keeps both logarithms finite where a probability is 1 in float32.
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
    """-A * min(r, clip_ratio_c) * log-prob on the tokens inside the trust region; the weight is a constant."""
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
    """GPG (arXiv:2504.02546): the plain policy gradient -A * log-prob."""
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    PolicyLossConfig.read(config)  # refuses a config that the loss cannot follow
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
    """DRO (arXiv:2405.19107): -A * log-prob + dro_beta / 2 * (log-ratio)^2, a soft pull back instead of a clip."""
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    beta = PolicyLossConfig.read(config).dro_beta
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    losses = -advantages * log_prob + 0.5 * beta * log_r.square()
    metrics = _unclipped_metrics(log_r)
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


def _unclipped_metrics(log_r: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics of a loss without clipping, under the same names."""
    nothing = torch.zeros_like(log_r)
    return {"actor/pg_clipfrac": nothing, "actor/pg_clipfrac_lower": nothing, "actor/ppo_kl": -log_r}
