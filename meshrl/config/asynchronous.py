"""`async_training.*`: how far generation may run ahead of training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.config.key import key

if TYPE_CHECKING:
    from meshrl.config.root import PPOConfig

SEPARATE = "actor_rollout_ref.hybrid_engine=false"


@dataclass
class AsyncTrainingConfig:
    max_staleness: int = key(
        0, "Versions by which the oldest token of a sample may be behind the weights it trains; 0: synchronous.", low=0
    )
    partial_rollout: bool = key(
        True, "Answers go on over an update of the weights; false: those begun are finished first."
    )
    batches_ahead: int | None = key(
        None, "Batches begun early; null: max_staleness. With more, what gets too old is dropped and counted.", low=0
    )


def async_problems(config: "PPOConfig") -> list[str]:
    """What does not go together in placement and staleness."""
    how, policy = config.async_training, config.actor_rollout_ref
    rollout, problems = policy.rollout, []
    ranks = rollout.nnodes * rollout.n_gpus_per_node
    if policy.hybrid_engine:
        if ranks:
            problems.append(
                f"actor_rollout_ref.rollout.nnodes * n_gpus_per_node ({rollout.nnodes} * {rollout.n_gpus_per_node}) "
                f"has no effect while actor and rollout share their devices: set {SEPARATE}"
            )
        if how != AsyncTrainingConfig():
            problems.append(f"async_training needs devices of its own for the rollout: set {SEPARATE}")
        return problems
    if not ranks:
        problems.append(
            f"{SEPARATE} needs processes for the rollout: set actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        )
    if rollout.nnodes > 1 and config.trainer.backend != "ray":
        problems.append(f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} needs trainer.backend=ray")
    if rollout.name not in ("embedded", "hf"):
        problems.append(
            f"actor_rollout_ref.rollout.name={rollout.name} cannot have devices of its own yet: use embedded or hf"
        )
    ahead = how.max_staleness if how.batches_ahead is None else how.batches_ahead
    if ahead and not rollout.calculate_log_probs:
        problems.append("async_training.max_staleness needs actor_rollout_ref.rollout.calculate_log_probs=true")
    return problems
