"""Model FLOPs from a model's modules and its sequence lengths, and the utilisation of devices (MFU).

The count covers what the model needs, not what was run. Recomputation, padding and repeated images of several samples
do not count. Attention counts only the pairs that the causal mask (and a sliding window) leaves. A multiplication and
an addition are two operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from meshrl.models.loading import empty_causal_lm
from meshrl.models.names import expert_count, head_dim, of_text
from meshrl.models.vision import language_model, sees, tower_of
from meshrl.telemetry.time_ledger import Key, current_ledger, served_method

# Worker method -> the phase that the method belongs to.
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
LINEAR = "linear_attention"  # the name of layers with a state in configs
# Weights of routed experts. A token passes through some of the experts only.
EXPERTS = re.compile(r"(^|\.)experts\.")
VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
# Model families whose counts agree with torch's FLOP counter (tests/telemetry/test_flops.py).
COUNTED = frozenset({
    "afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "llama",
    "mellum", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma", "youtu",
})  # fmt: skip


@dataclass(frozen=True)
class TowerShape:
    """The sizes of a vision tower that determine its FLOPs.

    A square is the group of image patches that is merged into one token.
    """

    patch_weights: int  # weights that every patch passes through, in all layers together
    square_weights: int  # weights of the mergers, which turn squares into vectors for the language model
    width: int  # heads * head_dim
    layers: int
    squares_of_window: int | None  # side of an attention window in squares; None: all layers attend to the whole image
    full_layers: int  # layers that attend to the whole image
    merge: int  # side of a square in patches

    @classmethod
    def of(cls, tower: nn.Module, config: Any) -> TowerShape:
        """Build the shape from the modules of a vision tower and the model's vision config."""
        merge, mergers = config.spatial_merge_size, ("merger", "deepstack_merger_list")
        weights = {name: weight.numel() for name, weight in _products(tower)}
        squares = sum(size for name, size in weights.items() if name.split(".")[0] in mergers)
        layers, width = config.depth, getattr(config, "embed_dim", None) or config.hidden_size
        window, full = None, layers
        if getattr(config, "window_size", None):
            window, full = config.window_size // merge // config.patch_size, len(set(config.fullatt_block_indexes))
        return cls(sum(weights.values()) - squares, squares, width, layers, window, full, merge)

    def forward(self, grids: Iterable[tuple[int, int, int]]) -> float:
        """Return the FLOPs of one forward pass over images; `grids` are (frames, patch rows, patch columns)."""
        total = 0.0
        for times, rows, columns in grids:
            patches = rows * columns
            pairs = self.full_layers * patches**2
            if self.squares_of_window is not None:
                side = self.squares_of_window * self.merge
                of_rows, of_columns = _cut(rows, side), _cut(columns, side)
                pairs += (self.layers - self.full_layers) * sum((r * c) ** 2 for r in of_rows for c in of_columns)
            linear = self.patch_weights * patches + self.square_weights * (patches // self.merge**2)
            total += times * (2 * linear + 4 * self.width * pairs)
        return total


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that determine its FLOPs.

    `windows` has the sliding window of each attention layer in tokens, or None for full attention.
    """

    linear_weights: float  # weights that one token passes through, in all layers together
    head_weights: int  # weights of the output layer
    attention_width: float  # query heads * head_dim; the mean of key and value widths if these differ
    windows: tuple[int | None, ...]
    tower: TowerShape | None = None  # the vision tower of a vision-language model

    @classmethod
    def of(cls, config: Any, values: bool = False) -> ModelShape | None:
        """Build the shape from a Hugging Face config, by the modules of an empty model.

        With `values`, the output layer returns one number per token, as in a critic. Return None for model families
        whose counts were not verified.
        """
        if config.model_type not in COUNTED:
            return None
        model = empty_causal_lm(config, "eager")
        decoder, text = language_model(model), of_text(config)
        experts, visited = expert_count(text), _visited_experts(text)
        linear = 0.0
        for name, weight in _products(decoder):
            linear += weight.numel() * (visited / experts if EXPERTS.search(name) else 1)
        heads, keys = text.num_attention_heads, head_dim(text)
        queries = getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0) or keys
        kinds = getattr(text, "layer_types", None) or []
        windows = _windows(text, text.num_hidden_layers)
        if states := kinds.count(LINEAR):
            # Each token decays the state, reads it twice and writes it, which costs as much as three more weights
            # for each element of the state.
            values_width = text.linear_num_value_heads * text.linear_value_head_dim
            linear += states * 3 * values_width * text.linear_key_head_dim
            windows = [window for window, kind in zip(windows, kinds, strict=True) if kind != LINEAR]
        head = text.hidden_size if values else model.get_output_embeddings().weight.numel()
        width = heads * (queries + (getattr(text, "v_head_dim", None) or keys)) / 2
        tower = TowerShape.of(tower_of(model), config.vision_config) if sees(config) else None
        return cls(linear, head, width, tuple(windows), tower)

    def forward(self, lengths: np.ndarray, outputs: int | None = None, starts: np.ndarray | int = 0) -> float:
        """Return the FLOPs of one forward pass over sequences of `lengths` `[sequences]` tokens.

        The output layer runs for `outputs` of the tokens (None: for all). The first `starts` tokens of each sequence
        are in the KV cache already: they are attended to but not computed.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        new = float((lengths - starts).sum())
        pairs = sum(float((_pairs(lengths, w) - _pairs(np.asarray(starts, float), w)).sum()) for w in self.windows)
        head = self.head_weights * (new if outputs is None else outputs)
        return 2 * self.linear_weights * new + 2 * head + 4 * self.attention_width * pairs

    def training(self, lengths: np.ndarray, outputs: int | None = None) -> float:
        """Return the FLOPs of forward and backward: three forward passes.

        The backward pass computes a gradient for every weight and for the inputs of every weight.
        """
        return 3 * self.forward(lengths, outputs)


def _products(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, weight) pairs that inputs are multiplied with.

    These are all parameters of two or more dimensions, except embedding tables and stacked biases.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, weight in module.named_parameters(recurse=False):
            # Stacked experts have biases of two dimensions.
            if weight.dim() > 1 and not name.endswith("bias"):
                yield f"{path}.{name}" if path else name, weight


def _visited_experts(config: Any) -> int:
    """Return the number of routed experts that a token passes through; 0 for dense models."""
    found = next((getattr(config, name) for name in VISITED if getattr(config, name, None)), 0)
    return int(found[0] if isinstance(found, list) else found)


def _cut(size: int, part: int) -> list[int]:
    """Cut a length into parts of size `part`, of which the last may be shorter."""
    return [min(part, size - start) for start in range(0, size, part)]


def _windows(config: Any, layers: int) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * layers
    return [window if kinds is None or kinds[layer] == "sliding_attention" else None for layer in range(layers)]


def _pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Count the (query, key) pairs of causal attention for each length, within `window` tokens if given."""
    if window is None:
        return lengths * (lengths + 1) / 2
    within = np.minimum(lengths, window)
    return within * (within + 1) / 2 + (lengths - within) * window


def utilisation(flops: float, seconds: float, devices: int, peak: float) -> float:
    """Return `flops` as a share of the FLOPs that `devices` of `peak` FLOP/s could compute in `seconds`."""
    if seconds <= 0 or devices < 1 or peak <= 0:
        raise ValueError(f"utilisation needs seconds, devices and peak above 0, got {seconds}, {devices} and {peak}")
    return flops / (seconds * devices * peak)


def utilisation_metrics(
    counts: Mapping[Key, Mapping[str, float]], seconds: Mapping[Key, Mapping[str, float]], peak: float | None
) -> dict[str, float]:
    """Return `perf/tflops/<phase>` per device and, with a `peak` in FLOP/s, `mfu/<phase>`.

    `counts` and `seconds` are the ledger counts and the booked seconds of each rank. The duration of a phase is that
    of its slowest rank. Generation may overlap with other calls, so its duration is the booked time of generating.
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
    """Add FLOPs to the count of the worker call that this thread currently serves."""
    ledger = current_ledger()
    if ledger is not None:
        ledger.add(f"flops/{served_method()}", flops)
