"""Context parallelism as Megatron splits it: of every document, rank r holds the r-th chunk from either end.

    a document of 8 tokens, cp = 2, in 2 * cp chunks       0 1 | 2 3 | 4 5 | 6 7
    rank 0                                                 0 1                6 7
    rank 1                                                       2 3   4 5

A causal document then gives every rank the same amount of work. Keys and values are gathered from all ranks, because
each query needs all earlier keys. Queries stay on their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.parallel.attention import HALF_TYPES, PackedSequences, attend_varlen


@dataclass(frozen=True)
class ZigZag:
    """One rank's chunks of a row whose document lengths are all divisible by 2 * size."""

    documents: PackedSequences
    size: int
    rank: int

    def __post_init__(self) -> None:
        if uneven := [n for n in self.documents.lengths if n % (2 * self.size)]:
            raise ValueError(f"a document of {uneven[0]} tokens does not divide into 2 * {self.size} chunks")

    @cached_property
    def index(self) -> Tensor:
        """The indices of this rank's tokens in the row, int64 `[local]`."""
        return self.index_of(self.rank).to(self.documents.device)

    @cached_property
    def order(self) -> Tensor:
        """The index of each token of the row in the concatenation of all ranks' parts, int64 `[tokens]`."""
        parts = torch.cat([self.index_of(rank) for rank in range(self.size)])
        return parts.argsort().to(self.documents.device)

    def index_of(self, rank: int) -> Tensor:
        """Return `index` for any rank, on the host."""
        return torch.cat([torch.arange(first, first + length) for first, length, _, _ in self.pieces_of(rank)])

    def pieces_of(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Return a rank's chunks as (first token, tokens, first key, keys).

        A chunk sees the keys of its document up to the chunk's end.
        """
        pieces, start = [], 0
        for length in self.documents.lengths:
            step = length // (2 * self.size)
            for chunk in (rank, 2 * self.size - 1 - rank):
                pieces.append((start + chunk * step, step, start, (chunk + 1) * step))
            start += length
        return pieces

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """Compute attention of local queries `[local, heads, dim]` to all keys and values `[tokens, heads, dim]`."""
        pieces = self.pieces_of(self.rank)
        if query.is_cuda and query.dtype in HALF_TYPES:
            return self._attend_varlen(pieces, query, key, value, scaling, window)
        outputs, start = [], 0
        for first, length, first_key, keys in pieces:
            mask = self._mask(first - first_key, length, keys, window)
            q, k, v = (
                x[begin : begin + count].transpose(0, 1)
                for x, begin, count in ((query, start, length), (key, first_key, keys), (value, first_key, keys))
            )
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
            outputs.append(out.transpose(0, 1))
            start += length
        return torch.cat(outputs)

    def _mask(self, offset: int, length: int, keys: int, window: int | None) -> Tensor:
        """Return a mask `[length, keys]`: True for keys that the query at `offset + i` of its document may see."""
        device = self.documents.device
        distance = torch.arange(offset, offset + length, device=device)[:, None] - torch.arange(keys, device=device)
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    def _attend_varlen(
        self,
        pieces: Sequence[tuple[int, int, int, int]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Compute all chunks with one kernel call: the last key of each chunk is the chunk's own last token."""
        queries = PackedSequences.of([length for _, length, _, _ in pieces], self.documents.device)
        keys = PackedSequences.of([count for *_, count in pieces], self.documents.device)
        key, value = key[self._key_index], value[self._key_index]
        borders, longest = (queries.cu_seqlens, keys.cu_seqlens), (queries.max_length, keys.max_length)
        return attend_varlen(query, key, value, borders, longest, scaling, window)

    @cached_property
    def _key_index(self) -> Tensor:
        ranges = [torch.arange(first, first + count) for _, _, first, count in self.pieces_of(self.rank)]
        return torch.cat(ranges).to(self.documents.device)
