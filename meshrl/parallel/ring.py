"""Ring attention for context parallelism: keys and values travel round the ranks, queries stay.

A row is striped: rank r of n holds its positions r, r + n, r + 2n, ... A causal row is then as much work for each
rank, whatever its documents, and inside a stripe the documents still lie end to end. At step t a rank attends with its
queries to the keys of the rank t places before it, while these travel on to the next rank; the partial results are
merged by their log-sum-exp. In the backward keys and values go round once more, together with their gradients.

What one stripe sees of another is simple: a query at place a of its stripe sees, within its document, the keys of the
other stripe up to place a, or up to place a - 1 if the other stripe lies after its own. So in each document the queries
that see anything and the keys that are seen form a square with a causal triangle: a `RingBlock` lists these squares as
packed sequences, and a sliding window over the row becomes a narrower one inside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.parallel.collectives import RingTransfer
from meshrl.parallel.delta_rule import DeltaRule
from meshrl.parallel.lse_attention import accumulation_dtype, attend_with_lse, attend_with_lse_backward
from meshrl.parallel.packed import PackedSequences
from meshrl.parallel.ulysses import heads_for_tokens, own_heads

KEY_VALUES, GRADIENTS = 0, 1  # the two kinds of transfer


@dataclass(frozen=True)
class RingBlock:
    """Which queries of one stripe see keys of another: equally many, pairwise, in the documents of `packed`.

    `queries` and `keys` are int64 places in the stripes; None stands for all of them.
    """

    queries: Tensor | None
    keys: Tensor | None
    packed: PackedSequences


def ring_block(row: PackedSequences, size: int, own: int, other: int) -> RingBlock | None:
    """What stripe `own` of `size` sees of stripe `other`; None if nothing."""
    borders = torch.tensor((0, *row.lengths)).cumsum(0)
    own_borders, other_borders = ((borders - stripe + size - 1) // size for stripe in (own, other))
    shift = int(other > own)
    first_query = torch.maximum(own_borders[:-1], other_borders[:-1] + shift)
    lengths = own_borders[1:] - first_query
    seen = lengths > 0
    if not bool(seen.any()):
        return None
    lengths, first_query = lengths[seen], first_query[seen]
    packed = PackedSequences.of(lengths.tolist(), row.device)
    if packed.num_tokens == row.num_tokens // size:
        assert shift == 0  # the first query of a stripe sees nothing of a later one
        return RingBlock(None, None, packed)
    offsets = first_query - (lengths.cumsum(0) - lengths)
    places = (torch.arange(packed.num_tokens) + offsets.repeat_interleave(lengths)).to(row.device)
    return RingBlock(places, places - shift, packed)


def block_window(window: int, size: int, own: int, other: int) -> int:
    """How many keys a sliding window of the row leaves to a query in its square; 0 or less: none."""
    farthest = (window - 1 - own + other) // size
    return farthest - int(other > own) + 1


@dataclass  # not frozen, see AttentionContext
class RingContext:
    """Attention over the stripes of a row (`row.num_tokens` divisible by the group's size) on the ranks of `group`."""

    row: PackedSequences
    group: dist.ProcessGroup

    @cached_property
    def blocks(self) -> list[RingBlock | None]:
        """What this rank's stripe sees at each step of the ring."""
        size, own = dist.get_world_size(self.group), dist.get_rank(self.group)
        return [ring_block(self.row, size, own, (own - step) % size) for step in range(size)]

    def steps(self, window: int | None) -> list[tuple[RingBlock, int | None] | None]:
        """For each step of the ring the block and its sliding window; None where nothing is seen."""
        if window is None:
            return [None if block is None else (block, None) for block in self.blocks]
        size, own = dist.get_world_size(self.group), dist.get_rank(self.group)
        windows = [block_window(window, size, own, (own - step) % size) for step in range(size)]
        return [
            None if block is None or narrow < 1 else (block, narrow)
            for block, narrow in zip(self.blocks, windows, strict=True)
        ]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention of the own stripe's queries; see `AttentionContext`."""
        steps = self.steps(sliding_window)
        return _RingAttention.apply(query[0], key[0], value[0], steps, scaling, self.group)[None]

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """A state cannot be passed round stripes: ranks trade tokens for heads instead; see `RecurrentContext`."""
        size = dist.get_world_size(self.group)
        rule, *stripes = own_heads(rule, channels, decay, rate, self.group)
        # Stripe after stripe becomes the row, and the row stripe after stripe.
        row = (x.unflatten(0, (size, -1)).transpose(0, 1).flatten(0, 1) for x in stripes)
        out = self.row.recur(layer_idx, rule, *row)
        striped = out.unflatten(0, (-1, size)).transpose(0, 1).flatten(0, 1)
        return heads_for_tokens(striped[None], self.group)[0]


class _RingAttention(torch.autograd.Function):
    """[heads, tokens, dim] in, [tokens, heads, dim] out."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        steps: list[tuple[RingBlock, int | None] | None],
        scaling: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        merged = _Merged(query, value.shape[-1])
        key_values = _join(key, value)
        for index, step in enumerate(steps):
            transfer = RingTransfer(key_values, group, KEY_VALUES) if index + 1 < len(steps) else None
            if step is not None:
                block, window = step
                k, v = _split(key_values, key, value)
                parts = _pick(query, block.queries), _pick(k, block.keys), _pick(v, block.keys)
                merged.add(block.queries, *attend_with_lse(block.packed, *parts, scaling, window))
            if transfer is not None:
                key_values = transfer.wait()
        output = merged.output.to(query.dtype).transpose(0, 1).contiguous()
        ctx.save_for_backward(query, key, value, output, merged.lse)
        ctx.steps, ctx.scaling, ctx.group = steps, scaling, group
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        output, grad_output = output.transpose(0, 1), grads[0].transpose(0, 1)
        dtype = accumulation_dtype(query.dtype)
        grad_query = torch.zeros_like(query, dtype=dtype)
        key_values = _join(key, value)
        travelling: RingTransfer | None = None
        for index, step in enumerate(ctx.steps):
            transfer = RingTransfer(key_values, ctx.group, KEY_VALUES) if index + 1 < len(ctx.steps) else None
            gradients = torch.zeros_like(key_values, dtype=dtype)
            if step is not None:
                block, window = step
                k, v = _split(key_values, key, value)
                grad_k, grad_v = _split(gradients, key, value)
                queries = [_pick(x, block.queries) for x in (grad_output, query, output, lse)]
                parts = queries[0], queries[1], _pick(k, block.keys), _pick(v, block.keys), queries[2], queries[3]
                found = attend_with_lse_backward(block.packed, *parts, ctx.scaling, window)
                places = block.queries, block.keys, block.keys
                for total, place, found_part in zip((grad_query, grad_k, grad_v), places, found, strict=True):
                    _add_at(total, place, found_part)
            # The sum for these keys comes from the rank that had them before, and goes the way they go.
            if travelling is not None:
                gradients += travelling.wait()
            travelling = RingTransfer(gradients, ctx.group, GRADIENTS)
            if transfer is not None:
                key_values = transfer.wait()
        assert travelling is not None
        grad_key, grad_value = _split(travelling.wait(), key, value)  # the last hop brings them home
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


class _Merged:
    """Partial outputs put together: each weighs as much as the keys it saw."""

    def __init__(self, query: Tensor, value_dim: int):
        dtype = accumulation_dtype(query.dtype)
        self.output = query.new_zeros((*query.shape[:2], value_dim), dtype=dtype)
        self.lse = query.new_full(query.shape[:2], -torch.inf, dtype=dtype)

    def add(self, places: Tensor | None, output: Tensor, lse: Tensor) -> None:
        """Takes in what the queries at `places` saw; the log-sum-exp of each of them must be finite."""
        before = _pick(self.lse, places)
        total = torch.logaddexp(before, lse)
        kept, new = (torch.exp(part - total)[..., None] for part in (before, lse))
        merged = _pick(self.output, places) * kept + output * new
        if places is None:
            self.output, self.lse = merged, total
        else:
            self.output.index_copy_(1, places, merged)
            self.lse.index_copy_(1, places, total)


def _pick(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(1, places)


def _add_at(total: Tensor, places: Tensor | None, part: Tensor) -> None:
    if places is None:
        total += part
    else:
        total.index_add_(1, places, part.to(total.dtype))


def _join(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one flat tensor: one message instead of two."""
    return torch.cat([key.flatten(), value.flatten()])


def _split(joined: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The way back from `_join`, as views with the shapes of `key` and `value`."""
    return joined[: key.numel()].view(key.shape), joined[key.numel() :].view(value.shape)
