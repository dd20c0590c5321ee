"""Keys and values on a CPU: one contiguous slot a row, because gathering blocks for every token costs a fifth of it.

Blocks are what memory is counted in; only those that outlive their sequence (cached prefixes) are copied to the pool.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.linear_attention import DeltaRule, States, recurrences
from meshrl.rollout.embedded.scheduler import Piece, Rows

GROWTH = 128
SMALL = 1 << 20  # bytes that are not worth a mapping of their own


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory where something is written: one long row among short ones does not make all of them long.

    What has never been written is masked, but a weight of zero times NaN would still be NaN.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < SMALL:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # With huge pages the first token of a row would take two megabytes for each head.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class SlotCache:
    """Keys and values [rows, kv_heads, length, dim] by layer; row i holds its first `rows.length[i]` tokens."""

    def __init__(self, num_blocks: int, block_size: int, max_length: int):
        self.num_blocks, self.block_size, self.max_length = num_blocks, block_size, max_length
        self.stores: dict[int, tuple[Tensor, Tensor]] = {}
        self.pool: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = self.room = 0

    def make_room(self, rows: int, length: int) -> None:
        """Grows the slots so that this many rows of this length fit, by a stretch at a time."""
        if rows <= self.rows and length <= self.room:
            return
        if rows > self.rows:
            self.rows = max(rows, self.rows + self.rows // 2)
        if length > self.room:
            self.room = max(length, min(self.max_length, self.room + max(GROWTH, self.room // 2)))
        for layer, store in self.stores.items():
            self.stores[layer] = self._grown(store[0]), self._grown(store[1])

    def _grown(self, old: Tensor) -> Tensor:
        new = untouched_zeros((self.rows, old.shape[1], self.room, old.shape[3]), old.dtype)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of a layer, made on first use in the shape of its keys and values [.., heads, tokens, dim]."""
        if layer not in self.stores:
            self.stores[layer] = tuple(  # type: ignore[assignment]
                untouched_zeros((self.rows, x.shape[1], self.room, x.shape[3]), x.dtype) for x in (key, value)
            )
        return self.stores[layer]

    def move(self, moves: Seq[tuple[int, int]], length: int) -> None:
        """Copies rows (from, to)."""
        source, target = (torch.tensor(side) for side in zip(*moves, strict=True))
        for store in self.stores.values():
            for x in store:
                x[target, :, :length] = x[source, :, :length]

    def load(self, row: int, blocks: Seq[int]) -> None:
        """Fills the head of a row from cached blocks."""
        index = torch.tensor(blocks)
        for layer, pools in self.pool.items():
            for x, pool in zip(self.stores[layer], pools, strict=True):
                x[row, :, : len(blocks) * self.block_size] = pool[index].transpose(0, 1).flatten(1, 2)

    def store(self, row: int, blocks: Seq[int], places: Seq[int]) -> None:
        """Copies blocks number `places` of a row to the pool, where they stay when the row goes on to others."""
        for layer, store in self.stores.items():
            if layer not in self.pool:
                # Not touched before it is written: memory that no prefix needs is never taken.
                self.pool[layer] = tuple(  # type: ignore[assignment]
                    x.new_empty(self.num_blocks, x.shape[1], self.block_size, x.shape[3]) for x in store
                )
            for x, pool in zip(store, self.pool[layer], strict=True):
                for place in places:
                    start = place * self.block_size
                    pool[blocks[place]] = x[row, :, start : start + self.block_size]


