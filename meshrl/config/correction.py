"""What is done about a rollout policy that is not quite the trainer's, as the whole config says."""

from dataclasses import replace

from meshrl.config.algorithm import RolloutCorrectionConfig
from meshrl.config.root import PPOConfig

# These losses take the ratio itself, and bound it in their own way.
RATIO_LOSSES = ("decoupled", "icepop", "m2po")


def correction_of(config: PPOConfig) -> RolloutCorrectionConfig:
    """The correction, with importance weights by default where samples may be stale or a side rounds.

    `off` has become None.
    """
    chosen = config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if chosen.rollout_is == "off":
        return replace(chosen, rollout_is=None)
    policy = config.actor_rollout_ref
    differs = config.async_training.num_ahead > 0 or policy.rollout.rounds or policy.actor.rounds
    if differs and chosen.rollout_is is None and not chosen.bypass_mode and loss_mode not in RATIO_LOSSES:
        return replace(chosen, rollout_is="token")
    return chosen
