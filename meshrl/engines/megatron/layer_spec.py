"""Megatron-Core's layer specification with our modules in the places where its own lack something."""

from __future__ import annotations

from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from meshrl.engines.megatron.latent import LatentAttention
from meshrl.engines.megatron.modules import PackedAttention, RMSNorm


def use_own_modules(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Puts our norms and attention into a block's specification, wherever Megatron's own stand."""
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if isinstance(attention, MLASelfAttentionSubmodules):
            parts.self_attention.module = LatentAttention
            continue
        for name in ("q_layernorm", "k_layernorm"):
            if "Identity" not in getattr(getattr(attention, name, None), "__name__", "Identity"):
                setattr(attention, name, RMSNorm)
    block.layer_norm = RMSNorm
    return block
