"""Correction for a rollout policy that differs from the trainer's: importance weights, rejection, diagnostics.

`log_ratio` is always log(trainer / rollout) of the sampled tokens, `[B, T]`. In the decoupled form, the trainer's
policy is `old_log_probs`, a third policy between the rollout policy and the current policy. In the bypass form,
`old_log_probs` are the rollout's log-probs, and the loss `bypass_mode` compares the current policy with the rollout.
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
    """The options of the rollout correction. By default the mismatch is measured but not corrected."""

    rollout_is: str | None = None  # token, sequence
    rollout_is_threshold: float | str = 2.0  # 2.0 truncates; "0.5_5.0" masks outside (IcePop)
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None  # one or more of ROLLOUT_RS_MODES, separated by commas
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"  # for bypass_mode: ppo_clip, reinforce

    @classmethod
    def read(cls, config: Any) -> "RolloutCorrectionConfig":
        """Read the options from an object with attributes or keys. Options that are missing or None get the default."""
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
    """Compute importance weights `[B, T]` without gradient, and their metrics.

    Weights are per token, or per sequence as the product of its token ratios. If `rollout_is_threshold` is one number,
    larger weights are truncated to this number. If the threshold is "lower_upper", weights outside these bounds become
    0. With batch normalisation, the mean weight over tokens (or over sequences) becomes 1. Weights are 0 outside the
    mask.
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
    """Return statistics of the truncated or masked weights, and the effective sample size (1 is ideal).

    The statistics are taken over tokens and over sequences, before batch normalisation.
    """
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
    """Return statistics of the ratios before truncation or masking, over tokens or, for sequence weights, sequences."""
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
    """Remove tokens or sequences that diverge too far from `response_mask` `[B, T]`, and return the mask and metrics.

    A token is rejected if any mode in `rollout_rs` rejects the token. The statistic k1 is -log r. Its bounds are the
    logs of "lower_upper", where one number u means 1/u to u. The statistics k2 = (log r)^2 / 2 and k3 = r - 1 - log r
    have an upper bound only. Sequence modes reject whole sequences.
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
    """Compute the statistic of a rejection mode on every token `[B, T]`. Sequence modes repeat their value."""
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
        # k2 and k3 are not negative, so zeros outside the mask do not change the maximum of a sequence with tokens.
        sequences = tokens.max(-1).values
    return sequences[:, None].expand_as(log_ratio)


def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Compute metrics of the mismatch between trainer and rollout: KL, perplexities, their gap and chi-squared."""
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
    """Run the whole correction, and return weights `[B, T]` (or None), the mask after rejection, and all metrics.

    The names of the metrics begin with `rollout_corr/`.
    """
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
    """Parse `rollout_is_threshold` to (lower, upper): 2.0 or "2.0" -> (None, 2.0); "0.5_5.0" -> (0.5, 5.0)."""
    numbers = _numbers(str(threshold), "rollout_is_threshold")
    if len(numbers) == 1:
        return None, numbers[0]
    return numbers[0], numbers[1]


def parse_rs_thresholds(rollout_rs: str, threshold: float | str | None) -> dict[str, tuple[float, float]]:
    """Return the (lower, upper) bounds of each mode's statistic, from one threshold for all modes or one per mode."""
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
    """Parse one positive number, or two numbers written as lower_upper."""
    try:
        numbers = tuple(float(number) for number in spec.split("_"))
    except ValueError as error:
        raise ValueError(f"{option}={spec!r} is no number and no lower_upper pair of numbers") from error
    if len(numbers) > 2 or min(numbers) <= 0 or numbers[0] > numbers[-1] or not math.isfinite(sum(numbers)):
        raise ValueError(f"{option}={spec!r}: give one positive number or lower_upper with 0 < lower <= upper")
    return numbers
