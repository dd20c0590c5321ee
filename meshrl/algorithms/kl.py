"""KL divergence, entropy and the critic's loss, from tensors `[B, T]` of sampled tokens.

* `kl_penalty`, `compute_kl_loss`, `apply_kl_penalty`: KL estimators, as a loss term and as a part of the reward.
* `FixedKLController`, `AdaptiveKLController`: the coefficient of KL in the reward.
* `entropy_from_logits`, `compute_entropy_loss`: entropy of the policy.
* `compute_value_loss`: the critic's clipped loss.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from meshrl.algorithms.masking import (
    BatchStats,
    Count,
    agg_loss,
    check_matrix,
    check_not_empty,
    check_same_shape,
    masked_mean,
    masked_sum,
    resolve_stats,
    token_mean_metric,
)
from meshrl.registry import unknown_name

# Log-ratios are clamped to ± this bound before exp(): e^20 is 4.9e8, far above any useful ratio and far below overflow.
LOG_RATIO_BOUND = 20.0
# The smallest factor of the adaptive coefficient in one update. Without this bound, the formula would make the
# coefficient negative if a step has more than five times as many samples as the horizon.
SMALLEST_FACTOR = 0.01

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Estimate KL(policy || reference) per token by the named estimator: kl=k1, abs, mse=k2, low_var_kl=k3.

    A trailing `+` keeps the value of the named estimator and takes the gradient of k2. In expectation, the gradient of
    k2 is that of the true KL. In a loss, the plain k1 has a gradient of mean zero and the plain k3 a biased gradient.
    """
    check_same_shape(logprob=logprob, ref_logprob=ref_logprob)
    straight_through = kl_penalty.endswith("+")
    name = kl_penalty.removesuffix("+")
    if name not in KL_PENALTIES:
        raise unknown_name("kl_penalty", kl_penalty, [*KL_PENALTIES, *(known + "+" for known in KL_PENALTIES)])
    value = _kl_value(logprob, ref_logprob, name)
    if not straight_through:
        return value
    carrier = 0.5 * (logprob - ref_logprob).square()
    return carrier - carrier.detach() + value.detach()


def _kl_value(logprob: torch.Tensor, ref_logprob: torch.Tensor, name: str) -> torch.Tensor:
    difference = logprob - ref_logprob
    if name in ("kl", "k1"):
        return difference
    if name == "abs":
        return difference.abs()
    if name in ("mse", "k2"):
        return 0.5 * difference.square()
    negative = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # The conventional bound of 10 on the result keeps one token from dominating a batch.
    return (torch.expm1(negative) - negative).clamp(-10.0, 10.0)


