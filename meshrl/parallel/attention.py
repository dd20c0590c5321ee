"""Attention over packed rows, used by any Hugging Face model through Transformers' attention interface.

- `PackedSequences`: documents end to end in one row, with causal attention that never crosses their borders.
- `attend_varlen`: one kernel call for a packed row, from FlashAttention 4 or torch.
- `check_layers`, `longest_fixed_rotation`: whether a model's samples may share a row.
- `AttentionContext`, `attention`, `hand_contexts_down`: how attention layers get their context.

The caller passes a *context* as a keyword of the model's forward. Transformers hands it down to every attention layer.
Only the context describes the row (packed documents, one new token of many requests, a slice of a sequence). So there
is no attention mask, none of Transformers' guesses about packing apply, and no model code is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from meshrl.config.families import FAMILIES

if TYPE_CHECKING:
    from meshrl.parallel.linear_attention import DeltaRule


# Packed sequences: documents laid end to end in one row, and attention that never crosses their borders.

HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass  # not frozen, see AttentionContext
class PackedSequences:
    """The document lengths of one packed row, with everything that attention and positions derive from them."""

    lengths: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str) -> PackedSequences:
        """Describe a row of documents with these lengths, in the order of the documents in the row."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"packed documents need at least one token each, got lengths {list(lengths)[:8]}")
        return PackedSequences(tuple(lengths), torch.device(device))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The cumulative lengths (borders) of the documents, int32 `[documents + 1]`."""
        return self._send(self._borders.int())

    @cached_property
    def position_ids(self) -> Tensor:
        """Positions that restart in every document, int64 `[1, tokens]`."""
        offsets = torch.repeat_interleave(self._borders[:-1], torch.tensor(self.lengths))
        return self._send((torch.arange(self.num_tokens) - offsets)[None])

    @property
    def _borders(self) -> Tensor:
        return torch.tensor((0, *self.lengths)).cumsum(0)

    def _send(self, tensor: Tensor) -> Tensor:
        """Copy to the device through pinned memory, so that the host does not wait for work queued on the device."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def ready(self) -> PackedSequences:
        """Send borders and positions to the device now, not at first use."""
        _ = self.cu_seqlens, self.position_ids
        return self

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbouring documents of equal length as (first token, documents, length); each run is a plain rectangle."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in self.lengths:
            if runs and runs[-1][2] == length:
                first, count, _ = runs[-1]
                runs[-1] = (first, count + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return runs

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Compute causal attention inside each document; see `AttentionContext`."""
        # A window shorter than a document would need a mask of [length, length], and kernels that take a mask.
        is_masked = sliding_window is not None and self.max_length > sliding_window
        if query.is_cuda and query.dtype in HALF_TYPES and (len(self.runs) > 1 or is_masked):
            return self._attend_varlen(query, key, value, scaling, sliding_window)
        return self._attend_runs(query, key, value, scaling, sliding_window)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Run a recurrent layer with a separate state for each document; see `RecurrentContext`."""
        return rule.over(channels, decay, rate, self)[0]

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        borders, longest = (self.cu_seqlens, self.cu_seqlens), (self.max_length, self.max_length)
        return attend_varlen(q, k, v, borders, longest, scaling, window)[None]

    def _attend_runs(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """Make one SDPA call for each run of equal lengths.

        This needs no padding and no mask, and only few calls if documents are sorted by length.
        """
        group = query.shape[1] // key.shape[1]
        outputs = []
        for first, count, length in self.runs:
            q, k, v = (
                x[0, :, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1)
                for x in (query, key, value)
            )
            mask = None
            if window is not None and length > window:
                mask = causal_window(length, window, query.device)
            with fastest_attention(query):
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=group > 1
                )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None] if len(outputs) > 1 else outputs[0][None]


