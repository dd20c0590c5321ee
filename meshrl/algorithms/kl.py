"""KL estimators from the log-probs of sampled tokens, the KL controllers, and KL in the reward."""

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

# exp() of a log-ratio is taken within this bound: e^20 is 4.9e8, far above any useful ratio and far below overflow.
LOG_RATIO_BOUND = 20.0
# The adaptive coefficient falls to no less than this share of itself in one step: by the formula alone it would change
# its sign where a step has five times as many samples as the horizon.
SMALLEST_FACTOR = 0.01

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) by name: kl=k1, abs, mse=k2, low_var_kl=k3.

    A trailing `+` keeps the value of the named estimator and takes the gradient of k2, which is that of the true KL
    in expectation; the plain k1 and k3 have a zero-mean or biased gradient when used in a loss.
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
    # The bound of 10 on the result keeps one token from dominating a batch; it is the field's convention.
    return (torch.expm1(negative) - negative).clamp(-10.0, 10.0)


class KLController(Protocol):
    """Holds the current KL coefficient in `value` and may change it after a step."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedKLController:
    """A coefficient that never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The coefficient is the config's, also where a run that goes on has changed it."""


class AdaptiveKLController:
    """Moves the coefficient so that the measured KL approaches `target_kl` (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl.target_kl ({target_kl}) and kl_ctrl.horizon ({horizon}) must be positive")
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change the coefficient by at most 20 % per `horizon` samples; `n_steps` is the number of samples seen.

        It stays positive: one update leaves at least `SMALLEST_FACTOR` of it.
        """
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(1.0 + error * n_steps / self.horizon, SMALLEST_FACTOR)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = float(state.get("value", self.value))  # a fixed controller's state has none


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller described by `kl_ctrl.{type, kl_coef, target_kl, horizon}`."""
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
    """Rewards = scores - coefficient x KL, with the measured KL; the controller is updated with it.

    The KL that is measured is the mean over sequences of each sequence's mean over its tokens.
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
    """KL to the reference as a loss term (share of the global one times dp_size), and its additive metric."""
    check_matrix(log_prob=log_prob, ref_log_prob=ref_log_prob, response_mask=response_mask)
    stats = resolve_stats(stats, response_mask)
    divergence = _estimate(log_prob, ref_log_prob, kl_penalty)
    loss = agg_loss(divergence, response_mask, loss_agg_mode, stats=stats)
    return loss, {"actor/kl_loss": loss.detach().float() / stats.dp_size}


# `kl_penalty` is both the function's name and, as in code users already have, the argument that names the estimator.
_estimate = kl_penalty


# Entropy of the policy, as a measure and as a loss.


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of the categorical distributions over the last dim: logsumexp - sum p * logit, in float32 at least."""
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
    """Aggregated entropy of `logits` [batch, response_length, vocabulary]; subtracted from a loss it makes explore."""
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
    """Half the squared error, the larger of that of `vpreds` and of `vpreds` clipped to `values` ± `cliprange_value`.

    Returns the loss (as every loss here: the share of the global one times dp_size) and the additive share of the
    fraction of tokens where the clipped error was the larger.
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
    """log(new / old) per token, 0 outside the mask, kept within ±bound (beyond it the gradient is 0)."""
    difference = torch.where(response_mask.bool(), log_prob - old_log_prob, torch.zeros_like(log_prob))
    return difference.clamp(-bound, bound)
