"""Keys and values of running requests, one slot a request, and the attention contexts that fill and read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.parallel.packed import PackedSequences

GROWTH = 128


class PrefillContext:
    """Attention over packed prompts that also remembers each layer's keys and values."""

    def __init__(self, packed: PackedSequences):
        self.packed = packed
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `AttentionContext`."""
        self.keys[layer_idx], self.values[layer_idx] = key[0], value[0]
        return self.packed.attend(layer_idx, query, key, value, scaling, sliding_window)


class SlotCache:
    """Keys and values [slots, kv_heads, length, dim] of every layer; slot i holds its first `lengths[i]` tokens."""

    def __init__(self, prefill: PrefillContext, slot_of: Tensor):
        """Takes over prefilled prompts; `slot_of[i]` names the prompt of slot i, so that samples share one prefill."""
        packed = prefill.packed
        lengths = torch.tensor(packed.lengths, device=packed.device)
        places = packed.cu_seqlens[:-1, None].long() + torch.arange(packed.max_length, device=packed.device)
        # Beyond a prompt's end lie its successors' tokens: they are masked, and overwritten as the answer grows.
        places = places.clamp_(max=packed.num_tokens - 1)[slot_of]
        self.lengths = lengths[slot_of]
        self.longest = packed.max_length
        self.is_even = len(set(packed.lengths)) == 1
        self.keys = {layer: k[:, places].transpose(0, 1) for layer, k in prefill.keys.items()}
        self.values = {layer: v[:, places].transpose(0, 1) for layer, v in prefill.values.items()}

    def make_room(self, max_length: int) -> None:
        """Grows every slot so that one more token fits, by a stretch at a time and never beyond `max_length`."""
        room = next(iter(self.keys.values())).shape[2]
        if self.longest < room:
            return
        extra = min(max(GROWTH, room // 2), max_length - room)
        for store in (self.keys, self.values):
            for layer, x in store.items():
                store[layer] = F.pad(x, (0, 0, 0, extra)) if extra > 0 else x

    def keep(self, slots: Tensor) -> None:
        """Drops all other slots."""
        self.lengths = self.lengths[slots]
        for store in (self.keys, self.values):
            for layer, x in store.items():
                store[layer] = x[slots]


class DecodeContext:
    """Attention of one new token a slot over the slot's own tokens."""

    def __init__(self, cache: SlotCache):
        self.cache = cache
        self.slots = torch.arange(len(cache.lengths), device=cache.lengths.device)
        self.width = cache.longest + 1
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def position_ids(self) -> Tensor:
        """The new tokens' positions, [slots, 1]."""
        return self.cache.lengths[:, None]

    def _mask(self, window: int | None) -> Tensor | None:
        if window not in self._masks:
            if self.cache.is_even and (window is None or self.width <= window):
                self._masks[window] = None
            else:
                places = torch.arange(self.width, device=self.slots.device)[None]
                mask = places <= self.cache.lengths[:, None]
                if window is not None:
                    mask &= places > self.cache.lengths[:, None] - window
                self._masks[window] = mask[:, None, None]
        return self._masks[window]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `AttentionContext`."""
        keys, values = self.cache.keys[layer_idx], self.cache.values[layer_idx]
        if self.cache.is_even:
            keys[:, :, self.width - 1], values[:, :, self.width - 1] = key[:, :, 0], value[:, :, 0]
        else:
            keys[self.slots, :, self.cache.lengths] = key[:, :, 0]
            values[self.slots, :, self.cache.lengths] = value[:, :, 0]
        slots, heads, _, dim = query.shape
        # The query heads that share a key head become rows of one small matrix: no repeated keys.
        folded = query.view(slots, keys.shape[1], heads // keys.shape[1], dim)
        out = F.scaled_dot_product_attention(
            folded,
            keys[:, :, : self.width],
            values[:, :, : self.width],
            attn_mask=self._mask(sliding_window),
            scale=scaling,
        )
        return out.reshape(slots, 1, heads, out.shape[-1])

    def advance(self) -> None:
        """Counts the tokens just written."""
        self.cache.lengths = self.cache.lengths + 1
        self.cache.longest += 1
