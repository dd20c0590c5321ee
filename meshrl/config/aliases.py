"""Other spellings of keys, as they are found in scripts and documents, and words for keys that are gone."""

import difflib
from collections.abc import Iterable

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

# Tried in order, each on the result of those before; a name matches itself and everything below it.
ALIASES: tuple[tuple[str, str], ...] = (
    (f"{ACTOR}.megatron_config", f"{ACTOR}.megatron"),
    (f"{ACTOR}.megatron.tensor_parallel_size", f"{ACTOR}.megatron.tensor_model_parallel_size"),
    (f"{ACTOR}.megatron.pipeline_parallel_size", f"{ACTOR}.megatron.pipeline_model_parallel_size"),
    (f"{ACTOR}.megatron.expert_parallel_size", f"{ACTOR}.megatron.expert_model_parallel_size"),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
    (f"{ACTOR}.ulysses_sp_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
    (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"),
    (f"{ACTOR}.fsdp_config.gradient_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"),
    (f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"),
    (f"{ACTOR}.model", "actor_rollout_ref.model"),
    (f"{ROLLOUT}.tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
    ("actor_rollout_ref.nccl_timeout", "trainer.deadlines.collective"),
    ("reward_model.reward_manager", "reward_manager.name"),
    ("reward_model.overlong_buffer", "reward_manager.overlong_buffer"),
    ("reward.custom_reward_function", "custom_reward_function"),
    ("reward.reward_manager", "reward_manager"),
    ("engine.fsdp_config.ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
    ("engine.megatron_config", "engine.megatron"),
    ("optim.clip_grad", "engine.grad_clip"),
)

# Keys of older scripts whose unit or place has changed: no other key means the same.
RETIRED: dict[str, str] = {
    f"{ACTOR}.ppo_micro_batch_size": f"it counted over all ranks; set {ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size": (
        f"it counted over all ranks; set {ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    ),
    "actor_rollout_ref.ref.log_prob_micro_batch_size": (
        "it counted over all ranks; set actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    ),
    "data.return_raw_chat": "leave it out, nothing needs it",
    "data.tokenizer": "set actor_rollout_ref.model.tokenizer_path",
}


def canonical(name: str) -> str:
    """The project's spelling of a dotted key."""
    for old, new in ALIASES:
        if name == old or name.startswith(f"{old}."):
            name = new + name[len(old) :]
    return name


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name most like a misspelt one: alike as a whole, and alike in the last component."""
    last = name.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        candidate_last = candidate.rpartition(".")[2]
        same_last = 1.0 if candidate_last == last else 0.0
        return (
            difflib.SequenceMatcher(None, name, candidate).ratio()
            + difflib.SequenceMatcher(None, last, candidate_last).ratio()
            + same_last
        )

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) > 1.1 else None
