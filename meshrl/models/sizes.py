"""Sizes that configs of different families give under different names."""

from __future__ import annotations

from typing import Any

from meshrl.config.model_folder import EXPERT_COUNTS


def of_text(hf_config: Any) -> Any:
    """The part of a config that is of the language model: all of it, but for a model that sees."""
    return hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config


def head_dim(hf_config: Any) -> int:
    """Elements of a head of queries."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def expert_count(hf_config: Any) -> int:
    """Routed experts of a sparse layer; 0 for a dense model."""
    for field in EXPERT_COUNTS:
        if getattr(hf_config, field, None):
            return int(getattr(hf_config, field))
    return 0
