"""`async_training.*`: how far generation may run ahead of training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.config.key import key
from meshrl.config.tree import changed_keys

if TYPE_CHECKING:
    from meshrl.config.root import PPOConfig

SEPARATE = "actor_rollout_ref.hybrid_engine=false"


@dataclass
class AsyncTrainingConfig:
    max_staleness: int = key(
        0,
        "Versions by which the oldest token of a sample may be behind the weights it trains; 0: synchronous.",
        low=0,
        high=10_000,
    )
    partial_rollout: bool = key(
        True, "Answers go on over an update of the weights; false: those begun are finished first."
    )
    batches_ahead: int | None = key(
        None,
        "Batches begun early; null: max_staleness. With more, what gets too old is dropped and counted.",
        low=0,
        high=10_000,
    )

    @property
    def num_ahead(self) -> int:
        """How many batches are begun before the one that is trained."""
        return self.max_staleness if self.batches_ahead is None else self.batches_ahead


def async_problems(config: "PPOConfig") -> list[str]:
    """What does not go together in placement and staleness."""
    how, policy = config.async_training, config.actor_rollout_ref
    rollout, problems = policy.rollout, []
    ranks = rollout.nnodes * rollout.n_gpus_per_node
    if policy.hybrid_engine:
        if rollout.nnodes or rollout.n_gpus_per_node:
            problems.append(
                f"actor_rollout_ref.rollout.nnodes * n_gpus_per_node ({rollout.nnodes} * {rollout.n_gpus_per_node}) "
                f"has no effect while actor and rollout share their devices: set {SEPARATE}"
            )
        if how != AsyncTrainingConfig():
            problems.append(f"async_training needs devices of its own for the rollout: set {SEPARATE}")
        return problems
    problems += [
        f"{changed} is for devices that actor and rollout share, and {SEPARATE}: set PYTORCH_ALLOC_CONF instead"
        for changed in changed_keys(config, "actor_rollout_ref.expandable_segments")
    ]
    if not ranks:
        problems.append(
            f"{SEPARATE} needs processes for the rollout: set actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        )
    if rollout.nnodes > 1 and config.trainer.backend != "ray":
        problems.append(f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} needs trainer.backend=ray")
    problems += _combination_problems(config, how.num_ahead)
    if how.num_ahead and not rollout.calculate_log_probs:
        problems.append("async_training.max_staleness needs actor_rollout_ref.rollout.calculate_log_probs=true")
    return problems


def _combination_problems(config: "PPOConfig", ahead: int) -> list[str]:
    """What one of several settings would silently undo."""
    how, policy, data = config.async_training, config.actor_rollout_ref, config.data
    problems = []
    if not how.partial_rollout and not ahead:
        problems.append("async_training.partial_rollout=false has no effect: nothing is begun early (max_staleness=0)")
    if not how.partial_rollout and policy.rollout.multi_turn.enable:
        problems.append(
            "async_training.partial_rollout=false cannot hold for conversations, which go on after a tool's answer: "
            "leave it true, or turn rollout.multi_turn off"
        )
    if ahead and config.reward_manager.overlap:
        problems.append(
            "reward_manager.overlap=true has no effect with batches that are begun early: they are scored while others "
            "generate anyway"
        )
    if ahead and (data.gen_batch_size or 0) > data.train_batch_size:
        problems.append(
            f"data.gen_batch_size ({data.gen_batch_size}) above data.train_batch_size ({data.train_batch_size}) lets "
            "what is begun early grow old while surplus groups are trained: lower it, or set max_staleness=0"
        )
    if policy.actor.strategy == "fsdp" and policy.model.lora_rank and config.trainer.world_size > 1:
        problems.append(
            "actor_rollout_ref.actor.strategy=fsdp with adapters cannot feed rollouts on other devices: use fsdp2"
        )
    return problems
