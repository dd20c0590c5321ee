"""Policy losses that select tokens over the whole mini-batch: Clip-Cov, KL-Cov and M2PO.

Clip-Cov and KL-Cov (arXiv:2505.22617) select tokens by the covariance of log-prob and advantage. M2PO
(arXiv:2510.01161) selects the tokens whose probability has changed most since the rollout policy sampled them. A
micro-batch cannot make these selections alone. `add_covariance_stats` therefore selects before any forward pass, from
the old log-probs, which equal the current log-probs if training is on-policy. Every micro-batch receives the selection
as a few numbers: two means, and the bounds of the selected tokens. Ties in covariance, such as between all tokens of
probability 1, are broken by a fixed hash of sample and position.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from meshrl.algorithms.kl import LOG_RATIO_BOUND, log_ratio
from meshrl.algorithms.masking import BatchStats, CovarianceStats, check_not_empty
from meshrl.algorithms.policy_config import PolicyLossConfig
from meshrl.algorithms.policy_losses import (
    Metrics,
    behaviour_weights,
    check_loss_inputs,
    clipped_surrogate,
    compute_policy_loss_vanilla,
    loss_without,
    reduce_policy_loss,
    register_policy_loss,
)

COVARIANCE_LOSSES = ("clip_cov", "kl_cov", "m2po")


def add_covariance_stats(
    stats: BatchStats,
    loss_mode: str,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> BatchStats:
    """Return `stats` with the field `covariance` set for clip_cov, kl_cov or m2po, and unchanged for other losses.

    The tensors `[B, T]` must cover the whole mini-batch over all ranks. Only m2po needs `rollout_is_weights`.
    """
    if loss_mode not in COVARIANCE_LOSSES:
        return stats
    check_loss_inputs(old_log_prob, old_log_prob, advantages, response_mask)
    check_not_empty(response_mask)
    parameters = PolicyLossConfig.read(config)
    mask = response_mask.bool()
    tokens = int(mask.sum())
    if loss_mode == "m2po":
        bounds = _second_moment_bounds(old_log_prob, advantages, mask, rollout_is_weights, config)
        return replace(stats, covariance=bounds)
    means = CovarianceStats(float(advantages[mask].double().mean()), float(old_log_prob[mask].double().mean()))
    covariance = _covariance(old_log_prob, advantages, means)[mask]
    keys = token_keys(old_log_prob, mask)[mask]
    if loss_mode == "kl_cov":
        chosen = replace(means, **_top_bounds(covariance, keys, max(int(parameters.kl_cov_ratio * tokens), 1)))
    else:
        in_band = (covariance > parameters.clip_cov_lb) & (covariance < parameters.clip_cov_ub)
        keys = keys[in_band].sort().values
        wanted = min(max(int(parameters.clip_cov_ratio * tokens), 1), len(keys))
        chosen = replace(means, key_bound=int(keys[wanted - 1]) if wanted else -1)
    return replace(stats, covariance=chosen)


def _top_bounds(covariance: torch.Tensor, keys: torch.Tensor, count: int) -> dict[str, Any]:
    """Return the bounds that select the `count` tokens of largest covariance.

    `bound` is the smallest selected covariance. `key_bound` is the largest selected key among the tokens whose
    covariance equals `bound`. M2PO passes the distance of each token as `covariance`.
    """
    bound = covariance.topk(min(count, len(covariance))).values[-1]
    tied = keys[covariance == bound].sort().values
    places = count - int((covariance > bound).sum())
    return {"bound": float(bound), "key_bound": int(tied[places - 1])}


def _second_moment_bounds(
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    config: Any,
) -> CovarianceStats:
    """Return the bounds of the fewest tokens to leave out so that the mean of log(weight)² is at most `m2_threshold`.

    Only tokens that `_moves_on` selects may be left out, the largest first. All of these tokens are left out if the
    threshold cannot be reached.
    """
    weights = behaviour_weights("m2po", weights)
    moving_on, distance = _moves_on(advantages, weights)[mask], _distance(weights)[mask]
    keys = token_keys(old_log_prob, mask)[mask]
    squares = distance.clamp(max=math.exp(LOG_RATIO_BOUND)).log().square()
    largest = squares[moving_on].sort(descending=True).values
    left = len(squares) - torch.arange(len(largest) + 1, device=squares.device)
    sums = squares.sum() - torch.cat([largest.new_zeros(1), largest.cumsum(0)])
    fits = (sums / left.clamp(min=1) <= PolicyLossConfig.read(config).m2_threshold).nonzero()
    count = int(fits[0]) if len(fits) else len(largest)
    if count == 0:
        return CovarianceStats(0.0, 0.0, bound=float("inf"))
    return CovarianceStats(0.0, 0.0, **_top_bounds(distance[moving_on], keys[moving_on], count))


def _distance(weights: torch.Tensor) -> torch.Tensor:
    # Increases with |log(weight)|. Division gives the same bits on every device, a logarithm does not.
    wide = weights.double()
    return torch.maximum(wide, 1.0 / wide)


def _moves_on(advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return a mask `[B, T]` of tokens whose ratio has already moved in the direction of their advantage.

    PPO's clip holds back such tokens.
    """
    return ((advantages > 0) & (weights > 1)) | ((advantages < 0) & (weights < 1))


