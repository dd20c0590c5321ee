"""What the tests of the sequence-parallel contexts share: attention of a whole row, alone and over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from process_group import ProcessGroups, subgroups
from torch import Tensor

from meshrl.parallel.attention import AttentionContext, PackedSequences
from meshrl.parallel.context_parallel import RingContext
from meshrl.parallel.sequence import SequenceParallel, SequenceShard


class Row(NamedTuple):
    """Attention inputs for a row [tokens, heads, dim], and a weight for every output, so that no two errors cancel."""

    lengths: tuple[int, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    scaling: float = 0.7
    window: int | None = None


def random_row(
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    *,
    dim: int = 6,
    value_dim: int | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Row:
    generator = torch.Generator().manual_seed(sum(lengths))
    value_dim = value_dim or dim
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)]
    parts = [torch.randn((sum(lengths), *shape), generator=generator, dtype=torch.float64) for shape in shapes]
    return Row(lengths, *(part.to(dtype) for part in parts), window=window)


def attend(context: AttentionContext, row: Row, shard: SequenceShard | None = None) -> list[Tensor]:
    """The output and the gradients of query, key and value, each [tokens, heads, dim], of the rank's own tokens."""
    take = shard.take if shard is not None else torch.clone
    inputs = [take(x).requires_grad_() for x in (row.query, row.key, row.value)]
    output = context.attend(0, *(x.transpose(0, 1)[None] for x in inputs), row.scaling, row.window)[0]
    (output * take(row.weights)).sum().backward()
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


def attend_alone(row: Row) -> list[Tensor]:
    """The reference: packed attention over the whole row, which has its own tests against plain loops."""
    return attend(PackedSequences.of(row.lengths, "cpu"), row)


def attend_part(row: Row, cp: int, sp: int, lost_step: int | None = None) -> list[Tensor]:
    """Runs in a rank. With a lost step the ring forgets what it sees at that step (the tests' control)."""
    cp_group, sp_group = subgroups(cp, sp)
    shard = SequenceParallel(sp_group, cp_group).shard(PackedSequences.of(row.lengths, "cpu"))
    if lost_step is not None:
        assert isinstance(shard.context, RingContext)
        shard.context.blocks[lost_step] = None
    return [shard.index, *attend(shard.context, row, shard)]


def attend_on(ranks: ProcessGroups, row: Row, cp: int, sp: int, lost_step: int | None = None) -> list[Tensor]:
    """The same as `attend_alone`, put together from the parts of cp * sp ranks."""
    parts = ranks(cp * sp).run(attend_part, row, cp, sp, lost_step)
    places, *results = (torch.cat(column) for column in zip(*parts, strict=True))
    assert sorted(places.tolist()) == list(range(len(places)))
    return [result[places.argsort()][: sum(row.lengths)] for result in results]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, each tensor measured by its own largest entry (or 0.01, where it is all but zero)."""
    pairs = list(zip(found, wanted, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs)
