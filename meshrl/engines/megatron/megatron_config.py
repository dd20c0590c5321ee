"""Megatron-Core's configuration, data parallelism and optimizer for a Hugging Face model.

- `transformer_config`: from a Hugging Face config to Megatron-Core's TransformerConfig.
- `rope_parameters`, `rope_frequencies`: rotary settings.
- `with_gradients`, `build_optimizer`, `clip_and_step`: training.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn
from transformers import PretrainedConfig

from meshrl.config.engine import MegatronConfig, OptimConfig, override_problems
from meshrl.config.families import facts_of, megatron_problems
from meshrl.engines.megatron.ranks import uses_sequence_parallel
from meshrl.engines.megatron.weight_map import is_sparse_layer
from meshrl.models.loading import torch_dtype
from meshrl.models.names import expert_count, head_dim

QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")


def transformer_config(hf: PretrainedConfig, config: MegatronConfig, *, recompute: bool) -> TransformerConfig:
    """Return the model's shape, this layout and the compute settings, with `override_transformer_config` on top."""
    check_expressible(hf)
    values = {
        **_shape(hf),
        **_layout(config),
        **_compute(config, recompute),
        **(_experts(hf) if expert_count(hf) else {}),
        **(_latent_attention(hf) if hf.model_type == "deepseek_v3" else {}),
        # Also if weights are loaded: only in the initialization Megatron-Core marks parameters that are sharded over
        # tensor-parallel ranks. Without the mark, the gradient norm would omit the shards of all ranks but the first.
        "perform_initialization": True,
    }
    override = dict(config.override_transformer_config)
    if problems := override_problems(override, "megatron"):
        raise ValueError("; ".join(problems))
    if override.get("moe_aux_loss_coeff") and "moe_router_load_balancing_type" not in override:
        override["moe_router_load_balancing_type"] = "aux_loss"
    if override.get("recompute_granularity") == "selective":
        values = {name: value for name, value in values.items() if not name.startswith("recompute_")}
    kind = MLATransformerConfig if hf.model_type == "deepseek_v3" else TransformerConfig
    known = {field.name for field in fields(kind)}
    made = kind(**{name: value for name, value in (values | override).items() if name in known})
    check_point_to_point(made)
    if made.multi_latent_attention and made.tensor_model_parallel_size > 1 and not made.sequence_parallel:
        raise ValueError(
            f"latent attention on {made.tensor_model_parallel_size} tensor-parallel ranks needs "
            "megatron.sequence_parallel=true"
        )
    return made


def check_expressible(hf: PretrainedConfig) -> None:
    """Raise a `ValueError` for models that Megatron-Core's GPT model, as built here, would compute differently."""
    if problems := megatron_problems(facts_of(hf)):
        raise ValueError("; ".join(problems))


def check_point_to_point(config: TransformerConfig) -> None:
    """Raise a `ValueError` for batched sends between stages of several chunks.

    With two such stages, batched sends pair with the wrong receives, without any error.
    """
    if (config.virtual_pipeline_model_parallel_size or 1) > 1 and config.batch_p2p_comm:
        raise ValueError(
            f"batch_p2p_comm=true gives wrong numbers with virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size} on {config.pipeline_model_parallel_size} stages: "
            "leave it out of override_transformer_config"
        )


def has_transformer_engine(config: MegatronConfig) -> bool:
    """Return whether the model's layers come from TransformerEngine.

    Unless the config decides, they do if TransformerEngine is installed and there is a GPU.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()
    if config.use_transformer_engine and not installed:
        raise ValueError(
            "megatron.use_transformer_engine=true needs TransformerEngine and a GPU: install it or set null"
        )
    return installed if config.use_transformer_engine is None else config.use_transformer_engine


def _shape(hf: PretrainedConfig) -> dict[str, Any]:
    scale = rope_attention_scale(hf)
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "qk_layernorm": hf.model_type in QK_NORM_FAMILIES,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": getattr(hf, "initializer_range", 0.02),
        # Hugging Face scales both rotated queries and keys; the scores are scaled by the square.
        "softmax_scale": None if scale == 1.0 else scale**2 / head_dim(hf) ** 0.5,
        **_windows(hf),
    }


def _windows(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the settings for layers with a sliding window; Megatron's skip list has a 1 for each of these layers."""
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window and getattr(hf, "use_sliding_window", True) else "full_attention"]
        kinds = kinds * hf.num_hidden_layers
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"strategy=megatron does not know the attention '{sorted(unknown)[0]}' of {hf.model_type}")
    if window is None or "sliding_attention" not in kinds:
        return {}
    skips = [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": skips}


def _layout(config: MegatronConfig) -> dict[str, Any]:
    vpp = config.virtual_pipeline_model_parallel_size or 1
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
        "sequence_parallel": uses_sequence_parallel(config),
        # Packed rows have no common length, so each sender first sends the shape.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": vpp > 1,
        "batch_p2p_comm": vpp == 1,
        "deallocate_pipeline_outputs": True,
    }


