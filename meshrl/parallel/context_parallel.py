"""Context and sequence parallelism: ring attention, Ulysses attention, and the collectives that both are built from.

- `RingContext`, `RingBlock`: ring attention (the `cp` axis); its design is described below.
- `attend_with_lse`, `attend_with_lse_backward`: packed causal attention that also returns its log-sum-exp.
- `UlyssesContext`: attention behind an all-to-all that trades tokens for heads (the `sp` axis).
- `exchange_blocks`, `gather_blocks`, `RingTransfer`: the collectives.

In ring attention keys and values travel round the ranks, while queries stay. A row is striped: rank r of n holds the
positions r, r + n, r + 2n, ... of the row. A causal row then gives each rank the same amount of work, whatever its
documents. Inside a stripe the documents still lie end to end. At step t a rank attends with its queries to the keys of
the rank t places before it. At the same time it sends these keys to the next rank. The partial results are merged by
their log-sum-exp. In the backward pass, keys and values go round once more, together with their gradients.

The causal mask between two stripes is simple. A query at index a of its stripe sees the keys of another stripe up to
index a, within its document. If the other stripe comes later in the row, it sees the keys up to index a - 1. So in each
document the queries that see any key and the keys that are seen form a square with a causal triangle. A `RingBlock`
lists these squares as packed sequences. A sliding window over the row becomes a narrower window inside the squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.parallel.attention import HALF_TYPES, AttentionContext, PackedSequences
from meshrl.parallel.linear_attention import DeltaRule, RecurrentContext

KEY_VALUES, GRADIENTS = 0, 1  # the two kinds of transfer


@dataclass(frozen=True)
class RingBlock:
    """The queries of one stripe that see keys of another stripe, and these keys.

    Both are equally many and correspond pairwise within the documents of `packed`. `queries` and `keys` are int64
    indices into the stripes. None stands for the whole stripe.
    """

    queries: Tensor | None
    keys: Tensor | None
    packed: PackedSequences


def ring_block(row: PackedSequences, size: int, own: int, other: int) -> RingBlock | None:
    """Return which keys of stripe `other` the queries of stripe `own` see, of `size` stripes in all; None if none."""
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
        assert shift == 0  # the first query of a stripe sees no key of a later stripe
        return RingBlock(None, None, packed)
    offsets = first_query - (lengths.cumsum(0) - lengths)
    places = (torch.arange(packed.num_tokens) + offsets.repeat_interleave(lengths)).to(row.device)
    return RingBlock(places, places - shift, packed)


def block_window(window: int, size: int, own: int, other: int) -> int:
    """Return how many keys a sliding window over the row leaves to a query in its square; 0 or less means none."""
    farthest = (window - 1 - own + other) // size
    return farthest - int(other > own) + 1


@dataclass  # not frozen, see AttentionContext
class RingContext:
    """The attention context for a row striped over the ranks of `group`.

    `row.num_tokens` must be divisible by the group's size.
    """

    row: PackedSequences
    group: dist.ProcessGroup

    @cached_property
    def blocks(self) -> list[RingBlock | None]:
        """The block that this rank's stripe sees at each step of the ring."""
        size, own = dist.get_world_size(self.group), dist.get_rank(self.group)
        return [ring_block(self.row, size, own, (own - step) % size) for step in range(size)]

    def steps(self, window: int | None) -> list[tuple[RingBlock, int | None] | None]:
        """Return the block and its sliding window for each step of the ring; None for a step that sees no key."""
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
        """Compute attention for this rank's stripe of queries; see `AttentionContext`."""
        steps = self.steps(sliding_window)
        return _RingAttention.apply(query[0], key[0], value[0], steps, scaling, self.group)[None]

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Run a recurrent layer over the row; see `RecurrentContext`.

        A recurrent state cannot be passed between stripes, so the ranks trade tokens for heads instead, as Ulysses
        does.
        """
        size = dist.get_world_size(self.group)
        rule, *stripes = own_heads(rule, channels, decay, rate, self.group)
        # Interleave the stripes into the row for the recurrence, and split the row into stripes again after it.
        row = (x.unflatten(0, (size, -1)).transpose(0, 1).flatten(0, 1) for x in stripes)
        out = self.row.recur(layer_idx, rule, *row)
        striped = out.unflatten(0, (-1, size)).transpose(0, 1).flatten(0, 1)
        return heads_for_tokens(striped[None], self.group)[0]


class _RingAttention(torch.autograd.Function):
    """Ring attention with a backward pass: inputs are `[heads, tokens, dim]`, the output is `[tokens, heads, dim]`."""

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
            # The gradient sum of these keys arrives from the rank that held the keys before, and travels on with them.
            if travelling is not None:
                gradients += travelling.wait()
            travelling = RingTransfer(gradients, ctx.group, GRADIENTS)
            if transfer is not None:
                key_values = transfer.wait()
        assert travelling is not None
        grad_key, grad_value = _split(travelling.wait(), key, value)  # the last hop returns them to their owner
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


class _Merged:
    """The running merge of partial attention outputs, each weighted by the softmax mass of the keys it saw."""

    def __init__(self, query: Tensor, value_dim: int):
        dtype = accumulation_dtype(query.dtype)
        self.output = query.new_zeros((*query.shape[:2], value_dim), dtype=dtype)
        self.lse = query.new_full(query.shape[:2], -torch.inf, dtype=dtype)

    def add(self, places: Tensor | None, output: Tensor, lse: Tensor) -> None:
        """Merge in the partial output of the queries at `places`; each of their log-sum-exps must be finite."""
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
    """Concatenate keys and values into one flat tensor, so that one message carries both."""
    return torch.cat([key.flatten(), value.flatten()])


def _split(joined: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `_join`: return views with the shapes of `key` and `value`."""
    return joined[: key.numel()].view(key.shape), joined[key.numel() :].view(value.shape)


