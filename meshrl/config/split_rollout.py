"""Checks of `actor_rollout_ref.rollout.tensor_model_parallel_size`: what one rollout over several ranks can do."""

from meshrl.config.model_folder import read_model_config
from meshrl.config.root import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"
SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
# Rollouts that can be cut over the trainer's ranks.
SPLIT = ("embedded", "vllm")
# Decoders whose layers the embedded rollout can cut.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def split_engine_problems(config: PPOConfig) -> list[str]:
    """Which engines can be cut over the trainer's ranks."""
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    if size == 1:
        return []
    if rollout.name in SPLIT:
        served = rollout.name == "vllm" and rollout.as_server
        return [f"{SIZE}={size} does not go with {ROLLOUT}.as_server=true: leave it out"] if served else []
    return [
        f"not supported yet: {SIZE}={size}: {ROLLOUT}.name={rollout.name} over several ranks; {' and '.join(SPLIT)} can"
    ]


def split_problems(config: PPOConfig) -> list[str]:
    """All ranks of a rollout must take every step alike: what would let them differ is refused."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    size, problems = rollout.tensor_model_parallel_size, []
    if size == 1 or rollout.name not in SPLIT:
        return []
    if rollout.multi_turn.enable:
        problems.append(
            f"{SIZE}={size} does not go with {ROLLOUT}.multi_turn.enable=true: turns arrive at their own time on every "
            "rank, and the ranks of one rollout must get the same requests; set one of them back"
        )
    has_adapters = policy.model.lora_rank > 0 or policy.model.lora_adapter_path is not None
    if has_adapters and rollout.name == "embedded" and rollout.update_weights_adapters != "merged":
        problems.append(
            f"{SIZE}={size} takes no adapters alone: set {ROLLOUT}.update_weights_adapters=merged, not "
            f"{rollout.update_weights_adapters}"
        )
    how = config.async_training
    if how.max_staleness or how.batches_ahead:
        problems.append(
            f"{SIZE}={size} does not go with async_training (max_staleness {how.max_staleness}, batches_ahead "
            f"{how.batches_ahead}): weights would change at another step on each rank of a rollout; set one back"
        )
    return problems


def split_file_problems(config: PPOConfig) -> list[str]:
    """Whether the model's heads, inner width and vocabulary can be cut, with the numbers."""
    policy = config.actor_rollout_ref
    size = policy.rollout.tensor_model_parallel_size
    if size == 1 or policy.rollout.name not in SPLIT:
        return []
    try:
        shape = read_model_config(policy.model)
    except ValueError:
        return []  # said where the model is checked
    problems = []
    kind = shape.get("model_type")
    if policy.rollout.name == "embedded" and kind is not None and kind not in MODEL_TYPES:
        problems.append(f"{SIZE}={size}: a {kind} model cannot be cut, only {', '.join(MODEL_TYPES)}; set it to 1")
    for name in ("num_attention_heads", "intermediate_size"):
        count = shape.get(name)
        if count is not None and count % size:
            problems.append(f"the model's {name} ({count}) must be divisible by {SIZE} ({size})")
    groups = shape.get("num_key_value_heads") or size
    if groups % size and size % groups:
        problems.append(
            f"the model's num_key_value_heads ({groups}) must be divisible by {SIZE} ({size}), or the other way round"
        )
    tokens = shape.get("vocab_size")
    if tokens is not None and (size - 1) * -(-tokens // size) >= tokens:
        problems.append(f"the model's vocab_size ({tokens}) leaves some of the {size} ranks of {SIZE} without a token")
    return problems