class SlotPrefill:
    """Packed prefill pieces: writes keys, values and states to the slots of all rows that want them."""

    def __init__(self, cache: SlotCache, pieces: Seq[Piece], states: PieceStates | None = None):
        self.cache, self.pieces, self.states = cache, pieces, states
        self.packed = PackedSequences.of([len(piece.tokens) for piece in pieces], "cpu")
        starts = np.array([piece.start for piece in pieces])
        lengths = np.array(self.packed.lengths)
        piece_of = np.repeat(np.arange(len(pieces)), lengths)
        first = np.cumsum(lengths) - lengths
        offsets = np.arange(len(piece_of)) - first[piece_of]
        self.positions = torch.from_numpy(starts[piece_of] + offsets)
        self.has_context = bool(starts.any())
        self.rows = torch.tensor([piece.sequence.row for piece in pieces])
        # Every token goes to its own row; whole prompts also to the rows of their other samples.
        takers = [[piece.sequence.row, *(f.row for f in piece.sequence.followers)] for piece in pieces]
        source = [np.tile(np.arange(a, a + n), len(t)) for a, n, t in zip(first, lengths, takers, strict=True)]
        self.source = torch.from_numpy(np.concatenate(source))
        self.target = torch.from_numpy(np.repeat(np.concatenate(takers), np.repeat(lengths, [len(t) for t in takers])))
        self._places = torch.from_numpy(piece_of), torch.from_numpy(offsets)
        self._first = torch.from_numpy(first)
        self._starts = torch.from_numpy(starts)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `AttentionContext`."""
        keys, values = self.cache.of(layer_idx, key, value)
        positions = self.positions[self.source]
        keys[self.target, :, positions] = key[0].transpose(0, 1)[self.source]
        values[self.target, :, positions] = value[0].transpose(0, 1)[self.source]
        if not self.has_context:
            return self.packed.attend(layer_idx, query, key, value, scaling, sliding_window)
        return self._attend_slots(query, keys, values, scaling, sliding_window)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """See `RecurrentContext`."""
        assert self.states is not None
        return self.states.recur(layer_idx, rule, channels, decay, rate, self.packed)

    def _attend_slots(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
        """Pieces that go on where others ended: a rectangle of queries over the slots, with a mask."""
        width = self.packed.max_length
        end = int(self.positions.max()) + 1
        offsets = torch.arange(width)
        places = (self._first[:, None] + offsets).clamp_(max=query.shape[2] - 1)
        at = self._starts[:, None] + offsets
        seen = torch.arange(end)
        mask = seen <= at[..., None]
        if window is not None:
            mask &= seen > at[..., None] - window
        out = F.scaled_dot_product_attention(
            query[0][:, places].transpose(0, 1),
            keys[self.rows, :, :end],
            values[self.rows, :, :end],
            attn_mask=mask[:, None],
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        piece_of, offset = self._places
        return out.transpose(1, 2)[piece_of, offset][None]


class SlotDecode:
    """One new token for each of the first `count` rows: attention over the row's own tokens, and its states."""

    def __init__(self, cache: SlotCache, rows: Rows, count: int, states: StateStore | None = None):
        self.cache, self.count, self.states = cache, count, states
        self.alive = torch.from_numpy(rows.alive[:count].nonzero()[0])
        alive, lengths = rows.alive[:count], rows.length[:count]
        first = int(lengths[0]) if count else 0
        self.is_even = bool((lengths == first).all()) or self._is_even_but_for_gaps(rows, count)
        self.width = int(lengths[alive].max()) + 1
        self.positions = torch.full((count,), self.width - 1) if self.is_even else torch.from_numpy(lengths.copy())
        self.slots = torch.arange(count)
        self._masks: dict[int | None, Tensor | None] = {}

    @staticmethod
    def _is_even_but_for_gaps(rows: Rows, count: int) -> bool:
        alive, lengths = rows.alive[:count], rows.length[:count][rows.alive[:count]]
        if (lengths != lengths[0]).any():
            return False
        # A row in the middle of its prefill must not be written to at another row's place.
        return all(rows.sequences[row] is None for row in (~alive).nonzero()[0])

    def _mask(self, window: int | None) -> Tensor | None:
        if window not in self._masks:
            if self.is_even and (window is None or self.width <= window):
                self._masks[window] = None
            else:
                places = torch.arange(self.width)[None]
                mask = places <= self.positions[:, None]
                if window is not None:
                    mask &= places > self.positions[:, None] - window
                self._masks[window] = mask[:, None, None]
        return self._masks[window]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `AttentionContext`."""
        keys, values = (x[: self.count] for x in self.cache.of(layer_idx, key, value))
        if self.is_even:
            keys[:, :, self.width - 1], values[:, :, self.width - 1] = key[:, :, 0], value[:, :, 0]
        else:
            keys[self.slots, :, self.positions] = key[:, :, 0]
            values[self.slots, :, self.positions] = value[:, :, 0]
        count, heads, _, dim = query.shape
        # The query heads that share a key head become rows of one small matrix: no repeated keys.
        folded = query.reshape(count, keys.shape[1], heads // keys.shape[1], dim)
        out = F.scaled_dot_product_attention(
            folded,
            keys[:, :, : self.width],
            values[:, :, : self.width],
            attn_mask=self._mask(sliding_window),
            scale=scaling,
        )
        return out.reshape(count, 1, heads, out.shape[-1])

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """See `RecurrentContext`. A row in the middle of its prefill keeps its state, which the next piece needs."""
        assert self.states is not None
        kept, rows = self.states.of(layer_idx, rule, channels), self.alive
        before = States(*(x[rows] for x in kept))
        out, after = rule.step(channels[rows], decay[rows], rate[rows], before)
        for own, new in zip(kept, after, strict=True):
            own[rows] = new
        return out.new_zeros(self.count, *out.shape[1:]).index_copy_(0, rows, out)


# What layers with a state remember of each running row, beside the keys and values of the layers that attend.
#
# A state is as large after one token as after a thousand, so rows have a place for it and no blocks. It cannot be cut
# into prefixes either: the samples of a prompt get copies of what its prefill leaves behind, and that is all sharing.


def bytes_of_states(hf_model: PreTrainedModel) -> int:
    """Memory that a row's states take over all layers."""
    layers: list[Any] = recurrences(hf_model)
    recent = sum(layer.conv_dim * (layer.conv_kernel_size - 1) for layer in layers) * hf_model.dtype.itemsize
    return recent + sum(layer.num_v_heads * layer.head_k_dim * layer.head_v_dim for layer in layers) * 4