# Packed causal attention that also returns the log-sum-exp of its scores, so that partial results can be merged.
#
# The backward takes the log-sum-exp and the output of the *merged* result. They make the gradients of a part exact,
# although the part saw only some of the keys. There are two implementations: matrix products in tiles, for any device
# and type, and the flash kernels for half types on CUDA.
#
# Shapes here: query [heads, tokens, dim], key and value [kv_heads, tokens, dim], log-sum-exp [heads, tokens].

# Query rows whose scores are held at once. Keys after a tile's last query are never multiplied. Larger tiles exceed a
# CPU's cache (512 rows take twice the time at 3,000 tokens).
TILE_ROWS = 128


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in: float32 for half types, otherwise the type itself."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def _fits_flash(query: Tensor, value: Tensor) -> bool:
    dim = query.shape[-1]
    return query.is_cuda and query.dtype in HALF_TYPES and value.shape[-1] == dim and dim % 8 == 0 and dim <= 256


def attend_with_lse(
    packed: PackedSequences, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each document of a packed row.

    Returns the output `[heads, tokens, dim]` and the log-sum-exp of the scores `[heads, tokens]`.
    """
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
    """Compute the gradients of query, key and value from the merged `output` and `lse` and the output's gradient."""
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
    """Some queries of `count` neighbouring documents of equal length, and the keys that these queries may see."""

    first: int
    count: int
    length: int
    query_slice: slice
    key_slice: slice
    hidden: Tensor

    def _documents(self, x: Tensor) -> Tensor:
        """Return a view of `[heads, tokens, dim]` as `[heads, count, length, dim]`."""
        return x[:, self.first : self.first + self.count * self.length].unflatten(1, (self.count, self.length))

    def rows(self, x: Tensor) -> Tensor:
        """Return the queries of this tile from `[heads, tokens, dim]` as a view `[heads, count, rows, dim]`."""
        return self._documents(x)[:, :, self.query_slice]

    def columns(self, x: Tensor) -> Tensor:
        """Return the keys of this tile from `[kv_heads, tokens, dim]` as a view `[kv_heads, count, columns, dim]`."""
        return self._documents(x)[:, :, self.key_slice]

    def fold(self, x: Tensor, kv_heads: int) -> Tensor:
        """Reshape `[heads, count, rows, dim]` to `[kv_heads, count, group * rows, dim]`.

        Query heads that share a key head become additional rows.
        """
        return x.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor) -> Tensor:
        """Undo `fold`: reshape `[kv_heads, count, group * rows, dim]` to `[heads, count, rows, dim]`."""
        return x.unflatten(2, (-1, len(self.hidden))).transpose(1, 2).flatten(0, 1)

    def scores(self, scaled_query: Tensor, key: Tensor) -> Tensor:
        """Return the masked scores `[kv_heads, count, group * rows, columns]`."""
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


# Ulysses sequence parallelism: ranks that hold parts of a row trade tokens for heads before and after each attention.
#
#     [own tokens, all heads] ── all-to-all ──► [all tokens, own heads] ── attention ──► all-to-all back
#
# An inner context computes the attention itself. It sees the whole row (or a whole stripe of it) with a share of the
# heads. Recurrent layers do the same (`own_heads`), because a head's state needs every token but no other head.