class KLController(Protocol):
    """A KL controller: holds the current KL coefficient in `value` and may change the coefficient after a step."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedKLController:
    """A KL controller whose coefficient stays at the configured value."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing, because a fixed coefficient does not depend on the measured KL."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the saved state, so that a resumed run uses the coefficient of its current config."""


class AdaptiveKLController:
    """A KL controller that moves the measured KL towards `target_kl` (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl.target_kl ({target_kl}) and kl_ctrl.horizon ({horizon}) must be positive")
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change the coefficient by at most 20 % per `horizon` samples, where `n_steps` is the number of new samples.

        The coefficient stays positive, because one update multiplies it by at least `SMALLEST_FACTOR`.
        """
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(1.0 + error * n_steps / self.horizon, SMALLEST_FACTOR)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = float(state.get("value", self.value))  # the state of a fixed controller has no value


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """Build the KL controller that `kl_ctrl.{type, kl_coef, target_kl, horizon}` describes."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise unknown_name("kl_ctrl.type", str(kl_ctrl.type), ["fixed", "adaptive"])


def apply_kl_penalty(
    token_level_scores: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_ctrl: KLController,
    kl_penalty: str = "kl",
) -> tuple[torch.Tensor, dict[str, float]]:
    """Subtract coefficient * KL from the scores `[B, T]`, update the controller, and return rewards and metrics.

    The measured KL is the mean over sequences of each sequence's mean over its tokens. The rewards use the coefficient
    from before the update.
    """
    check_matrix(
        token_level_scores=token_level_scores,
        old_log_probs=old_log_probs,
        ref_log_prob=ref_log_prob,
        response_mask=response_mask,
    )
    check_not_empty(response_mask)
    mask = response_mask.bool()
    divergence = _estimate(old_log_probs, ref_log_prob, kl_penalty).masked_fill(~mask, 0.0)
    coefficient = kl_ctrl.value
    token_level_rewards = token_level_scores - coefficient * divergence
    has_tokens = mask.any(-1)
    current_kl = float(masked_sum(masked_mean(divergence, mask, dim=-1), has_tokens) / has_tokens.sum())
    kl_ctrl.update(current_kl=current_kl, n_steps=token_level_scores.shape[0])
    return token_level_rewards, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": coefficient}


def compute_kl_loss(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_penalty: str = "low_var_kl",
    loss_agg_mode: str = "token-mean",
    stats: BatchStats | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the KL to the reference as a loss term, and the loss term's additive metric.

    The loss is this micro-batch's share of the global loss times `dp_size`.
    """
    check_matrix(log_prob=log_prob, ref_log_prob=ref_log_prob, response_mask=response_mask)
    stats = resolve_stats(stats, response_mask)
    divergence = _estimate(log_prob, ref_log_prob, kl_penalty)
    loss = agg_loss(divergence, response_mask, loss_agg_mode, stats=stats)
    return loss, {"actor/kl_loss": loss.detach().float() / stats.dp_size}


# `kl_penalty` is the function above and, as in existing user code, the argument that names the estimator.
_estimate = kl_penalty


# Entropy of the policy, as a metric and as a loss.


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of the categorical distributions over the last dimension: logsumexp - sum p * logit.

    Logits in float16 or bfloat16 are converted to float32.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    # Logits of -inf (masked tokens) have probability 0 and must not become NaN in the product.
    finite = logits.masked_fill(torch.isneginf(logits), 0.0)
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * finite).sum(-1)


def compute_entropy_loss(
    logits: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    stats: BatchStats | None = None,
) -> torch.Tensor:
    """Aggregate the entropy of `logits` `[B, T, vocabulary]`. Subtracting it from a loss encourages exploration."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, stats=stats)


# The critic's loss.


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    stats: BatchStats | None = None,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: Count | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the critic's loss: half the larger squared error of `vpreds` and of the clipped `vpreds`.

    Predictions are clipped to `values` ± `cliprange_value`. Return the loss, which is this micro-batch's share of the
    global loss times `dp_size`, and the additive share of the clip fraction. The clip fraction counts the tokens whose
    clipped error is the larger.
    """
    check_matrix(vpreds=vpreds, returns=returns, values=values, response_mask=response_mask)
    clipped_predictions = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain = (vpreds - returns).square()
    clipped = (clipped_predictions - returns).square()
    if stats is None and batch_num_tokens is not None:
        stats = BatchStats(dp_size, int(batch_num_tokens), _whole(global_batch_size), _real(loss_scale_factor))
    loss = agg_loss(
        torch.maximum(plain, clipped),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
        stats=stats,
    )
    clip_fraction = token_mean_metric((clipped > plain).float(), response_mask, resolve_stats(stats, response_mask))
    return 0.5 * loss, clip_fraction


def _whole(count: Count | None) -> int | None:
    return None if count is None else int(count)


def _real(count: Count | None) -> float | None:
    return None if count is None else float(count)


def log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor, bound: float = LOG_RATIO_BOUND
) -> torch.Tensor:
    """Return log(new / old) per token `[B, T]`, clamped to ±`bound` and 0 outside the mask.

    The gradient is 0 if the log-ratio exceeds the bound.
    """
    difference = torch.where(response_mask.bool(), log_prob - old_log_prob, torch.zeros_like(log_prob))
    return difference.clamp(-bound, bound)
