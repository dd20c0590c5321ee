"""Tiny models of every causal language family of the installed Transformers, made from its config class.

Sizes are shrunk by their names; `OWN` holds what a family needs beside, among it all that makes its numbers its own:
factors on logits, windows shorter than the sequences, layers of every kind.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshrl.models.loading import named_weights

VOCABULARY, POSITIONS, WINDOW = 41, 64, 4
SIZES: dict[int, str] = {
    64: """max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length
        max_target_positions context_length""",
    48: """intermediate_size n_inner ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim feed_forward_dim ffn_hidden_size
        dim_ff d_inner feedforward_dim dense_intermediate_size mlp_intermediate_size""",
    VOCABULARY: "vocab_size vocab_size_per_layer_input n_vocab",
    32: """hidden_size n_embd d_model dim embed_dim embedding_size lru_width word_embed_proj_dim dim_model emb_dim
        encoder_hidden_size decoder_hidden_size hidden_dim input_embedding_size output_embedding_size""",
    16: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size hidden_size_per_layer_input moe_ffn_hidden_size""",
    12: "q_lora_rank",
    10: "kv_lora_rank linear_value_head_dim",
    8: """head_dim attention_head_dim kv_channels dim_head qk_nope_head_dim v_head_dim mamba_d_state ssm_state_size
        state_size mamba_d_head mamba_head_dim mamba_n_heads mamba_num_heads global_head_dim swa_head_dim
        swa_v_head_dim""",
    6: "linear_key_head_dim",
    4: """num_attention_heads n_head num_heads n_heads decoder_attention_heads encoder_attention_heads
        linear_num_value_heads attention_heads qk_rope_head_dim num_experts num_local_experts n_routed_experts
        moe_num_experts rotary_dim swa_num_attention_heads sliding_window attention_window_size window_size
        attention_chunk_size local_attention""",
    2: """num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_decoder_layers
        num_key_value_heads n_kv_heads num_kv_heads linear_num_key_heads multi_query_group_num num_experts_per_tok
        moe_top_k moe_k experts_per_token num_selected_experts moe_topk swa_num_key_value_heads
        num_global_key_value_heads""",
    1: """eos_token_id n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group
        first_k_dense_replace moe_layer_start_index num_dense_layers""",
    0: "pad_token_id",
}
DROPOUTS = """attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout
    hidden_dropout_prob attention_probs_dropout_prob residual_dropout resid_dropout attn_dropout embd_dropout
    layerdrop decoder_layerdrop ffn_dropout"""
SMALL: dict[str, float] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL |= dict.fromkeys(DROPOUTS.split(), 0.0)
# What scales or caps numbers is set to something that shows, wherever a config has the field.
SHOWN = {"logits_scaling": 8.0, "logit_scale": 0.25, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}
SHOWN |= dict.fromkeys(("residual_multiplier", "attention_multiplier", "lm_head_multiplier", "key_multiplier"), 0.5)
SHOWN |= {"embedding_multiplier": 3.0, "logits_mup_width_multiplier": 4.0, "partial_rotary_factor": 0.5}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Fields that a config may leave open, and that then follow sizes which are not shrunk.
MAY_BE_OPEN = ("num_key_value_heads", "sliding_window", "n_inner", "q_lora_rank", "n_routed_experts", "head_dim")
MAY_BE_OPEN += ("n_shared_experts", "num_experts_per_tok")
LATENT: dict[str, Any] = {"head_dim": 4, "num_key_value_heads": 4}
LATENT_FAMILIES = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "youtu",
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
TYPES = {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4}
INDEXER |= {"indexer_compress_ratio": 2}
MAMBA = {"mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT_FAMILIES, LATENT),
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {**TYPES, "rope_parameters": {FULL: ROPE, SLIDING: ROPE}},
    "ctrl": {"dff": 48},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 0.5, "kv_n_heads": 2},
             "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "doge": {"is_moe": False},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"laurel_rank": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "layer_types": [SLIDING, FULL, SLIDING, FULL], "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "kimi_linear": {**LATENT, "num_local_experts": 4, "num_experts_per_tok": 2, "linear_head_dim": 8,
                    "linear_num_heads": 4, "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, FULL],
                    "mlp_layer_types": ["dense", "sparse"] * 2},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "longcat_flash": {**LATENT, "zero_expert_num": 2},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "minicpm3": {**LATENT, "dim_model_base": 8},
    "nemotron_h": {"n_routed_experts": 4},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 41, "shape_vocab_size": 41, "pronunciation_embed_dim": 16,
                 "shape_embed_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"qk_layernorm": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2,
              "mamba_dt_rank": 4, "attention_head_dim": 16, "num_key_value_heads": 4},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8,
               "n_mamba_heads": 8, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid_sliding"]},
}  # fmt: skip
# Families of which no tiny model can be built, and why; the dry run refuses them.
UNBUILT = {
    "blt": "five models in one, whose sizes depend on one another",
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "its config names no vocabulary",
    "gemma4_unified_assistant": "its config names no vocabulary",
    "musicgen": "its config needs the configs of three other models",
    "musicgen_melody": "its config needs the configs of three other models",
}


def families() -> list[str]:
    """All model types for which the installed Transformers has a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **fields: Any) -> PretrainedConfig:
    """A config of the family whose model has a few ten thousand weights."""
    return shrunk(CONFIG_MAPPING[family], OWN.get(family, {}) | fields)


def shrunk(kind: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    """A config of this class with small sizes, and with small configs in it; `own` wins over both."""
    whole = kind()
    given = whole.to_dict()
    small: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(part := getattr(whole, name), PretrainedConfig):
            small[name] = shrunk(type(part), own.get(name, {}))
        elif name in SMALL and not isinstance(value, (dict, list)) and (value is not None or name in MAY_BE_OPEN):
            small[name] = SMALL[name]
        elif name in SHOWN:
            small[name] = SHOWN[name]
    if kinds := list(dict.fromkeys(given.get("layer_types") or [])):
        small["layer_types"] = [*kinds, *kinds[:2]]
        small |= {name: len(small["layer_types"]) for name in LAYER_COUNTS if name in given}
    if given.get("bos_token_id") is not None:
        small["bos_token_id"] = 2
    parts = [name for name, value in small.items() if isinstance(value, PretrainedConfig)]
    return kind(**small | {name: value for name, value in own.items() if name not in parts})


def randomized(model: PreTrainedModel, seed: int = 7) -> PreTrainedModel:
    """The model with random weights that all matter: biases, sinks and scales as well as matrices."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, param in named_weights(model).items():
            noise = torch.randn(param.shape, generator=generator)
            if name not in parameters and not name.endswith("bias"):
                continue  # what a model computes for itself
            if param.ndim >= 2:
                param.copy_(noise * param.shape[-1] ** -0.5)
            else:
                param.copy_(param.nan_to_num(1.0, 1.0, 1.0) + 0.3 * noise)
    return model.eval()


def tiny_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """A randomized model of this config; it has the same weights with every attention function."""
    made = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention)
    return randomized(made)
