"""What the tests of the Megatron engine share: tiny models, and a trial on a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from process_group import own_device
from transformers import AutoConfig

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.tools.verify import SMALL, Outcome, Trial, run_engine, write_model

# Short names for the keys, as the layouts of the tests use them.
AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "distopt": "use_distributed_optimizer",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Sizes of latent attention that no number of ranks divides, heads of unequal sizes, two groups of experts of which
# one is chosen, a first layer without experts.
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 21,
    "kv_lora_rank": 19,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 9,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "initializer_range": 0.1,  # scores of a size at which their scale matters
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama3_rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "yarn_rope": {
        "model_type": "qwen3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek_v3": LATENT,
    # Queries without a latent vector, yarn with its factors on angles and scores, a norm of another epsilon.
    "deepseek_yarn": LATENT
    | {
        "q_lora_rank": None,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16,
        },
    },
}


def layers_for(axes: dict[str, Any]) -> int:
    """One for each chunk of a pipeline, and at least two."""
    return max(2, axes.get("pp", 1) * axes.get("vpp", 1))


def write_small_model(name: str, folder: Path, layers: int = 2) -> Path:
    """A tiny model of the table with random weights."""
    fields = SMALL | MODELS[name] | {"num_hidden_layers": layers}
    return write_model(AutoConfig.for_model(fields.pop("model_type"), **fields), folder)


def megatron_trial(folder: Path, axes: dict[str, Any], **model: Any) -> Trial:
    """A trial in float32 on a layout given by short names; other names are keys of `megatron`."""
    engine = EngineConfig(strategy="megatron")
    engine.megatron.dtype = "fp32"
    for name, value in axes.items():
        setattr(engine.megatron, AXES.get(name, name), value)
    config = ModelConfig(path=str(folder), **({"enable_gradient_checkpointing": False} | model))
    # Many layers round more than two: with a larger epsilon Adam leaves rounding what it is.
    return Trial(config, engine, OptimConfig(lr=1e-2, eps=1e-2))


def run_megatron(trial: Trial) -> Outcome:
    """The engine's side on this rank, which is left ready for another layout."""
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        return run_engine(trial, str(own_device()))
    finally:
        leave_parallel_state()
