"""Correcting a batch for a rollout policy that is not quite the trainer's: importance weights and rejection."""

from __future__ import annotations

from meshrl.algorithms import COVARIANCE_LOSSES, compute_rollout_correction_and_rejection_mask, estimator_takes
from meshrl.config.algorithm import RolloutCorrectionConfig
from meshrl.config.algorithm_checks import has_teacher
from meshrl.config.correction import RATIO_LOSSES, correction_of
from meshrl.config.root import PPOConfig
from meshrl.data.proto import DataProto


def corrects_rollout(config: RolloutCorrectionConfig, loss_mode: str) -> bool:
    """Whether anything is done about the difference between `old_log_probs` and the rollout's."""
    return config.rollout_is is not None or config.rollout_rs is not None or loss_mode in RATIO_LOSSES


def needs_old_log_probs(config: PPOConfig, optimizer_steps: int) -> bool:
    """On-policy, with one optimizer step a batch, the update itself knows the old log-probs: no pass is needed."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    loss_mode = actor.policy_loss.loss_mode
    if algorithm.rollout_correction.bypass_mode:
        return False
    wanted = (
        algorithm.use_kl_in_reward
        or has_teacher(config)
        or loss_mode in COVARIANCE_LOSSES
        or estimator_takes(algorithm.adv_estimator, "old_log_probs")
        or estimator_takes(algorithm.adv_estimator, "sum_pi_squared")
        or corrects_rollout(correction_of(config), loss_mode)
        or actor.router_replay.mode == "R2"
    )
    return wanted or optimizer_steps > 1


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
