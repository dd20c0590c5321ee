"""Packed causal attention that also tells the log-sum-exp of its scores, so that partial results can be merged.

The backward takes the log-sum-exp and the output of the *merged* result: with them the gradients of a part are exact,
although the part saw only some of the keys. Two implementations: plain matrix products in tiles, for any device and
type, and the flash kernels for half types on CUDA.

Shapes here: query [heads, tokens, dim], key and value [kv_heads, tokens, dim], log-sum-exp [heads, tokens].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.parallel.packed import HALF_TYPES, PackedSequences

# Rows of queries whose scores are held at once; the keys after a tile's last query are never multiplied. Larger tiles
# fall out of a CPU's cache (512 rows take twice the time at 3,000 tokens).
TILE_ROWS = 128


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half types are summed up in float32, others in themselves."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def _fits_flash(query: Tensor, value: Tensor) -> bool:
    dim = query.shape[-1]
    return query.is_cuda and query.dtype in HALF_TYPES and value.shape[-1] == dim and dim % 8 == 0 and dim <= 256


def attend_with_lse(
    packed: PackedSequences, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: its output [heads, tokens, dim] and the log-sum-exp."""
    if _fits_flash(query, value):
        return _flash_forward(packed, query, key, value, scaling, window)
    dtype = accumulation_dtype(query.dtype)
    query, key, value = query.to(dtype) * scaling, key.to(dtype), value.to(dtype)
    output = query.new_empty((*query.shape[:2], value.shape[-1]))
    lse = query.new_empty((*query.shape[:2], 1))
    for tile in _tiles(packed, window):
        scores = tile.scores(query, key)
        tile_lse = scores.logsumexp(-1, keepdim=True)
        tile.rows(lse).copy_(tile.unfold(tile_lse))
        tile.rows(output).copy_(tile.unfold(torch.exp(scores - tile_lse) @ tile.columns(value)))
    return output, lse[..., 0]


def attend_with_lse_backward(
    packed: PackedSequences,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given the merged `output` and `lse` and the gradient of the output."""
    if _fits_flash(query, value):
        return _flash_backward(packed, grad_output, query, key, value, output, lse, scaling, window)
    dtype, kv_heads = accumulation_dtype(query.dtype), len(key)
    query, key, value = query.to(dtype) * scaling, key.to(dtype), value.to(dtype)
    grad_output, lse = grad_output.to(dtype), lse[..., None]
    delta = (grad_output * output.to(dtype)).sum(-1, keepdim=True)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for tile in _tiles(packed, window):
        grad, tile_lse, tile_delta = (tile.fold(tile.rows(x), kv_heads) for x in (grad_output, lse, delta))
        weights = torch.exp(tile.scores(query, key) - tile_lse)
        tile.columns(grads[2]).add_(weights.mT @ grad)
        grad_scores = weights * (grad @ tile.columns(value).mT - tile_delta)
        tile.columns(grads[1]).add_(grad_scores.mT @ tile.fold(tile.rows(query), kv_heads))
        tile.rows(grads[0]).copy_(tile.unfold(grad_scores @ tile.columns(key)))
    return grads[0] * scaling, grads[1], grads[2]


@dataclass(frozen=True)
class _Tile:
    """Some queries of each of `count` neighbouring documents of equal length, and the keys they may see."""

    first: int
    count: int
    length: int
    query_slice: slice
    key_slice: slice
    hidden: Tensor

    def _documents(self, x: Tensor) -> Tensor:
        """[heads, tokens, dim] → [heads, count, length, dim], a view."""
        return x[:, self.first : self.first + self.count * self.length].unflatten(1, (self.count, self.length))

    def rows(self, x: Tensor) -> Tensor:
        """The queries' part of [heads, tokens, dim] as [heads, count, rows, dim], a view."""
        return self._documents(x)[:, :, self.query_slice]

    def columns(self, x: Tensor) -> Tensor:
        """The keys' part of [kv_heads, tokens, dim] as [kv_heads, count, columns, dim], a view."""
        return self._documents(x)[:, :, self.key_slice]

    def fold(self, x: Tensor, kv_heads: int) -> Tensor:
        """[heads, count, rows, dim] → [kv_heads, count, group * rows, dim]: heads that share keys become rows."""
        return x.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor) -> Tensor:
        """The way back from `fold`."""
        return x.unflatten(2, (-1, len(self.hidden))).transpose(1, 2).flatten(0, 1)

    def scores(self, scaled_query: Tensor, key: Tensor) -> Tensor:
        """Masked scores [kv_heads, count, group * rows, columns]."""
        scores = self.fold(self.rows(scaled_query), len(key)) @ self.columns(key).mT
        scores.unflatten(2, (-1, len(self.hidden))).masked_fill_(self.hidden, -torch.inf)
        return scores


def _tiles(packed: PackedSequences, window: int | None) -> Iterator[_Tile]:
    for first, count, length in packed.runs:
        for start in range(0, length, TILE_ROWS):
            stop = min(start + TILE_ROWS, length)
            first_key = 0 if window is None else max(0, start - window + 1)
            queries = torch.arange(start, stop, device=packed.device)
            keys = torch.arange(first_key, stop, device=packed.device)
            distance = queries[:, None] - keys
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            yield _Tile(first, count, length, slice(start, stop), slice(first_key, stop), hidden)


def _flash_forward(
    packed: PackedSequences, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(x.transpose(0, 1) for x in (query, key, value)),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
        0.0,
        window is None,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    assert lse.shape == query.shape[:2]
    return output.transpose(0, 1), lse


def _flash_backward(
    packed: PackedSequences,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = torch.ops.aten._flash_attention_backward(
        *(x.transpose(0, 1).contiguous() for x in (grad_output, query, key, value, output)),
        lse.contiguous(),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
        0.0,
        window is None,
        no_dropout_state,
        torch.empty(0, device=query.device),
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads)
    return grad_query, grad_key, grad_value
