"""What a sequence of a given length costs: tokens, squared length, or the FLOPs of a model."""

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

# Families whose MLPs have no gate.
UNGATED = {"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2"}
# What families call the sizes of their mixtures of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
VISITED = ("num_experts_per_tok", "moe_k", "moe_topk")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
WITH_SHARED = {"hunyuan_v1_moe"}  # one, without a field that says so
DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

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
    projections, width = hidden * head_dim * (2 * heads + 2 * kv_heads), head_dim
    if latent := _first(config, ("kv_lora_rank",)):
        turned, plain, values = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        queries, width = heads * (turned + plain), (turned + plain + values) / 2
        low = config.q_lora_rank
        projections = low * (hidden + queries) if low else hidden * queries
        projections += hidden * (latent + turned) + latent * heads * (plain + values) + heads * values * hidden
    # Layers with a state (linear attention) cost the same for every token, and have projections of their own.
    stateful = (getattr(config, "layer_types", None) or []).count("linear_attention")
    mixing = (layers - stateful) * projections + stateful * _state_projections(config, hidden, stateful)
    per_token = 2.0 * (mixing + _mlp_weights(config, hidden, layers) + hidden * vocabulary)
    # Scores and weighted values: 2 products x 2 FLOPs x heads x head_dim for each of length / 2 visible positions.
    per_square = 2.0 * (layers - stateful) * heads * width

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
    """Weights of all MLPs that one token passes through: gate, up and down, or without a gate the other two."""
    matrices = 2.0 if getattr(config, "model_type", None) in UNGATED else 3.0
    experts = _first(config, EXPERTS)
    if not experts:
        return layers * matrices * hidden * _required(config, "intermediate_size")
    visited = _first(config, VISITED) or _required(config, VISITED[0])
    expert_size = getattr(config, "moe_intermediate_size", None) or _required(config, "intermediate_size")
    always = int(getattr(config, "model_type", None) in WITH_SHARED)
    shared_size = getattr(config, "shared_expert_intermediate_size", None)
    shared_size = shared_size or (_first(config, SHARED) or always) * expert_size
    sparse = matrices * hidden * (visited * expert_size + shared_size) + hidden * experts
    dense_layers = _dense_layers(config)
    dense = matrices * hidden * _required(config, "intermediate_size") if dense_layers else 0.0
    return (layers - dense_layers) * sparse + dense_layers * dense


def _dense_layers(config: Any) -> int:
    """How many layers of a mixture of experts have none."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return list(kinds).count("dense")
    return len(getattr(config, "mlp_only_layers", None) or []) or _first(config, DENSE)


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first of these fields that is set, some of which have a number for each layer; 0 if none is."""
    found = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    return int(found[0] if isinstance(found, list) else found)


def _required(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"the model config {type(config).__name__} has no {name}, which workload 'flops' needs")
    return int(value)
