"""Layers that carry a state from token to token, in models whose other layers attend.

Like attention, they ask the context that comes down with the model's forward: it alone knows where documents end and
what was computed of them before. Transformers has no interface for them, so the layers' own class is replaced by one
that asks (`enter_recurrences`); weights, names and a forward without a context stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrl.parallel.delta_rule import DeltaRule
from meshrl.parallel.packable import note_attended


class RecurrentContext(Protocol):
    """What a layer with a state asks for, beside what `AttentionContext` says."""

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Maps channels [tokens, channels], decay and rate [tokens, value_heads] to [tokens, value_heads, dim]."""
        ...


class _GatedDeltaNet(nn.Module):
    """The forward of gated delta nets: projections → the context's recurrence → gated norm → projection."""

    # Names of the norm behind the rule and of the last projection.
    outward = ("norm", "out_proj")

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of tokens [tokens, hidden]: channels, gate [tokens, value channels], and what rate and decay come from."""
        own: Any = self
        return own.in_proj_qkv(x), own.in_proj_z(x), own.in_proj_b(x), own.in_proj_a(x)

    def forward(self, hidden_states: Tensor, *args: Any, attention_context: Any = None, **kwargs: Any) -> Tensor:
        if attention_context is None:
            return super().forward(hidden_states, *args, **kwargs)
        own: Any = self
        channels, gate, rate, fading = self.projected(hidden_states.flatten(0, 1))
        rate = rate.sigmoid() * (2 if getattr(self, "allow_neg_eigval", False) else 1)
        decay = -own.A_log.float().exp() * F.softplus(fading.float() + own.dt_bias)
        out = _recur(own, attention_context, channels, decay, rate)
        norm, projection = (getattr(own, name) for name in self.outward)
        out = norm(out.flatten(0, 1), gate.reshape(-1, out.shape[-1]))
        return projection(out.reshape(len(channels), -1)).unflatten(0, hidden_states.shape[:2])


class _Qwen3Next(_GatedDeltaNet):
    """Queries, keys, values and gates of a key head lie together."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own: Any = self
        copies = own.num_v_heads // own.num_k_heads
        wide = copies * own.head_v_dim
        parts = own.in_proj_qkvz(x).unflatten(1, (own.num_k_heads, -1))
        query, key, value, gate = parts.split([own.head_k_dim, own.head_k_dim, wide, wide], 2)
        rate, fading = own.in_proj_ba(x).unflatten(1, (own.num_k_heads, -1)).split([copies, copies], 2)
        channels = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], 1)
        return channels, gate.flatten(1), rate.flatten(1), fading.flatten(1)


class _OlmoHybrid(_GatedDeltaNet):
    outward = ("o_norm", "o_proj")

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own: Any = self
        channels = torch.cat([own.q_proj(x), own.k_proj(x), own.v_proj(x)], 1)
        return channels, own.g_proj(x), own.b_proj(x), own.a_proj(x)


KNOWN: dict[str, Any] = {
    "Qwen3NextGatedDeltaNet": _Qwen3Next,
    "Qwen3_5GatedDeltaNet": _GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": _GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": _OlmoHybrid,
}


@torch.compiler.disable
def _recur(own: Any, context: Any, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    if not hasattr(context, "recur"):
        raise ValueError(f"{type(own).__name__} carries a state, which {type(context).__name__} has no place for")
    note_attended(own)
    rule = DeltaRule(own.conv1d.weight.squeeze(1), own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim)
    return context.recur(own.layer_idx, rule, channels, decay, rate)


@cache
def _asking(known: Any, own: Any) -> type[nn.Module]:
    return type(own.__name__, (known, own), {})


def recurrences(hf_model: nn.Module) -> list[Any]:
    """The layers of a model that carry a state and that we know."""
    return [m for m in hf_model.modules() if isinstance(m, _GatedDeltaNet) or type(m).__name__ in KNOWN]


def enter_recurrences(hf_model: nn.Module) -> bool:
    """Has a model's layers with states ask the context; whether there are any."""
    found = recurrences(hf_model)
    for module in found:
        own: Any = type(module)
        if issubclass(own, _GatedDeltaNet):
            continue
        if module.activation not in ("silu", "swish"):
            raise ValueError(f"{own.__name__} has the activation {module.activation}: only silu is supported")
        if module.conv1d.bias is not None:
            raise ValueError(f"{own.__name__} has a convolution with a bias, which is not supported")
        module.__class__ = _asking(KNOWN[own.__name__], own)
    return bool(found)
