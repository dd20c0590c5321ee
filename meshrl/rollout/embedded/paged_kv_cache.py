"""The KV cache on a GPU: blocks in two pools, found through a block table, written and read in place."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.models.fp8 import FP8
from meshrl.parallel.attention import HALF_TYPES, PackedSequences, attend_varlen
from meshrl.parallel.linear_attention import DeltaRule
from meshrl.rollout.embedded.delta_kernel import recur_rows
from meshrl.rollout.embedded.kernels import NO_WINDOW, Pools, Turning, paged_decode, store, stored
from meshrl.rollout.embedded.kv_cache import PieceStates, StateStore
from meshrl.rollout.embedded.scheduler import Piece

LEAST_BLOCK = 16  # tokens: the smallest block that the kernels' matmuls accept


class PagedCache:
    """Pools `[layers, blocks, kv_heads, block_size, dim]` of keys and values. One more block takes unused tokens.

    FP8 pools have pools of scales in addition.
    """

    def __init__(
        self, num_blocks: int, block_size: int, layers: int, kv_heads: int, dim: int, dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        if block_size < LEAST_BLOCK or block_size & (block_size - 1):
            raise ValueError(f"on a GPU block_size ({block_size}) must be a power of two, at least {LEAST_BLOCK}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._shape, self._options = (layers, num_blocks + 1, kv_heads, block_size, dim), (dtype, device)
        self._pools: Pools | None = None
        self.place_of = {layer: layer for layer in range(layers)}  # index in the pools of each of the model's layers

    @property
    def trash(self) -> int:
        """A slot that is written for unused tokens and never read."""
        return self.num_blocks * self.block_size

    def of(self, layer: int) -> Pools:
        """Return the pools of one of the model's layers."""
        pools, layer = self.pools(), self.place_of[layer]
        scales = None if pools.scales is None else (pools.scales[0][layer], pools.scales[1][layer])
        return Pools(pools.keys[layer], pools.values[layer], scales)

    def pools(self) -> Pools:
        """Return all pools, allocated on first use as zeros.

        Uninitialised memory may hold NaN, which a mask does not remove.
        """
        if self._pools is None:
            dtype, device = self._options

            def both(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
                return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

            keys, values = both(self._shape, dtype)
            scales = both(self._shape[:-1], torch.float32) if dtype == FP8 else None
            self._pools = Pools(keys, values, scales)
        return self._pools

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy whole blocks of keys, values and scales from `sources` to `targets` in all layers."""
        index = torch.tensor([sources, targets]).pin_memory().to(self._options[1], non_blocking=True)
        pools = self.pools()
        for pool in (pools.keys, pools.values, *(pools.scales or ())):
            bits = pool.view(torch.uint8) if pool.dtype == FP8 else pool
            bits[:, index[1]] = bits[:, index[0]]

    def drop(self) -> None:
        """Free the memory of the pools of all layers."""
        self._pools = None


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device through pinned memory, so that the host does not wait."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


class PagedPrefill:
    """Packed prefill chunks: attention over the blocks of their sequences, and recurrent states."""

    def __init__(self, cache: PagedCache, pieces: Seq[Piece], device: torch.device, states: PieceStates | None = None):
        self.cache, self.states = cache, states
        self.packed = PackedSequences.of([len(piece.tokens) for piece in pieces], device).ready()
        self.has_context = any(piece.start for piece in pieces)
        places = [np.arange(piece.start, piece.end) for piece in pieces]
        tables = [np.array(piece.sequence.blocks) for piece in pieces]
        self.positions = send(np.concatenate(places), device)
        self.slots = send(np.concatenate([self._slots(t, p) for t, p in zip(tables, places, strict=True)]), device)
        if self.has_context:
            ends = [piece.end for piece in pieces]
            whole = [self._slots(t, np.arange(end)) for t, end in zip(tables, ends, strict=True)]
            self.context = send(np.concatenate(whole), device)
            self.cu_context = send(np.cumsum([0, *ends], dtype=np.int32), device)
            self.longest = max(ends)
            self.pieces = [(len(piece.tokens), piece.end) for piece in pieces]

    def _slots(self, table: np.ndarray, places: np.ndarray) -> np.ndarray:
        size = self.cache.block_size
        return table[places // size] * size + places % size

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Store keys and values in the pools, then attend; see `AttentionContext` for shapes."""
        store(key[0].transpose(0, 1), value[0].transpose(0, 1), self.cache.of(layer_idx), self.slots)
        return self.attend_stored(layer_idx, query, key, value, scaling, sliding_window)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Advance the recurrent states over the chunks; see `RecurrentContext` for shapes."""
        assert self.states is not None
        return self.states.recur(layer_idx, rule, channels, decay, rate, self.packed)

    def attend_stored(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attend with keys and values that are in the pools already; see `AttentionContext` for shapes."""
        if not self.has_context:
            return self.packed.attend(layer_idx, query, key, value, scaling, sliding_window)
        key, value = stored(self.cache.of(layer_idx), self.context, query.dtype)
        if query.dtype not in HALF_TYPES:
            return self._attend_pieces(query, key, value, scaling, sliding_window)
        # The window is counted from the end of the keys, where the queries are.
        borders, longest = (self.packed.cu_seqlens, self.cu_context), (self.packed.max_length, self.longest)
        return attend_varlen(query[0].transpose(0, 1), key, value, borders, longest, scaling, sliding_window)[None]

    def _attend_pieces(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attend with one call per chunk, for dtypes that the fast kernels do not support."""
        outputs, first, begin = [], 0, 0
        for count, end in self.pieces:
            at = torch.arange(end - count, end, device=query.device)[:, None]
            seen = torch.arange(end, device=query.device)[None]
            mask = seen <= at
            if window is not None:
                mask &= seen > at - window
            out = F.scaled_dot_product_attention(
                query[:, :, first : first + count],
                key[begin : begin + end].transpose(0, 1)[None],
                value[begin : begin + end].transpose(0, 1)[None],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(out.transpose(1, 2))
            first, begin = first + count, begin + end
        return torch.cat(outputs, 1)


class PagedDecode:
    """A decoding step with one token per row. It reads only tensors at fixed addresses, as a CUDA graph requires."""

    def __init__(
        self, cache: PagedCache, table: Tensor, order: Tensor, positions: Tensor, slots: Tensor,
        states: StateStore | None = None,
    ):  # fmt: skip
        self.cache, self.table, self.order, self.positions, self.slots = cache, table, order, positions, slots
        self.states = states

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Advance the states of the rows by one token; see `RecurrentContext` for shapes."""
        assert self.states is not None
        return recur_rows(rule, channels, decay, rate, self.states.of(layer_idx, rule, channels), self.order)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Store the new keys and values, then attend over each row's blocks; see `AttentionContext` for shapes."""
        store(key[:, :, 0], value[:, :, 0], self.cache.of(layer_idx), self.slots)
        query = query[:, :, 0] if query.stride(1) == query.shape[3] else query[:, :, 0].contiguous()
        return self._decode(layer_idx, query, scaling, sliding_window, None)[:, None]

    def attend_raw(
        self, layer_idx: int, query: Tensor, turning: Turning, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attend with queries `[rows, heads, dim]` that are not rotated yet.

        The queries are followed in memory by keys and values.
        """
        return self._decode(layer_idx, query, scaling, sliding_window, (turning, self.slots))

    def _decode(
        self, layer_idx: int, query: Tensor, scaling: float, window: int | None, raw: tuple[Turning, Tensor] | None
    ) -> Tensor:
        where = self.table, self.order, self.positions
        return paged_decode(query, self.cache.of(layer_idx), *where, scaling, window or NO_WINDOW, raw)