def _covariance(log_prob: torch.Tensor, advantages: torch.Tensor, means: CovarianceStats) -> torch.Tensor:
    # In float64, so that the comparison of a token with the bounds has the same result in every micro-batch.
    return (advantages.detach().double() - means.mean_advantage) * (log_prob.detach().double() - means.mean_log_prob)


def token_keys(log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a pseudo-random key in [0, 2^62) for each token, as int64 `[B, T]`.

    The key is a hash of the row's log-probs and of the token's position among the set tokens. It does not depend on
    other rows or on padding, so that every split of a batch gives a token the same key.
    """
    place = mask.long().cumsum(-1)
    bits = log_prob.detach().float().contiguous().view(torch.int32).long()
    row = (_mix(bits + place * 0x9E3779B97F4A7C1) * mask).sum(-1, keepdim=True)
    return _mix(row ^ _mix(place)) & (2**62 - 1)


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Hash int64 numbers by shifts and multiplications, which wrap around on overflow."""
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x81DADEF4BC2DD44D - 2**64), (33, 1)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers


def _selection(
    loss_mode: str,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    stats: BatchStats | None,
) -> tuple[BatchStats, torch.Tensor, torch.Tensor]:
    """Return the completed stats, the covariance `[B, T]` of each token and the key `[B, T]` of each token."""
    stats = _completed(loss_mode, old_log_prob, advantages, response_mask, config, stats)
    assert stats.covariance is not None
    covariance = _covariance(old_log_prob, advantages, stats.covariance)
    return stats, covariance, token_keys(old_log_prob, response_mask.bool())


def _completed(
    loss_mode: str,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    stats: BatchStats | None,
    weights: torch.Tensor | None = None,
) -> BatchStats:
    """Return `stats` if its field `covariance` is set, and raise `ValueError` if the field is missing.

    If `stats` is None, the tensors are taken as the whole mini-batch and the stats are computed from them.
    """
    if stats is None:
        whole = BatchStats.of(response_mask)
        stats = add_covariance_stats(whole, loss_mode, old_log_prob, advantages, response_mask, config, weights)
    if stats.covariance is None:
        raise ValueError(
            f"{loss_mode} chooses tokens within the whole mini-batch: before splitting it, complete the stats with "
            "add_covariance_stats(stats, loss_mode, old_log_prob, advantages, response_mask, config, ...)"
        )
    return stats


@register_policy_loss("clip_cov", zero_where_advantage_is_zero=True)
def compute_policy_loss_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the Clip-Cov loss: PPO's clipped loss with a fraction `clip_cov_ratio` of all tokens set to zero.

    A fixed hash picks these tokens among the tokens whose covariance lies between `clip_cov_lb` and `clip_cov_ub`.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    stats, covariance, keys = _selection("clip_cov", old_log_prob, advantages, response_mask, config, stats)
    assert stats.covariance is not None
    in_band = (covariance > parameters.clip_cov_lb) & (covariance < parameters.clip_cov_ub)
    dropped = in_band & (keys <= stats.covariance.key_bound)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    losses, clipped = clipped_surrogate(log_r.exp(), advantages, parameters.low, parameters.high)
    metrics = {
        "actor/pg_clipfrac": dropped | clipped,
        "actor/pg_clipfrac_lower": torch.zeros_like(dropped),
        "actor/ppo_kl": -log_r,
        "actor/cov_frac": dropped,
    }
    return reduce_policy_loss(losses * ~dropped, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the KL-Cov loss: -A r, plus a penalty on the tokens with the largest covariance.

    The penalty is ppo_kl_coef * |log r| on a fraction `kl_cov_ratio` of the tokens, where r is new / old probability.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    parameters = PolicyLossConfig.read(config)
    stats, covariance, keys = _selection("kl_cov", old_log_prob, advantages, response_mask, config, stats)
    bounds = stats.covariance
    assert bounds is not None
    tied = (covariance == bounds.bound) & (keys <= bounds.key_bound)
    penalised = (covariance > bounds.bound) | tied
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    losses = -advantages * log_r.exp() + parameters.ppo_kl_coef * log_r.abs() * penalised
    nothing = torch.zeros_like(penalised)
    metrics = {
        "actor/pg_clipfrac": nothing,
        "actor/pg_clipfrac_lower": nothing,
        "actor/ppo_kl": -log_r,
        "actor/cov_frac": penalised,
    }
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


@register_policy_loss("m2po", zero_where_advantage_is_zero=True)
def compute_policy_loss_m2po(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the M2PO loss (arXiv:2510.01161): PPO's clipped loss, weighted by the ratio trainer / rollout.

    As few tokens as possible are left out so that the second moment of the ratio's logarithm over the mini-batch is at
    most `m2_threshold`. Only tokens whose ratio has moved in the direction of their advantage are left out. PPO's clip
    around `old_log_prob` bounds the update itself. `rollout_is_weights` is the untruncated ratio.
    """
    weights = behaviour_weights("m2po", rollout_is_weights)
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, weights)
    stats = _completed("m2po", old_log_prob, advantages, response_mask, config, stats, weights)
    assert stats.covariance is not None
    distance, bounds = _distance(weights), stats.covariance
    tied = (distance == bounds.bound) & (token_keys(old_log_prob, response_mask.bool()) <= bounds.key_bound)
    left_out = _moves_on(advantages, weights) & ((distance > bounds.bound) | tied)
    return loss_without(
        left_out,
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
