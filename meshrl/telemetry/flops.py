"""How many floating-point operations a model needs, from its config and the lengths of its sequences.

What counts is what the model needs, not what was run: nothing twice (recomputation, padding), of attention only the
pairs that the causal mask (and a window) leaves. A multiplication and an addition are two operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshrl.config.families import GATED_DELTA
from meshrl.telemetry.accounts import Key
from meshrl.telemetry.ledger import current_ledger, served_method

# The phase that a worker's method is a part of.
PHASES = {
    "generate_sequences": "gen",
    "begin_sequences": "gen",
    "start_generation": "gen",
    "take_generated": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "update_actor": "update_actor",
    "update_critic": "update_critic",
    "train_batch": "train",
}
GENERATES = ("generate", "prefill")
LINEAR = "linear_attention"  # what configs call layers with a state


@dataclass(frozen=True)
class ModelShape:
    """What the operations of a decoder depend on. `windows`: how far each layer looks back, None for all the way."""

    linear_weights: int  # of all layers, those that every token meets
    head_weights: int  # of the output layer
    attention_width: int  # query heads * head_dim
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: Any, values: bool = False) -> ModelShape | None:
        """Of a Hugging Face config; with `values` the output is one number. None for kinds that are not known."""
        config = getattr(config, "text_config", None) or config
        heads = getattr(config, "num_attention_heads", None)
        strange = ("kv_lora_rank", "ssm_cfg", "mamba_d_state")
        if heads is None or any(getattr(config, name, None) for name in strange):
            return None
        carries = getattr(config, "linear_num_value_heads", None) is not None
        if carries and config.model_type not in GATED_DELTA:
            return None
        hidden, layers = config.hidden_size, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        # The families whose other layers carry a state: Qwen's attention has a gate for each of its outputs.
        gates = heads if carries and config.model_type.startswith("qwen") else 0
        attention = hidden * head_dim * (2 * heads + gates + 2 * kv_heads)
        windows = _windows(config, layers)
        attending = [layer for layer in range(layers) if not carries or config.layer_types[layer] != LINEAR]
        linear = len(attending) * attention + sum(_mlp_weights(config, layer) for layer in range(layers))
        if carries:
            linear += (layers - len(attending)) * _state_weights(config)
        windows = [windows[layer] for layer in attending]
        return cls(linear, hidden * (1 if values else config.vocab_size), heads * head_dim, tuple(windows))

    def forward(self, lengths: np.ndarray, outputs: int | None = None, starts: np.ndarray | int = 0) -> float:
        """One pass over sequences of these lengths; the output layer for `outputs` of the tokens (None: for all).

        `starts`: so many tokens of each are there already (cached) and only looked at.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        new = float((lengths - starts).sum())
        pairs = sum(float((_pairs(lengths, w) - _pairs(np.asarray(starts, float), w)).sum()) for w in self.windows)
        head = self.head_weights * (new if outputs is None else outputs)
        return 2 * self.linear_weights * new + 2 * head + 4 * self.attention_width * pairs

    def training(self, lengths: np.ndarray, outputs: int | None = None) -> float:
        """Forward and backward: a gradient for every weight and every input of it."""
        return 3 * self.forward(lengths, outputs)


def _mlp_weights(config: Any, layer: int) -> int:
    """Weights that one token meets in the feed-forward part of a layer."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    if not experts or not _is_sparse(config, layer):
        return 3 * hidden * config.intermediate_size
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    gate = hidden if shared else 0
    shared = shared or (getattr(config, "n_shared_experts", None) or 0) * width
    return 3 * hidden * (config.num_experts_per_tok * width + shared) + hidden * experts + gate


def _state_weights(config: Any) -> int:
    """Weights that a token meets in a layer with a state, which it fades, reads twice and writes: as three more."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projections = config.hidden_size * (2 * keys + 3 * values + 2 * config.linear_num_value_heads)
    return projections + (2 * keys + values) * config.linear_conv_kernel_dim + 3 * values * config.linear_key_head_dim


def _is_sparse(config: Any, layer: int) -> bool:
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    if layer < (getattr(config, "first_k_dense_replace", None) or 0):
        return False
    return (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0


def _windows(config: Any, layers: int) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * layers
    return [window if kinds is None or kinds[layer] == "sliding_attention" else None for layer in range(layers)]


def _pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Tokens that look, times tokens they look at."""
    if window is None:
        return lengths * (lengths + 1) / 2
    within = np.minimum(lengths, window)
    return within * (within + 1) / 2 + (lengths - within) * window


def utilisation(flops: float, seconds: float, devices: int, peak: float) -> float:
    """The share of what the devices could have computed at best."""
    if seconds <= 0 or devices < 1 or peak <= 0:
        raise ValueError(f"utilisation needs seconds, devices and peak above 0, got {seconds}, {devices} and {peak}")
    return flops / (seconds * devices * peak)


def utilisation_metrics(
    counts: Mapping[Key, Mapping[str, float]], seconds: Mapping[Key, Mapping[str, float]], peak: float | None
) -> dict[str, float]:
    """`perf/tflops/<phase>` (of one device) and, with a `peak`, `mfu/<phase>`, from what the ranks have counted.

    A phase lasts as long as on its slowest rank; generation, which may go on beside other calls, as booked.
    """
    flops: dict[str, float] = {}
    lasted: dict[str, dict[Key, float]] = {}
    for key, counted in counts.items():
        for method, phase in PHASES.items():
            if (found := counted.get(f"flops/{method}")) is None:
                continue
            flops[phase] = flops.get(phase, 0.0) + found
            times = lasted.setdefault(phase, {})
            own = counted.get(f"seconds/{method}", 0.0)
            booked = seconds.get(key, {})
            times[key] = sum(booked.get(name, 0.0) for name in GENERATES) if phase == "gen" else own
    metrics: dict[str, float] = {}
    for phase, total in flops.items():
        longest, ranks = max(lasted[phase].values()), len(lasted[phase])
        if longest > 0:
            metrics[f"perf/tflops/{phase}"] = total / (longest * ranks) / 1e12
            if peak is not None:
                metrics[f"mfu/{phase}"] = utilisation(total, longest, ranks, peak)
    return metrics


def count_flops(flops: float) -> None:
    """Adds to what the call that this thread works on has computed."""
    ledger = current_ledger()
    if ledger is not None:
        ledger.add(f"flops/{served_method()}", flops)
