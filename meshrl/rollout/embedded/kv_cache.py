"""The KV cache on a CPU, and the recurrent states of running rows on any device.

Each row has one contiguous slot of keys and values. Gathering blocks for every token would cost a fifth of it. Memory
is still counted in blocks. Only blocks that outlive their sequence (cached prefixes) are copied to a pool of blocks.
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
SMALL = 1 << 20  # bytes below which a separate mapping is not worthwhile


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros whose pages take memory only when written, so that one long row does not make all rows long.

    Zeros are needed because attention masks unwritten positions with a weight of zero, and zero times NaN is NaN.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < SMALL:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # With huge pages, the first token of a row would take two megabytes for each head.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class SlotCache:
    """Keys and values `[rows, kv_heads, length, dim]` per layer. Row i holds its first `rows.length[i]` tokens."""

    def __init__(self, num_blocks: int, block_size: int, max_length: int):
        self.num_blocks, self.block_size, self.max_length = num_blocks, block_size, max_length
        self.stores: dict[int, tuple[Tensor, Tensor]] = {}
        self.pool: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = self.room = 0

    def make_room(self, rows: int, length: int) -> None:
        """Grow the slots if needed, by more than needed, so that `rows` rows of `length` tokens fit."""
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
        """Return a layer's slots, created on first use for keys and values of shape `[.., heads, tokens, dim]`."""
        if layer not in self.stores:
            self.stores[layer] = tuple(  # type: ignore[assignment]
                untouched_zeros((self.rows, x.shape[1], self.room, x.shape[3]), x.dtype) for x in (key, value)
            )
        return self.stores[layer]

    def move(self, moves: Seq[tuple[int, int]], length: int) -> None:
        """Copy the first `length` tokens of rows. Each move is a pair (from, to)."""
        source, target = (torch.tensor(side) for side in zip(*moves, strict=True))
        for store in self.stores.values():
            for x in store:
                x[target, :, :length] = x[source, :, :length]

    def load(self, row: int, blocks: Seq[int]) -> None:
        """Copy cached blocks into the beginning of a row."""
        index = torch.tensor(blocks)
        for layer, pools in self.pool.items():
            for x, pool in zip(self.stores[layer], pools, strict=True):
                x[row, :, : len(blocks) * self.block_size] = pool[index].transpose(0, 1).flatten(1, 2)

    def store(self, row: int, blocks: Seq[int], places: Seq[int]) -> None:
        """Copy blocks number `places` of a row to the pool, where they stay when another sequence gets the row."""
        for layer, store in self.stores.items():
            if layer not in self.pool:
                # Allocated without writing, so memory is only taken for blocks that hold a prefix.
                self.pool[layer] = tuple(  # type: ignore[assignment]
                    x.new_empty(self.num_blocks, x.shape[1], self.block_size, x.shape[3]) for x in store
                )
            for x, pool in zip(store, self.pool[layer], strict=True):
                for place in places:
                    start = place * self.block_size
                    pool[blocks[place]] = x[row, :, start : start + self.block_size]


class SlotPrefill:
    """Packed prefill chunks. Keys, values and states are written to the slots of each chunk's row and its followers."""

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
        # Every token is written to its own row. The tokens of a shared prompt are also written to the followers' rows.
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
        """Store keys and values in the slots, then attend; see `AttentionContext` for shapes."""
        keys, values = self.cache.of(layer_idx, key, value)
        positions = self.positions[self.source]
        keys[self.target, :, positions] = key[0].transpose(0, 1)[self.source]
        values[self.target, :, positions] = value[0].transpose(0, 1)[self.source]
        if not self.has_context:
            return self.packed.attend(layer_idx, query, key, value, scaling, sliding_window)
        return self._attend_slots(query, keys, values, scaling, sliding_window)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Advance the recurrent states over the chunks; see `RecurrentContext` for shapes."""
        assert self.states is not None
        return self.states.recur(layer_idx, rule, channels, decay, rate, self.packed)

    def _attend_slots(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attend with chunks that continue earlier ones: queries as a padded rectangle over the slots, with a mask."""
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
    """A decoding step with one token for each of the first `count` rows.

    Each token attends to its row's tokens and updates its row's recurrent states.
    """

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
        # A row in prefill must not be written to at the position of the other rows.
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
        """Store the new keys and values, then attend over each row's slot; see `AttentionContext` for shapes."""
        keys, values = (x[: self.count] for x in self.cache.of(layer_idx, key, value))
        if self.is_even:
            keys[:, :, self.width - 1], values[:, :, self.width - 1] = key[:, :, 0], value[:, :, 0]
        else:
            keys[self.slots, :, self.positions] = key[:, :, 0]
            values[self.slots, :, self.positions] = value[:, :, 0]
        count, heads, _, dim = query.shape
        # The query heads that share a key head become rows of one small matrix, so keys need not be repeated.
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
        """Advance the states of alive rows by one token; see `RecurrentContext` for shapes.

        A row in prefill keeps its state, which its next chunk needs.
        """
        assert self.states is not None
        kept, rows = self.states.of(layer_idx, rule, channels), self.alive
        before = States(*(x[rows] for x in kept))
        out, after = rule.step(channels[rows], decay[rows], rate[rows], before)
        for own, new in zip(kept, after, strict=True):
            own[rows] = new
        return out.new_zeros(self.count, *out.shape[1:]).index_copy_(0, rows, out)


# Recurrent states of running rows, for layers with a state instead of keys and values.
#
# A state has the same size after one token as after a thousand, so it is stored per row and not in blocks. A state
# cannot be split into prefixes either. The only sharing is that all samples of a prompt get copies of the state after
# its prefill.


def bytes_of_states(hf_model: PreTrainedModel) -> int:
    """Return the bytes of a row's recurrent states over all layers."""
    layers: list[Any] = recurrences(hf_model)
    recent = sum(layer.conv_dim * (layer.conv_kernel_size - 1) for layer in layers) * hf_model.dtype.itemsize
    return recent + sum(layer.num_v_heads * layer.head_k_dim * layer.head_v_dim for layer in layers) * 4


class StateStore:
    """The recurrent states of all rows, and of one more row for unused places. Allocated on first use."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device = capacity, device
        self._layers: dict[int, States] = {}

    def of(self, layer: int, rule: DeltaRule, like: Tensor) -> States:
        """Return a layer's states of all rows, allocated on first use."""
        if layer not in self._layers:
            small = rule.no_states(0, like)
            shapes = [(self.capacity + 1, *x.shape[1:]) for x in small]
            if self.device.type == "cpu":  # rows that are never used take no memory
                made = [untouched_zeros(shape, x.dtype) for shape, x in zip(shapes, small, strict=True)]
            else:
                made = [x.new_zeros(shape) for shape, x in zip(shapes, small, strict=True)]
            self._layers[layer] = States(*made)
        return self._layers[layer]

    def move(self, moves: Seq[tuple[int, int]]) -> None:
        """Copy the states of rows in all layers. Each move is a pair (from, to)."""
        source, target = (torch.tensor(side, device=self.device) for side in zip(*moves, strict=True))
        for states in self._layers.values():
            for x in states:
                x[target] = x[source]

    def drop(self) -> None:
        """Free the memory of the states of all layers."""
        self._layers.clear()


class PieceStates:
    """The recurrence over packed prefill chunks, for layers with a recurrent state.

    It starts from the states of the chunks' rows and writes the final states to the rows of all samples of the prompt.
    """

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
        """Advance the states of a layer over the packed chunks; see `RecurrentContext` for shapes."""
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
