"""Correcting for a rollout policy that differs from the trainer's: importance weights, rejection, diagnostics.

`log_ratio` is always log(trainer / rollout) of the sampled tokens, [batch, response_length]. In the decoupled form the
trainer's policy is `old_log_probs`, a third policy between rollout and current; in the bypass form `old_log_probs` are
the rollout's own and the current policy is compared with them inside the loss (`bypass_mode`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from meshrl.algorithms.kl import LOG_RATIO_BOUND
from meshrl.algorithms.kl import log_ratio as bounded_log_ratio
from meshrl.algorithms.masking import check_finite, check_matrix, check_not_empty, masked_mean, masked_sum
from meshrl.algorithms.policy_config import field_of
from meshrl.registry import unknown_name

ROLLOUT_RS_MODES = (
    *(f"{level}_k{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What to do about the mismatch; by default nothing but measure it."""

    rollout_is: str | None = None  # token, sequence
    rollout_is_threshold: float | str = 2.0  # 2.0 truncates; "0.5_5.0" masks outside (IcePop)
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None  # one or more of ROLLOUT_RS_MODES, separated by commas
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"  # of bypass_mode: ppo_clip, reinforce

    @classmethod
    def read(cls, config: Any) -> "RolloutCorrectionConfig":
        """Take each option from an object with attributes or keys, where it is there and set."""
        if config is None or isinstance(config, cls):
            return config or cls()
        found = {name: field_of(config, name) for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in found.items() if value is not None})


