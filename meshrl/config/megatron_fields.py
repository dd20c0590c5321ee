"""Fields of Megatron-Core's TransformerConfig that may be overridden; read from its source, as importing it is slow."""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.config.aliases import nearest

SOURCES = ("core/model_parallel_config.py", "core/transformer/transformer_config.py")
CLASSES = ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig")
# What follows from other keys: a second way to set them would let the two disagree.
FROM_OUR_KEYS = {
    "tensor_model_parallel_size": "megatron.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "megatron.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "megatron.virtual_pipeline_model_parallel_size",
    "context_parallel_size": "megatron.context_parallel_size",
    "expert_model_parallel_size": "megatron.expert_model_parallel_size",
    "expert_tensor_parallel_size": "megatron.expert_tensor_parallel_size",
    "sequence_parallel": "megatron.sequence_parallel",
    "params_dtype": "megatron.dtype",
    "pipeline_dtype": "megatron.dtype",
    "bf16": "megatron.dtype",
    "fp16": "megatron.dtype",
    "num_layers": "model.override_config.num_hidden_layers",
    "hidden_size": "model.override_config.hidden_size",
    "num_attention_heads": "model.override_config.num_attention_heads",
    "num_query_groups": "model.override_config.num_key_value_heads",
    "kv_channels": "model.override_config.head_dim",
    "ffn_hidden_size": "model.override_config.intermediate_size",
    "num_moe_experts": "model.override_config.num_experts",
    "calculate_per_token_loss": "nothing: losses are shares of the global one, gradients are summed",
    "variable_seq_lengths": "nothing: micro-batches are packed rows of any length",
    "moe_grouped_gemm": "nothing: experts are modules of their own",
    "moe_enable_routing_replay": "actor.router_replay.mode",
    "mtp_num_layers": "nothing: there is no loss for multi-token prediction",
}


def has_megatron() -> bool:
    """Whether Megatron-Core is there."""
    return _package() is not None


def override_problems(override: dict[str, Any], prefix: str) -> list[str]:
    """Fields of `override_transformer_config` that do not exist, or that other keys decide."""
    problems = []
    for name in override:
        key = f"{prefix}.override_transformer_config.{name}"
        if name in FROM_OUR_KEYS:
            problems.append(f"{key} cannot be set here; set {FROM_OUR_KEYS[name]}")
        elif name not in known_fields():
            suggestion = nearest(name, known_fields())
            hint = f"; did you mean {suggestion}?" if suggestion else ""
            problems.append(f"{key}: Megatron-Core's TransformerConfig has no field '{name}'{hint}")
    return problems


@cache
def known_fields() -> frozenset[str]:
    """All fields, as the classes' source declares them."""
    package = _package()
    if package is None:
        return frozenset()
    found = set()
    for source in SOURCES:
        for node in ast.parse((package / source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                found |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return frozenset(found)


def _package() -> Path | None:
    spec = importlib.util.find_spec("megatron")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((Path(folder) for folder in folders if (Path(folder) / SOURCES[0]).is_file()), None)