def fastest_attention(query: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that prefers cuDNN's kernels for half types on GPUs.

    cuDNN's kernels use Hopper's own instructions.
    """
    if not query.is_cuda or query.dtype not in HALF_TYPES:
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def causal_window(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask `[length, length]`: True for the token itself and the `window - 1` tokens before it."""
    steps = torch.arange(length, device=device)
    distance = steps[:, None] - steps[None, :]
    return (distance >= 0) & (distance < window)


# One kernel for a packed row of documents: FlashAttention 4 if it is installed, otherwise torch's own.


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float,
    window: int | None,
) -> Tensor:
    """Compute attention of query `[tokens, heads, dim]`, causal in each document and aligned to its last key.

    `borders` (int32 `[documents + 1]`) and `longest` each hold two values: the queries' and the keys'.
    """
    dim = value.shape[-1]
    if dim < query.shape[-1]:
        # The kernels need values as wide as queries. The columns that the zeros add are cut off again.
        value = F.pad(value, (0, query.shape[-1] - dim))
    if has_flash_4(query.device) and query.shape[-1] % 8 == 0:
        from flash_attn.cute import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=borders[0],
            cu_seqlens_k=borders[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            softmax_scale=scaling,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        # Older releases share key heads among query heads without a flag.
        told = {"enable_gqa": query.shape[1] != key.shape[1]} if _takes_gqa_flag() else {}
        seen = (-1 if window is None else window - 1, 0)
        out = varlen_attn(query, key, value, *borders, *longest, scale=scaling, window_size=seen, **told)  # type: ignore[arg-type]
    if isinstance(out, tuple):  # some releases of FlashAttention 4 return the log-sums too
        out = out[0]
    return out[..., :dim]


@cache
def has_flash_4(device: torch.device) -> bool:
    """Return whether FlashAttention 4 is installed (`meshrl[hopper]`) and the device is a Hopper GPU."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    # An older flash-attn has the same parent package, so look for the subpackage of version 4.
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@cache
def _takes_gqa_flag() -> bool:
    """Return whether this torch release's `varlen_attn` needs the `enable_gqa` flag for shared key heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


# Samples can share a row if the model's layers respect document borders and its angles do not depend on other samples.

ATTENDED = "_meshrl_attended"  # an attribute of modules that have called our attention
INSTEAD = "model.use_remove_padding=false pads samples instead, and rollout.name=vllm, sglang or hf generates"


def note_attended(module: nn.Module) -> None:
    """Mark a layer as one that uses the row's document borders; `check_layers` reads the mark after a first forward."""
    if ATTENDED not in module.__dict__:
        module.__dict__[ATTENDED] = True


def check_layers(hf_model: PreTrainedModel) -> None:
    """Raise a `ValueError` if layers mix tokens without using the document borders.

    Call it after the model has run on a packed row.
    """
    config: Any = hf_model.config.get_text_config()
    modules = list(hf_model.base_model.modules())
    attended, layers = sum(ATTENDED in module.__dict__ for module in modules), int(config.num_hidden_layers)
    convolve = [owner for owner in modules if any(isinstance(m, nn.Conv1d) for m in owner.children())]
    mixers = [type(owner).__name__ for owner in convolve if ATTENDED not in owner.__dict__]
    if attended >= layers and not mixers:
        return
    found = f"{type(hf_model).__name__} has {layers} layers, of which {attended} go through meshrl's attention"
    also = f" and {len(mixers)} convolutions over tokens (in {mixers[0]})" if mixers else ""
    raise ValueError(f"{found}{also}: the others take a row of several samples for one. {INSTEAD}")


def longest_fixed_rotation(hf_model: PreTrainedModel) -> int | None:
    """Return up to how many tokens rotary angles are independent of the rest of the row; None if there is no limit."""
    config: Any = hf_model.config.get_text_config()
    kinds = {getattr(module, "rope_type", None) for module in hf_model.modules() if _has_one_rotation(module)}
    if "longrope" in kinds:
        return int(config.rope_parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings) if "dynamic" in kinds else None


def _has_one_rotation(module: nn.Module) -> bool:
    return isinstance(getattr(module, "rope_type", None), str)


ATTENTION_NAME = "meshrl"


class AttentionContext(Protocol):
    """The interface through which an attention layer computes its output.

    Implementations are not frozen dataclasses. The compiler of torch 2.11 inspects frozen dataclasses and recompiles a
    layer for every number of documents, until it gives up and runs the layer uncompiled.
    """

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Map query `[batch, heads, tokens, dim]` and key/value `[batch, kv_heads, ...]` to `[batch, tokens, heads,
        dim]`.

        The width of a sliding window includes the token itself.
        """
        ...


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_context: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention through the context; this is the function that Transformers calls in every layer.

    It raises a `ValueError` for options that the contexts cannot express.
    """
    if attention_context is None:
        raise ValueError("this model runs with meshrl's attention: pass attention_context= to its forward")
    if attention_mask is not None:
        raise ValueError("meshrl's attention takes document lengths from its context, not an attention_mask: pass None")
    if softcap is not None or s_aux is not None:
        raise ValueError("attention soft-capping and attention sinks are not supported by meshrl's attention yet")
    if dropout:
        raise ValueError(f"attention dropout must be 0 in RL training, got {dropout}: set attention_dropout to 0")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if sliding_window is None:
        sliding_window = _window_in_mask(module)
    check_layer(module, layer_idx, sliding_window)
    note_attended(module)
    return attention_context.attend(layer_idx, query, key, value, scale, sliding_window), None


def check_layer(module: torch.nn.Module, layer_idx: int, sliding_window: int | None) -> None:
    """Raise a `ValueError` if a layer is not causal, or is neither full nor sliding-window attention.

    Transformers passes such properties to its own attention through the mask alone, which a context never receives.
    """
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    kind = layer_types[layer_idx] if layer_types else "full_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(f"layer {layer_idx} has {kind}, which is not supported by meshrl's attention yet")
    if kind == "sliding_attention" and sliding_window is None:
        raise ValueError(f"layer {layer_idx} has a sliding window, but its model does not say how wide it is")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"layer {layer_idx} looks ahead (is_causal is False): meshrl's attention is causal")