class StateStore:
    """Room for the states of all rows, and of one more for places that nobody takes; made on first use."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device = capacity, device
        self._layers: dict[int, States] = {}

    def of(self, layer: int, rule: DeltaRule, like: Tensor) -> States:
        """Those of a layer, of all rows."""
        if layer not in self._layers:
            small = rule.no_states(0, like)
            shapes = [(self.capacity + 1, *x.shape[1:]) for x in small]
            if self.device.type == "cpu":  # rows that are never taken take no memory
                made = [untouched_zeros(shape, x.dtype) for shape, x in zip(shapes, small, strict=True)]
            else:
                made = [x.new_zeros(shape) for shape, x in zip(shapes, small, strict=True)]
            self._layers[layer] = States(*made)
        return self._layers[layer]

    def move(self, moves: Seq[tuple[int, int]]) -> None:
        """Copies rows (from, to)."""
        source, target = (torch.tensor(side, device=self.device) for side in zip(*moves, strict=True))
        for states in self._layers.values():
            for x in states:
                x[target] = x[source]

    def drop(self) -> None:
        """Gives the memory back."""
        self._layers.clear()


class PieceStates:
    """The recurrence of packed prefill pieces: from where their rows are, to the rows of all who wait for them."""

    def __init__(self, store: StateStore, pieces: Seq[Piece]):
        self.store = store
        rows = [[piece.sequence.row, *(f.row for f in piece.sequence.followers)] for piece in pieces]
        device, starts = store.device, np.array([piece.start for piece in pieces])
        self.goes_on = bool(starts.any())
        self.rows = torch.tensor([own[0] for own in rows]).to(device)
        self.begins = torch.from_numpy(starts == 0).to(device)
        self.takers = torch.tensor([row for own in rows for row in own]).to(device)
        self.piece_of = torch.arange(len(pieces)).repeat_interleave(torch.tensor([len(own) for own in rows])).to(device)

    def recur(
        self, layer: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor, packed: PackedSequences
    ) -> Tensor:
        """See `RecurrentContext`."""
        kept, before = self.store.of(layer, rule, channels), None
        if self.goes_on:
            before = States(*(_emptied(x[self.rows], self.begins) for x in kept))
        out, after = rule.over(channels, decay, rate, packed, before, wants_after=True)
        assert after is not None
        for own, new in zip(kept, after, strict=True):
            own[self.takers] = new[self.piece_of].to(own.dtype)
        return out


def _emptied(x: Tensor, where: Tensor) -> Tensor:
    return x.masked_fill(where.view(-1, *(1,) * (x.ndim - 1)), 0)