@dataclass  # not frozen, see AttentionContext
class UlyssesContext:
    """The attention context for a row whose equal contiguous parts lie on the ranks of `group`, in rank order."""

    inner: AttentionContext
    group: dist.ProcessGroup

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Compute attention for this rank's tokens; see `AttentionContext`."""
        size = dist.get_world_size(self.group)
        check_heads(query.shape[1], size)
        copies = kv_copies(key.shape[1], size)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        query, key, value = tokens_for_heads([query, key, value], self.group)
        mixed = self.inner.attend(layer_idx, query, key, value, scaling, sliding_window)
        return heads_for_tokens(mixed, self.group)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Compute a recurrent layer's outputs for this rank's tokens; see `RecurrentContext`."""
        inner = cast(RecurrentContext, self.inner)
        rule, channels, decay, rate = own_heads(rule, channels, decay, rate, self.group)
        return heads_for_tokens(inner.recur(layer_idx, rule, channels, decay, rate)[None], self.group)[0]


def own_heads(
    rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor, group: dist.ProcessGroup
) -> tuple[DeltaRule, Tensor, Tensor, Tensor]:
    """Trade this rank's tokens of all heads for all tokens of this rank's heads.

    Tokens of different ranks follow each other in rank order. The rule that is returned covers this rank's heads only.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    check_value_heads(rule.value_heads, size)
    copies = kv_copies(rule.key_heads, size)
    query, key, value = (x.transpose(0, 1)[None] for x in rule.heads_of(channels))
    if copies > 1:
        query, key = (x.repeat_interleave(copies, dim=1) for x in (query, key))
    parts = [x[0].transpose(0, 1).flatten(1) for x in tokens_for_heads([query, key, value], group)]
    # Decay and rate are float32 whatever the channels' type is, so they need an exchange of their own.
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
    """Return the convolution's rows for queries, keys and values, each with the number of rows per head."""
    dims = rule.key_dim, rule.key_dim, rule.value_dim
    return list(zip(rule.conv.split(rule.sizes), dims, strict=True))


def check_value_heads(heads: int, size: int) -> None:
    """Raise a `ValueError` if the value heads of linear attention cannot be divided evenly among the ranks."""
    if heads % size:
        raise ValueError(
            f"{heads} heads of the model's linear attention cannot be shared by {size} ranks: linear_num_value_heads "
            "must be divisible by ulysses_sequence_parallel_size * context_parallel_size"
        )


def check_heads(heads: int, size: int) -> None:
    """Raise a `ValueError` if the query heads cannot be divided evenly among the ranks."""
    if heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"the model's attention heads ({heads}) must be divisible by ulysses_sequence_parallel_size ({size}): set "
            f"ulysses_sequence_parallel_size to one of {fitting}"
        )


def kv_copies(kv_heads: int, size: int) -> int:
    """Return how often each key/value head is repeated, so that every rank gets equally many.

    Each copy lies next to the query heads that it serves. Query heads are divisible by `kv_heads` and by `size`, so
    they are also divisible by the least common multiple of the two.
    """
    return size // math.gcd(kv_heads, size)


def tokens_for_heads(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Trade this rank's tokens of all heads for all tokens of this rank's heads.

    `parts` are several tensors `[1, heads, tokens, dim]`, exchanged in a single all-to-all.
    """
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
    """Undo `tokens_for_heads`: turn `[1, all tokens, own heads, dim]` into `[1, own tokens, all heads, dim]`."""
    size = dist.get_world_size(group)
    received = exchange_blocks(mixed[0].unflatten(0, (size, -1)), group)  # [rank, own tokens, its heads, dim]
    return received.transpose(0, 1).flatten(1, 2)[None]


# The collectives that the sequence-parallel contexts are built from: all-to-all, all-gather and ring shift.


class _ExchangeBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Block i went to rank i and its gradient comes back from there: the exchange is its own transpose.
        return _ExchangeBlocks.apply(grads[0], ctx.group), None


def exchange_blocks(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Run an all-to-all: `blocks[i]` goes to rank i of the group, and `result[i]` comes from rank i.

    Differentiable. The first dim of `blocks` has one entry per rank of the group.
    """
    return _ExchangeBlocks.apply(blocks, group)


def gather_blocks(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the equally shaped `block` of every rank, stacked in a new first dim. Not differentiable."""
    gathered = block.new_empty((dist.get_world_size(group), *block.shape))
    dist.all_gather(list(gathered.unbind(0)), block.contiguous(), group=group)
    return gathered


class RingTransfer:
    """A ring shift in flight: `outgoing` is sent to the next rank, and an equal shape is received from the previous
    rank.

    The transfer overlaps with computation until `wait`. `outgoing` must not be written to before `wait`. Every rank
    must start transfers of one kind in the same order. Transfers of another kind need another `tag`.
    """

    def __init__(self, outgoing: Tensor, group: dist.ProcessGroup, tag: int = 0):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        following = dist.get_global_rank(group, (rank + 1) % size)
        previous = dist.get_global_rank(group, (rank - 1) % size)
        self._outgoing = outgoing.contiguous()
        self._incoming = torch.empty_like(self._outgoing)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._outgoing, following, group, tag),
                dist.P2POp(dist.irecv, self._incoming, previous, group, tag),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor received from the previous rank."""
        for work in self._works:
            work.wait()
        return self._incoming
