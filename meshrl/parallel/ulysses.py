"""Ulysses sequence parallelism: ranks that hold parts of a row trade tokens for heads around each attention.

    [own tokens, all heads] ── all-to-all ──► [all tokens, own heads] ── attention ──► all-to-all back

Attention itself is left to an inner context, which sees the whole row (or a whole stripe of it) with a share of the
heads. Layers that carry a state go the same way (`own_heads`): a state needs every token, but only its own head's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.parallel.attention import AttentionContext
from meshrl.parallel.collectives import exchange_blocks
from meshrl.parallel.delta_rule import DeltaRule
from meshrl.parallel.recurrence import RecurrentContext


@dataclass  # not frozen, see AttentionContext
class UlyssesContext:
    """Attention over a row whose equal contiguous parts lie on the ranks of `group`, in their order."""

    inner: AttentionContext
    group: dist.ProcessGroup

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention of the own tokens; see `AttentionContext`."""
        size = dist.get_world_size(self.group)
        check_heads(query.shape[1], size)
        copies = kv_copies(key.shape[1], size)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        query, key, value = tokens_for_heads([query, key, value], self.group)
        mixed = self.inner.attend(layer_idx, query, key, value, scaling, sliding_window)
        return heads_for_tokens(mixed, self.group)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """The states' outputs of the own tokens; see `RecurrentContext`."""
        inner = cast(RecurrentContext, self.inner)
        rule, channels, decay, rate = own_heads(rule, channels, decay, rate, self.group)
        return heads_for_tokens(inner.recur(layer_idx, rule, channels, decay, rate)[None], self.group)[0]


def own_heads(
    rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor, group: dist.ProcessGroup
) -> tuple[DeltaRule, Tensor, Tensor, Tensor]:
    """From own tokens of all heads to all tokens of own heads, rank after rank, with the rule of these heads."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    check_value_heads(rule.value_heads, size)
    copies = kv_copies(rule.key_heads, size)
    query, key, value = (x.transpose(0, 1)[None] for x in rule.heads_of(channels))
    if copies > 1:
        query, key = (x.repeat_interleave(copies, dim=1) for x in (query, key))
    parts = [x[0].transpose(0, 1).flatten(1) for x in tokens_for_heads([query, key, value], group)]
    # Float32 whatever the channels are, so they travel by themselves.
    gates = tokens_for_heads([x.t().float()[None, ..., None] for x in (decay, rate)], group)
    decay, rate = (x[0, ..., 0].t() for x in gates)
    filters = [x.unflatten(0, (-1, rows)) for x, rows in _filters(rule)]
    own = [
        x.repeat_interleave(n, 0).chunk(size)[rank].flatten(0, 1)
        for x, n in zip(filters, (copies, copies, 1), strict=True)
    ]
    heads = rule.key_heads * copies // size, rule.value_heads // size
    return DeltaRule(torch.cat(own), *heads, rule.key_dim, rule.value_dim), torch.cat(parts, 1), decay, rate


def _filters(rule: DeltaRule) -> list[tuple[Tensor, int]]:
    """The convolution's rows of queries, keys and values, and how many of them a head has."""
    dims = rule.key_dim, rule.key_dim, rule.value_dim
    return list(zip(rule.conv.split(rule.sizes), dims, strict=True))


def check_value_heads(heads: int, size: int) -> None:
    """Refuses a number of heads with a state that cannot be shared equally."""
    if heads % size:
        raise ValueError(
            f"{heads} heads of the model's linear attention cannot be shared by {size} ranks: linear_num_value_heads "
            "must be divisible by ulysses_sequence_parallel_size * context_parallel_size"
        )


def check_heads(heads: int, size: int) -> None:
    """Refuses a number of query heads that cannot be shared equally."""
    if heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"the model's attention heads ({heads}) must be divisible by ulysses_sequence_parallel_size ({size}): set "
            f"ulysses_sequence_parallel_size to one of {fitting}"
        )


def kv_copies(kv_heads: int, size: int) -> int:
    """How often each key/value head is repeated so that every rank gets as many, next to the query heads it serves.

    Query heads are divisible by `kv_heads` and by `size`, so by the least common multiple of the two as well.
    """
    return size // math.gcd(kv_heads, size)


def tokens_for_heads(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """From own tokens of all heads to all tokens of own heads, for several [1, heads, tokens, dim] in one exchange."""
    size = dist.get_world_size(group)
    split = [part[0].unflatten(0, (size, -1)) for part in parts]  # [rank, its heads, own tokens, dim]
    received = exchange_blocks(torch.cat([part.flatten(1) for part in split], dim=1), group)
    pieces = received.split([part[0].numel() for part in split], dim=1)
    # Each piece is [rank, own heads, its tokens, dim]: the tokens of all ranks follow each other.
    return [
        piece.unflatten(1, part.shape[1:]).transpose(0, 1).flatten(1, 2)[None]
        for piece, part in zip(pieces, split, strict=True)
    ]


def heads_for_tokens(mixed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: from [1, all tokens, own heads, dim] to [1, own tokens, all heads, dim]."""
    size = dist.get_world_size(group)
    received = exchange_blocks(mixed[0].unflatten(0, (size, -1)), group)  # [rank, own tokens, its heads, dim]
    return received.transpose(0, 1).flatten(1, 2)[None]
