"""Correcting a batch for a rollout policy that is not quite the trainer's: importance weights and rejection."""

from __future__ import annotations

from meshrl.algorithms import compute_rollout_correction_and_rejection_mask
from meshrl.config.algorithm import RolloutCorrectionConfig
from meshrl.data.proto import DataProto

# These losses take the ratio itself, and bound it in their own way.
RATIO_LOSSES = ("decoupled", "icepop")


def corrects_rollout(config: RolloutCorrectionConfig, loss_mode: str) -> bool:
    """Whether anything is done about the difference between `old_log_probs` and the rollout's."""
    return config.rollout_is is not None or config.rollout_rs is not None or loss_mode in RATIO_LOSSES


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig, loss_mode: str) -> dict[str, float]:
    """Adds `rollout_is_weights` and takes rejected tokens out of `response_mask`; returns the diagnostics."""
    tensors = batch.batch
    old, rollout, mask = (tensors[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        rollout,
        mask,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    if loss_mode in RATIO_LOSSES:
        weights = (old - rollout).exp() * mask
    if weights is not None:
        tensors["rollout_is_weights"] = weights
    tensors["response_mask"] = kept.to(mask.dtype)
    return metrics