def _compute(config: MegatronConfig, recompute: bool) -> dict[str, Any]:
    dtype = torch_dtype(config.dtype)
    values: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Losses are shares of the global loss, so gradients are summed over the ranks, never averaged.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": has_transformer_engine(config),
    }
    if recompute:
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return values


def _experts(hf: PretrainedConfig) -> dict[str, Any]:
    deepseek = hf.model_type == "deepseek_v3"
    values: dict[str, Any] = {
        "num_moe_experts": expert_count(hf),
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.intermediate_size if hf.model_type == "mixtral" else hf.moe_intermediate_size,
        "moe_layer_freq": [int(is_sparse_layer(hf, layer)) for layer in range(hf.num_hidden_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        # Renormalised top-k weights are the soft-max over the chosen experts alone.
        "moe_router_pre_softmax": hf.model_type == "qwen3_moe" and not hf.norm_topk_prob,
    }
    if deepseek:
        values |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_pre_softmax": True,
            "moe_router_num_groups": hf.n_group,
            "moe_router_group_topk": hf.topk_group,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        }
    return values


def _latent_attention(hf: PretrainedConfig) -> dict[str, Any]:
    rope = rope_parameters(hf)
    factor = rope["factor"] if rope.get("rope_type", "default") != "default" else 1.0
    for_scores = rope.get("mscale_all_dim") or 0.0
    scale = 1.0 if factor <= 1 else 1.0 + 0.1 * for_scores * math.log(factor)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "kv_channels": hf.v_head_dim,
        "qk_layernorm": True,
        "softmax_scale": scale**2 / (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** 0.5,
        "apply_rope_fusion": False,
        # With this type the attention expects a factor with the angles. Both are then replaced by Hugging Face's own.
        # TransformerEngine's attention computes the scale of its scores from the two numbers.
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "mscale_all_dim": for_scores,
    }


def rope_parameters(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the model's rotary settings, wherever its config keeps them."""
    found = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    return {"rope_theta": getattr(hf, "rope_theta", 10000.0), **found}


def rope_frequencies(hf: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Return Hugging Face's own rotary frequencies and the factor on rotated vectors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_parameters(hf)
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"strategy=megatron needs fixed rotary frequencies; the model's rope type is '{kind}'")
    if kind == "default":
        dim = int(head_dim(hf) * (rope.get("partial_rotary_factor") or 1.0))
        if dim != head_dim(hf):
            raise ValueError(
                f"strategy=megatron rotates whole heads ({head_dim(hf)}), the model only {dim} numbers of each"
            )
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return frequencies.float(), float(scale)


def rope_attention_scale(hf: PretrainedConfig) -> float:
    return 1.0 if hf.model_type == "deepseek_v3" else rope_frequencies(hf)[1]


# Megatron-Core's data parallelism and optimizer for the model's chunks.


def with_gradients(chunks: Sequence[nn.Module], config: TransformerConfig, megatron: MegatronConfig) -> list[Any]:
    """Return the chunks with float32 gradient buffers, summed over data-parallel and context-parallel ranks."""
    if megatron.expert_tensor_parallel_size not in (None, megatron.tensor_model_parallel_size):
        # Copies of experts are then on other ranks than copies of the rest. Megatron-Core marks experts only if ep > 1.
        for name, param in (pair for chunk in chunks for pair in chunk.named_parameters()):
            if ".experts." in name:
                param.allreduce = False  # type: ignore[attr-defined]
    sharded = megatron.use_distributed_optimizer
    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        overlap_param_gather=megatron.overlap_param_gather,
        use_distributed_optimizer=sharded,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(config, how, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]


def build_optimizer(model: Sequence[Any], optim: OptimConfig, megatron: MegatronConfig, grad_clip: float) -> Any:
    """Build AdamW over all parameters alike, as in the FSDP engine: norms and biases decay too."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=0.0,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=grad_clip,
        bf16=model[0].config.bf16,
        params_dtype=model[0].config.params_dtype,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_param_gather=megatron.overlap_param_gather,
    )
    return get_megatron_optimizer(config, list(model), config_overrides={})


def clip_and_step(optimizer: ChainedOptimizer, grad_clip: float) -> float:
    """Clip and apply the gradient unless it is not finite; return its norm before clipping."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    with torch.no_grad():
        for part in optimizer.chained_optimizers:
            if not getattr(part, "is_stub_optimizer", False) and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, max_norm=grad_clip, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def ensure_states(optimizer: ChainedOptimizer) -> None:
    """Create the states that torch's AdamW creates at its first step, so that checkpoints can be read into them."""
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if not isinstance(inner, torch.optim.AdamW):
            continue  # fused optimizers create their states themselves
        for group in inner.param_groups:
            for param in group["params"]:
                if not inner.state[param]:
                    inner.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
