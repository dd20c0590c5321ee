"""Policy losses for data from a policy other than the trainer's: decoupled PPO, IcePop, TOPR, and the bypass form."""

from typing import Any

import torch

from meshrl.algorithms.policy_config import PolicyLossConfig, field_of
from meshrl.algorithms.policy_losses import (
    Metrics,
    behaviour_weights,
    check_loss_inputs,
    compute_policy_loss_vanilla,
    log_ratio,
    loss_without,
    reduce_policy_loss,
    register_policy_loss,
)
from meshrl.algorithms.rollout_correction import (
    RolloutCorrectionConfig,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from meshrl.algorithms.stats import BatchStats
from meshrl.algorithms.trust_region_losses import compute_policy_loss_gpg
from meshrl.registry import unknown_name


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
    """Decoupled PPO (arXiv:2110.00641, arXiv:2505.24298): clip around the proximal policy `old_log_prob`, weighted by
    its ratio to the behaviour policy.

    `rollout_is_weights` is that ratio, untruncated; tokens where it exceeds behaviour_weight_cap are left out.
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
    """IcePop (arXiv:2510.18855): PPO's clip weighted by trainer / rollout, without the tokens where that ratio is
    outside [icepop_low, icepop_high].

    `rollout_is_weights` is that ratio, untruncated.
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
    """TOPR (arXiv:2503.14286): the plain gradient, in which what is worse than the baseline fades as it gets unlikely.

    Tokens of positive advantage have weight 1, those of negative advantage their sequence's ratio (the product of its
    tokens') cut at 1, as a constant. The paper's objective is the mode seq-mean-token-sum.
    """
    check_loss_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    PolicyLossConfig.read(config)  # refuses a config that the loss cannot follow
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
    """The clipped loss with weights that are zero outside `bounds`; left-out tokens still count as tokens."""
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
    """Two policies only: `old_log_prob` are the rollout's own log-probs, and the current policy is compared with them.

    `config.policy_loss.rollout_correction` (or `config.rollout_correction`) says how: loss_type ppo_clip lets the ratio
    itself correct; reinforce weights -A * log-prob by rollout_is. Rejected tokens (rollout_rs) have no loss but still
    count in the normalisation, which therefore stays the same for any split.
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