def compute_rollout_correction_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Importance weights per token or per sequence (the product of its tokens' ratios), without gradient.

    A number truncates weights at it; "lower_upper" sets weights outside to 0. With batch normalisation the mean weight
    over tokens (over sequences) becomes 1. Zero outside the mask.
    """
    check_matrix(log_ratio=log_ratio, response_mask=response_mask)
    check_not_empty(response_mask)
    check_finite("log_ratio", log_ratio, response_mask)
    lower, upper = parse_is_threshold(rollout_is_threshold)
    mask = response_mask.bool()
    if rollout_is == "token":
        exact = log_ratio.detach().masked_fill(~mask, 0.0)
    elif rollout_is == "sequence":
        exact = masked_sum(log_ratio.detach(), mask, dim=-1)[:, None].expand_as(log_ratio)
    else:
        raise unknown_name("rollout_is", str(rollout_is), ["token", "sequence"])
    raw = exact.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    outside = raw > upper
    if lower is None:
        weights = raw.clamp(max=upper)
    else:
        outside = outside | (raw < lower)
        weights = raw.masked_fill(outside, 0.0)
    weights = weights.masked_fill(~mask, 0.0)
    metrics = _weight_metrics(weights, mask) | _ratio_metrics(
        raw, outside, mask, rollout_is, lower or 1.0 / upper, upper
    )
    if rollout_is_batch_normalize:
        weights, metrics["rollout_is_batch_norm_factor"] = _normalised(weights, mask, rollout_is)
    return weights, metrics


def _normalised(weights: torch.Tensor, mask: torch.Tensor, rollout_is: str) -> tuple[torch.Tensor, float]:
    if rollout_is == "sequence":
        mean = float(masked_mean(masked_mean(weights, mask, dim=-1), mask.any(-1)))
    else:
        mean = float(masked_mean(weights, mask))
    if mean <= 0:
        raise ValueError(
            "every importance weight is 0: rollout_is_threshold masks all tokens, there is nothing to normalise"
        )
    return weights / mean, mean


def _weight_metrics(weights: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Statistics of the weights as applied, over tokens, and the effective sample size (1 is ideal)."""
    mean, square = masked_mean(weights, mask), masked_mean(weights.square(), mask)
    sequence_weights = masked_mean(weights, mask, dim=-1)[mask.any(-1)]
    return {
        "rollout_is_mean": float(mean),
        "rollout_is_std": float((square - mean.square()).clamp(min=0).sqrt()),
        "rollout_is_eff_sample_size": float(mean.square() / square) if float(square) > 0 else 0.0,
        "rollout_is_seq_mean": float(sequence_weights.mean()),
        "rollout_is_seq_std": float(sequence_weights.std()) if len(sequence_weights) > 1 else 0.0,
        "rollout_is_seq_max": float(sequence_weights.max()),
        "rollout_is_seq_min": float(sequence_weights.min()),
    }


def _ratio_metrics(
    raw: torch.Tensor, outside: torch.Tensor, mask: torch.Tensor, rollout_is: str, lower: float, upper: float
) -> dict[str, float]:
    """The ratios before truncation or masking, over what has one ratio: tokens, or sequences."""
    if rollout_is == "sequence":
        raw, outside, mask = raw[:, :1], outside[:, :1], mask.any(-1, keepdim=True)
    return {
        "rollout_is_max": float(raw[mask].max()),
        "rollout_is_min": float(raw[mask].min()),
        "rollout_is_ratio_fraction_high": float(masked_mean((raw > upper).float(), mask)),
        "rollout_is_ratio_fraction_low": float(masked_mean((raw < lower).float(), mask)),
        "rollout_is_oob_ratio": float(masked_mean(outside.float(), mask)),
    }


def compute_rollout_rejection_mask(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """`response_mask` without the tokens or sequences that diverge too far by any of the modes in `rollout_rs`.

    k1 is -log r, bounded on both sides by the logs of "lower_upper" (one number u means 1/u to u); k2 is
    (log r)^2 / 2 and k3 is r - 1 - log r, bounded above. Sequence modes drop whole sequences.
    """
    check_matrix(log_ratio=log_ratio, response_mask=response_mask)
    check_not_empty(response_mask)
    check_finite("log_ratio", log_ratio, response_mask)
    mask = response_mask.bool()
    keep = mask
    metrics: dict[str, float] = {}
    for mode, (lower, upper) in parse_rs_thresholds(rollout_rs, rollout_rs_threshold).items():
        statistic = _divergence_statistic(log_ratio.detach(), mask, mode)
        kept = (statistic <= upper) & (statistic >= lower)
        keep = keep & kept
        dropped = mask & ~kept
        metrics[f"rollout_rs_{mode}_mean"] = float(masked_mean(statistic, mask))
        metrics[f"rollout_rs_{mode}_max"] = float(statistic[mask].max())
        metrics[f"rollout_rs_{mode}_min"] = float(statistic[mask].min())
        metrics[f"rollout_rs_{mode}_masked_fraction"] = float(masked_mean(dropped.float(), mask))
        metrics[f"rollout_rs_{mode}_seq_masked_fraction"] = float(masked_mean(dropped.any(-1).float(), mask.any(-1)))
    dropped = mask & ~keep
    metrics["rollout_rs_masked_fraction"] = float(masked_mean(dropped.float(), mask))
    metrics["rollout_rs_seq_masked_fraction"] = float(masked_mean(dropped.any(-1).float(), mask.any(-1)))
    return keep.to(response_mask.dtype), metrics


def _divergence_statistic(log_ratio: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """The statistic of a rejection mode, on every token (sequence modes repeat theirs)."""
    log_r = log_ratio.masked_fill(~mask, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    level, kind = mode.rsplit("_", 1)
    if kind == "k1":
        tokens = -log_r
    elif kind == "k2":
        tokens = 0.5 * log_r.square()
    else:
        tokens = torch.expm1(log_r) - log_r
    if level == "token":
        return tokens
    if level == "seq_sum":
        sequences = masked_sum(tokens, mask, dim=-1)
    elif level == "seq_mean":
        sequences = masked_mean(tokens, mask, dim=-1)
    else:
        # k2 and k3 are not negative, so the zeros outside the mask never are the maximum of a sequence that has tokens.
        sequences = tokens.max(-1).values
    return sequences[:, None].expand_as(log_ratio)


def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """How far the trainer's policy is from the rollout's: KL, perplexities and their gap, chi-squared."""
    check_matrix(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    check_not_empty(response_mask)
    mask, has_tokens = response_mask.bool(), response_mask.bool().any(-1)
    log_r = bounded_log_ratio(old_log_prob.detach(), rollout_log_prob, mask)
    training = -masked_mean(old_log_prob.detach(), mask, dim=-1)[has_tokens]
    rollout = -masked_mean(rollout_log_prob, mask, dim=-1)[has_tokens]
    gap = training - rollout
    sequence_log_r = masked_sum(log_r, mask, dim=-1)[has_tokens].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "kl": float(masked_mean(-log_r, mask)),
        "k3_kl": float(masked_mean(torch.expm1(log_r) - log_r, mask)),
        "log_prob_abs_diff_mean": float(masked_mean(log_r.abs(), mask)),
        "log_prob_abs_diff_max": float(log_r.abs().max()),
        "training_ppl": float(training.exp().mean()),
        "training_log_ppl": float(training.mean()),
        "rollout_ppl": float(rollout.exp().mean()),
        "rollout_log_ppl": float(rollout.mean()),
        "log_ppl_diff": float(gap.mean()),
        "log_ppl_abs_diff": float(gap.abs().mean()),
        "log_ppl_diff_max": float(gap.max()),
        "log_ppl_diff_min": float(gap.min()),
        "ppl_ratio": float(gap.clamp(max=LOG_RATIO_BOUND).exp().mean()),
        "chi2_token": float(masked_mean((2.0 * log_r).exp(), mask)) - 1.0,
        "chi2_seq": float((2.0 * sequence_log_r).exp().mean()) - 1.0,
    }


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """The whole correction: weights (or None), the mask after rejection, and all diagnostics as `rollout_corr/...`."""
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    log_ratio = old_log_prob.detach() - rollout_log_prob
    weights: torch.Tensor | None = None
    if rollout_is is not None:
        weights, weight_metrics = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= weight_metrics
    if rollout_rs is not None:
        response_mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= rejection_metrics
    return weights, response_mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def parse_is_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(lower, upper) of `rollout_is_threshold`: 2.0 or "2.0" -> (None, 2.0); "0.5_5.0" -> (0.5, 5.0)."""
    numbers = _numbers(str(threshold), "rollout_is_threshold")
    if len(numbers) == 1:
        return None, numbers[0]
    return numbers[0], numbers[1]


def parse_rs_thresholds(rollout_rs: str, threshold: float | str | None) -> dict[str, tuple[float, float]]:
    """For each mode in `rollout_rs` the bounds of its statistic; one threshold serves all, or one for each mode."""
    modes = [mode.strip() for mode in rollout_rs.split(",") if mode.strip()]
    if not modes:
        raise ValueError("rollout_rs is empty: name at least one of " + ", ".join(ROLLOUT_RS_MODES))
    for mode in modes:
        if mode not in ROLLOUT_RS_MODES:
            raise unknown_name("rollout_rs mode", mode, list(ROLLOUT_RS_MODES))
    if threshold is None:
        raise ValueError(f"rollout_rs={rollout_rs!r} needs rollout_rs_threshold")
    specs = [spec.strip() for spec in str(threshold).split(",")]
    if len(specs) not in (1, len(modes)):
        raise ValueError(
            f"rollout_rs_threshold={threshold!r} has {len(specs)} entries for {len(modes)} modes: give one, or one each"
        )
    bounds: dict[str, tuple[float, float]] = {}
    for mode, spec in zip(modes, specs * len(modes) if len(specs) == 1 else specs, strict=True):
        numbers = _numbers(spec, "rollout_rs_threshold")
        if mode.endswith("k1"):
            lower, upper = (1.0 / numbers[0], numbers[0]) if len(numbers) == 1 else numbers
            bounds[mode] = (math.log(lower), math.log(upper))
        elif len(numbers) == 1:
            bounds[mode] = (-math.inf, numbers[0])
        else:
            raise ValueError(f"rollout_rs_threshold {spec!r}: mode {mode} has an upper bound only, give one number")
    return bounds


def _numbers(spec: str, option: str) -> tuple[float, ...]:
    """One positive number, or two as lower_upper."""
    try:
        numbers = tuple(float(number) for number in spec.split("_"))
    except ValueError as error:
        raise ValueError(f"{option}={spec!r} is no number and no lower_upper pair of numbers") from error
    if len(numbers) > 2 or min(numbers) <= 0 or numbers[0] > numbers[-1] or not math.isfinite(sum(numbers)):
        raise ValueError(f"{option}={spec!r}: give one positive number or lower_upper with 0 < lower <= upper")
    return numbers
