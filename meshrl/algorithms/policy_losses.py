"""Policy losses by name: how they are called, registered and found, and the clipped PPO loss itself.

Every loss has the same arguments and returns `(loss, metrics)`. The loss is this micro-batch's share of the global
loss times `stats.dp_size`; each metric is an additive share of its global value: summed over all micro-batches and
ranks it is exact for any split.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from meshrl.algorithms.aggregation import agg_loss, token_mean_metric
from meshrl.algorithms.checks import check_matrix
from meshrl.algorithms.kl import LOG_RATIO_BOUND
from meshrl.algorithms.policy_config import PolicyLossConfig
from meshrl.algorithms.stats import BatchStats, resolve_stats
from meshrl.registry import POLICY_LOSSES

Metrics = dict[str, torch.Tensor]


class PolicyLossFn(Protocol):
    """The one shape of a policy loss; tensors are [batch, response_length]."""

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
    """Decorator that enters a policy loss under `name`.

    `zero_where_advantage_is_zero` promises that a sample whose advantages are all zero has no gradient.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        if zero_where_advantage_is_zero:
            _ZERO_WITH_ADVANTAGE.add(function)
        return POLICY_LOSSES.register(name)(function)

    return enter


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss called `name`, or one's own by `file.py:name`."""
    return POLICY_LOSSES.get(name)


def is_zero_where_advantage_is_zero(name: str) -> bool:
    """Whether a sample with only zero advantages adds nothing to this loss's gradient, so it can be skipped."""
    return POLICY_LOSSES.get(name) in _ZERO_WITH_ADVANTAGE


def log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor, bound: float = LOG_RATIO_BOUND
) -> torch.Tensor:
    """log(new / old) per token, 0 outside the mask, kept within ±bound (beyond it the gradient is 0)."""
    difference = torch.where(response_mask.bool(), log_prob - old_log_prob, torch.zeros_like(log_prob))
    return difference.clamp(-bound, bound)


def check_loss_inputs(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
) -> None:
    """Shapes of a policy loss's tensors must agree."""
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
    """Weight and aggregate the token losses; turn `token_metrics` (values per token) into additive shares of means."""
    stats = resolve_stats(stats, response_mask)
    if rollout_is_weights is not None:
        token_losses = token_losses * rollout_is_weights.detach()
    loss = agg_loss(token_losses, response_mask, loss_agg_mode, stats=stats)
    metrics = {name: token_mean_metric(values, response_mask, stats) for name, values in token_metrics.items()}
    metrics["actor/pg_loss"] = loss.detach().float() / stats.dp_size
    return loss, metrics


def behaviour_weights(name: str, weights: torch.Tensor | None) -> torch.Tensor:
    """The rollout's weights for a loss that cannot do without them."""
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
    """A weighted loss in which some tokens weigh nothing; they still count as tokens."""
    stats = resolve_stats(stats, response_mask)
    kept = weights.masked_fill(left_out, 0.0)
    loss, metrics = loss_fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, kept, stats)
    metrics["actor/rollout_masked_frac"] = token_mean_metric(left_out.float(), response_mask, stats)
    return loss, metrics


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic loss max(-A r, -A clip(r, 1-low, 1+high)) per token, and where the clip was the larger."""
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
    """PPO with clipping (arXiv:1707.06347) and, for negative advantages, the dual clip at -A c (arXiv:1912.09729)."""
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
