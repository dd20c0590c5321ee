"""Our attention function: enters any Hugging Face model through its attention interface, with no model code touched.

The caller passes a *context* as a keyword of the model's forward; Transformers hands it down to every attention layer.
The context alone knows what the row holds (packed documents, one new token of many requests, a slice of a sequence),
so there is no attention mask anywhere and none of Transformers' guesses about packing apply.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from meshrl.config.families import FAMILIES
from meshrl.parallel.packable import note_attended

ATTENTION_NAME = "meshrl"


class AttentionContext(Protocol):
    """What an attention layer asks for: the mix of values for these queries.

    No frozen dataclass: into those the compiler of torch 2.11 looks, and compiles a layer anew for every number of
    documents, until it gives up and runs it uncompiled.
    """

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Maps query [batch, heads, tokens, dim] and key/value [batch, kv_heads, ...] to [batch, tokens, heads, dim].

        A sliding window counts the token itself.
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
    """The function Transformers calls in every layer; refuses what the contexts cannot express."""
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
    """Refuses layers that look elsewhere than back over all, or over a window, of their document.

    Transformers tells such things to its own attention by the mask alone, which a context never sees.
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
    """The window of a layer whose family tells it to Transformers' mask alone."""
    config: Any = getattr(module, "config", None)
    row = FAMILIES.get(getattr(config, "model_type", ""))
    return config.sliding_window if row is not None and row.window_in_mask else None


class _ContextInLayer:
    """A decoder layer that leaves its attention the context that it is called with."""

    def forward(self, *args: Any, attention_context: AttentionContext | None = None, **kwargs: Any) -> Tensor:
        own: Any = self
        own.self_attn.context_of_layer = attention_context
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            own.self_attn.context_of_layer = None


class _ContextFromLayer:
    """Attention that takes the context from its layer."""

    context_of_layer: AttentionContext | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.context_of_layer is not None:
            kwargs["attention_context"] = self.context_of_layer
        return super().forward(*args, **kwargs)  # type: ignore[misc]


# Layers that call their attention without the keywords that they were called with.
SILENT_LAYERS = ("NemotronDecoderLayer", "StableLmDecoderLayer")


def hand_contexts_down(hf_model: nn.Module) -> None:
    """Have layers that swallow their keywords give their attention the context; the others need nothing."""
    layers: list[Any] = [module for module in hf_model.modules() if type(module).__name__ in SILENT_LAYERS]
    for layer in layers:
        for module, addition in ((layer, _ContextInLayer), (layer.self_attn, _ContextFromLayer)):
            if not isinstance(module, addition):
                module.__class__ = _with(addition, type(module))


@cache
def _with(addition: Any, own: Any) -> type[nn.Module]:
    return type(own.__name__, (addition, own), {})


AttentionInterface.register(ATTENTION_NAME, attention)
