"""Policy losses by name: how they are called, registered and found, and the clipped PPO loss itself.

Every loss has the same arguments and returns `(loss, metrics)`. The loss is this micro-batch's share of the global
loss times `stats.dp_size`; each metric is an additive share of its global value: summed over all micro-batches and
ranks it is exact for any split.
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


# Policy losses that bound a token's or sequence's step: GSPO, GMPO, SAPO, CISPO, DPPO; and the unbounded GPG, DRO.


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


# Policy losses for data from a policy other than the trainer's: decoupled PPO, IcePop, TOPR, and the bypass form.


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
