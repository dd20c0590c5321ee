"""Checks of rollouts over several ranks (`tensor_model_parallel_size`, `expert_parallel_size`): what they can do."""

from collections.abc import Mapping
from typing import Any

from meshrl.config.families import CUT_FAMILIES
from meshrl.config.model_folder import EXPERT_COUNTS, read_model_config
from meshrl.config.names import ROLLOUT
from meshrl.config.rollout import RolloutConfig
from meshrl.config.root import PPOConfig

SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
SPREAD = f"{ROLLOUT}.expert_parallel_size"
# Rollouts that can be cut over the trainer's ranks.
SPLIT = ("embedded", "vllm", "sglang")


def split_engine_problems(config: PPOConfig) -> list[str]:
    """Which engines can be cut over the trainer's ranks."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.replica_size == 1:
        return []
    if rollout.name not in SPLIT:
        can = f"{', '.join(SPLIT[:-1])} and {SPLIT[-1]} can"
        return [f"not supported yet: {_named(rollout)}: {ROLLOUT}.name={rollout.name} over several ranks; {can}"]
    if rollout.name == "sglang" and rollout.expert_parallel_size > 1:
        return [
            f"not supported yet: {SPREAD}={rollout.expert_parallel_size} with {ROLLOUT}.name=sglang, whose ranks cut "
            f"the experts ({SIZE}); embedded and vllm spread them"
        ]
    return []


def split_problems(config: PPOConfig) -> list[str]:
    """Ranks that step together must take every step alike, and an engine beside them must find all of their GPUs."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    name, problems = _named(rollout), _spread_problems(rollout)
    if rollout.replica_size == 1 or rollout.name not in SPLIT:
        return problems
    if rollout.is_elsewhere:
        return problems + _node_problems(config)
    server = (
        f"set {ROLLOUT}.as_server=true" if rollout.name == "vllm" else f"use {ROLLOUT}.name=vllm and as_server=true"
    )
    if rollout.multi_turn.enable:
        problems.append(
            f"{name} does not go with {ROLLOUT}.multi_turn.enable=true inside the workers' processes: turns arrive at "
            "their own time on every rank, and the ranks of one rollout must get the same requests; "
            f"{server}, or {name.partition('=')[0]}=1"
        )
    if policy.model.has_adapters and rollout.name == "embedded" and rollout.update_weights_adapters != "merged":
        problems.append(
            f"{name} takes no adapters alone: set {ROLLOUT}.update_weights_adapters=merged, not "
            f"{rollout.update_weights_adapters}"
        )
    how = config.async_training
    if how.max_staleness or how.batches_ahead:
        problems.append(
            f"{name} does not go with async_training (max_staleness {how.max_staleness}, batches_ahead "
            f"{how.batches_ahead}) inside the workers' processes: weights would change at another step on each rank "
            f"of a rollout; {server}, or {name.partition('=')[0]}=1"
        )
    return problems


def _node_problems(config: PPOConfig) -> list[str]:
    """The ranks of an engine beside them must be on its machine."""
    policy, size = config.actor_rollout_ref, config.actor_rollout_ref.rollout.replica_size
    where = (config.trainer, "trainer") if policy.hybrid_engine else (policy.rollout, ROLLOUT)
    nodes, ranks, key = where[0].nnodes, where[0].n_gpus_per_node, f"{where[1]}.n_gpus_per_node"
    if nodes == 1 or ranks % size == 0:
        return []  # on one machine it is said where ranks are counted
    return [
        f"{key} ({ranks}) must be divisible by {_named(policy.rollout)}: an engine in processes of its own "
        f"({ROLLOUT}.name={policy.rollout.name}) has all of its GPUs on one machine"
    ]


def _spread_problems(rollout: RolloutConfig) -> list[str]:
    """The embedded engine spreads experts and leaves the rest whole, vLLM spreads them where it cuts the rest."""
    cut, spread = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if spread == 1 or rollout.name not in SPLIT:
        return []
    if rollout.name == "embedded" and cut > 1:
        return [f"{SPREAD}={spread} with {ROLLOUT}.name=embedded leaves all else whole: set {SIZE}=1, not {cut}"]
    if rollout.name == "vllm" and cut != spread:
        return [f"{SPREAD}={spread} with {ROLLOUT}.name=vllm needs {SIZE}={spread}, not {cut}"]
    return []


def split_file_problems(config: PPOConfig) -> list[str]:
    """Whether the model's heads, inner width, vocabulary and experts can be divided, with the numbers."""
    policy = config.actor_rollout_ref
    if policy.rollout.replica_size == 1 or policy.rollout.name not in SPLIT:
        return []
    try:
        shape = read_model_config(policy.model)
    except ValueError:
        return []  # said where the model is checked
    return [*_expert_problems(policy.rollout, shape), *_cut_problems(policy.rollout, shape)]


def _expert_problems(rollout: RolloutConfig, shape: Mapping[str, Any]) -> list[str]:
    spread = rollout.expert_parallel_size
    if spread == 1:
        return []
    field = next((field for field in EXPERT_COUNTS if shape.get(field)), None)
    if field is None:
        return [f"{SPREAD}={spread}: the model ({shape.get('model_type')}) has no experts to spread; set it to 1"]
    if shape[field] % spread:
        return [f"the model's {field} ({shape[field]}) must be divisible by {SPREAD} ({spread})"]
    return []


def _cut_problems(rollout: RolloutConfig, shape: Mapping[str, Any]) -> list[str]:
    size, kind, problems = rollout.tensor_model_parallel_size, shape.get("model_type"), []
    if size == 1:
        return []
    if rollout.name == "embedded" and kind is not None and kind not in CUT_FAMILIES:
        problems.append(f"{SIZE}={size}: a {kind} model cannot be cut, only {', '.join(CUT_FAMILIES)}; set it to 1")
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


def _named(rollout: RolloutConfig) -> str:
    """The key that makes a rollout of several ranks, as it is set."""
    cut, spread = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    return f"{SIZE}={cut}" if cut >= spread else f"{SPREAD}={spread}"