def _window_in_mask(module: nn.Module) -> int | None:
    """Return the sliding window of a layer whose model family passes it to Transformers only through the mask."""
    config: Any = getattr(module, "config", None)
    row = FAMILIES.get(getattr(config, "model_type", ""))
    return config.sliding_window if row is not None and row.window_in_mask else None


class _ContextInLayer:
    """A decoder layer that stores the context it is called with on its attention module."""

    def forward(self, *args: Any, attention_context: AttentionContext | None = None, **kwargs: Any) -> Tensor:
        own: Any = self
        own.self_attn.context_of_layer = attention_context
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            own.self_attn.context_of_layer = None


class _ContextFromLayer:
    """An attention module that takes the context stored by its decoder layer."""

    context_of_layer: AttentionContext | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.context_of_layer is not None:
            kwargs["attention_context"] = self.context_of_layer
        return super().forward(*args, **kwargs)  # type: ignore[misc]


# Layers that do not pass their keywords on to their attention.
SILENT_LAYERS = ("NemotronDecoderLayer", "StableLmDecoderLayer")


def hand_contexts_down(hf_model: nn.Module) -> None:
    """Make layers that drop their keywords hand the context to their attention; other layers stay as they are."""
    for layer in [module for module in hf_model.modules() if type(module).__name__ in SILENT_LAYERS]:
        for module, addition in ((layer, _ContextInLayer), (layer.self_attn, _ContextFromLayer)):
            if not isinstance(module, addition):
                own: Any = type(module)
                module.__class__ = _with(addition, own)


@cache
def _with(addition: type, own: type) -> type:
    return type(own.__name__, (addition, own), {})


AttentionInterface.register(ATTENTION_NAME, attention)
