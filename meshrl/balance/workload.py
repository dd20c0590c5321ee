"""What a sequence of a given length costs: tokens, squared length, or the FLOPs of a model."""

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

Workload = Callable[[np.ndarray], np.ndarray]


def tokens_workload(lengths: np.ndarray) -> np.ndarray:
    """Work = length: right where the linear layers dominate."""
    return np.asarray(lengths, dtype=np.float64)


def squared_workload(lengths: np.ndarray) -> np.ndarray:
    """Work = length squared: attention alone."""
    return np.square(np.asarray(lengths, dtype=np.float64))


def flops_workload(model_config: Any) -> Workload:
    """Forward FLOPs of a decoder with this config (Hugging Face attribute names), linear layers and causal attention.

    Mixture-of-experts models count the experts that one token visits, and the router.
    """
    config = getattr(model_config, "text_config", None) or model_config
    hidden = _required(config, "hidden_size")
    layers = _required(config, "num_hidden_layers")
    heads = _required(config, "num_attention_heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    vocabulary = _required(config, "vocab_size")
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    # Layers with a state (linear attention) cost the same for every token, and have projections of their own.
    stateful = (getattr(config, "layer_types", None) or []).count("linear_attention")
    mixing = (layers - stateful) * projections + stateful * _state_projections(config, hidden, stateful)
    per_token = 2.0 * (mixing + _mlp_weights(config, hidden, layers) + hidden * vocabulary)
    # Scores and weighted values: 2 products x 2 FLOPs x heads x head_dim for each of length / 2 visible positions.
    per_square = 2.0 * (layers - stateful) * heads * head_dim

    def workload(lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.float64)
        return per_token * lengths + per_square * np.square(lengths)

    return workload


def get_workload(name: str, model_config: Any = None) -> Workload:
    """A workload by name: tokens, squared, or flops (which needs the model's config)."""
    if name == "tokens":
        return tokens_workload
    if name == "squared":
        return squared_workload
    if name == "flops":
        if model_config is None:
            raise ValueError("workload 'flops' needs the model's config")
        return flops_workload(model_config)
    near = difflib.get_close_matches(name, ["tokens", "squared", "flops"], n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown workload {name!r}; did you mean {near!r}? Known: tokens, squared, flops")


def _state_projections(config: Any, hidden: int, stateful: int) -> float:
    """Weights between hidden states and the queries, keys, values, gates and outputs of a layer with a state."""
    if not stateful or getattr(config, "linear_num_value_heads", None) is None:
        return 4.0 * hidden * hidden
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return float(hidden * (2 * keys + 3 * config.linear_num_value_heads * config.linear_value_head_dim))


def _mlp_weights(config: Any, hidden: int, layers: int) -> float:
    """Weights of all MLPs that one token passes through (gate, up and down)."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts:
        return layers * 3.0 * hidden * _required(config, "intermediate_size")
    visited = _required(config, "num_experts_per_tok")
    expert_size = getattr(config, "moe_intermediate_size", None) or _required(config, "intermediate_size")
    shared_size = getattr(config, "shared_expert_intermediate_size", None) or 0
    sparse = 3.0 * hidden * (visited * expert_size + shared_size) + hidden * experts
    dense_layers = len(getattr(config, "mlp_only_layers", None) or [])
    dense = 3.0 * hidden * _required(config, "intermediate_size") if dense_layers else 0.0
    return (layers - dense_layers) * sparse + dense_layers * dense


def _required(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"the model config {type(config).__name__} has no {name}, which workload 'flops' needs")
    return int(value)
