"""Sequence parallelism: the tokens of one packed row over the ranks of a `cp` × `sp` group.

    row, padded          0  1  2  3  4  5  6  7  8  9 10 11      cp = 2, sp = 2
    cp rank 0            0     2     4     6     8    10         a stripe (RingContext)
      sp rank 0 / 1      0     2     4  |  6     8    10         equal parts of the stripe (UlyssesContext)
    cp rank 1               1     3     5     7     9    11
      sp rank 0 / 1         1     3     5  |  7     9    11

Every rank of the group is given the same row. It runs the model on its own tokens only, with the positions and the
attention context of its `SequenceShard`, and gathers the numbers it computed for them (log-probs, values) into the
whole row, so that the loss is computed, on every rank alike, by code that knows nothing of all this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshrl.parallel.attention import AttentionContext, PackedSequences
from meshrl.parallel.context_parallel import RingContext, UlyssesContext, gather_blocks


class SequenceParallel:
    """Splits packed rows over an `sp` group (Ulysses) and a `cp` group (ring); None or one rank: not split."""

    def __init__(self, sp_group: dist.ProcessGroup | None, cp_group: dist.ProcessGroup | None):
        self.sp_group, self.sp_size, self.sp_rank = _place(sp_group)
        self.cp_group, self.cp_size, self.cp_rank = _place(cp_group)

    @property
    def size(self) -> int:
        """Over how many ranks a row is split."""
        return self.sp_size * self.cp_size

    def shard(self, packed: PackedSequences) -> SequenceShard:
        """This rank's tokens of a row, which must be the same on all ranks of the group."""
        return SequenceShard(packed, self)


@dataclass(frozen=True)
class SequenceShard:
    """One rank's tokens of a packed row: which they are, how they attend, and the way back to the whole row."""

    packed: PackedSequences
    parallel: SequenceParallel

    @cached_property
    def padded(self) -> PackedSequences:
        """The row with one more document at its end that fills it up to a multiple of the group's size."""
        missing = -self.packed.num_tokens % self.parallel.size
        if not missing:
            return self.packed
        return PackedSequences.of((*self.packed.lengths, missing), self.packed.device)

    @property
    def padded_length(self) -> int:
        return self.padded.num_tokens

    @property
    def local_length(self) -> int:
        """How many tokens this and every other rank of the group holds."""
        return self.padded_length // self.parallel.size

    @cached_property
    def index(self) -> Tensor:
        """The places of this rank's tokens in the padded row, int64 [local], in the order the rank holds them."""
        first = self.parallel.sp_rank * self.local_length
        places = torch.arange(first, first + self.local_length, device=self.packed.device)
        return places * self.parallel.cp_size + self.parallel.cp_rank

    @cached_property
    def position_ids(self) -> Tensor:
        """The positions of this rank's tokens in their documents, int64 [1, local]."""
        return self.padded.position_ids if self.parallel.size == 1 else self.padded.position_ids[:, self.index]

    @cached_property
    def context(self) -> AttentionContext:
        """The attention context for a forward on this rank's tokens."""
        parallel = self.parallel
        context: AttentionContext = self.padded
        if parallel.cp_group is not None:
            context = RingContext(self.padded, parallel.cp_group)
        if parallel.sp_group is not None:
            context = UlyssesContext(context, parallel.sp_group)
        return context

    def take(self, values: Tensor, fill: int = 0) -> Tensor:
        """This rank's part [local, ...] of what every rank has for the whole row [tokens, ...]; `fill` for padding."""
        return values if self.parallel.size == 1 else self._pad(values, fill)[self.index]

    def gather(self, local_values: Tensor) -> Tensor:
        """The whole row [tokens, ...], without padding, of every rank's [local, ...].

        Differentiable under this contract: every rank computes the same loss from the gathered row. A rank's backward
        then takes its own tokens' part of the gradient, which is complete as it is, and adds nothing over the group.
        So the parameter gradients of a rank are those by way of its own tokens, and the engine must *sum* (not average)
        them over the group. A loss that differs between the ranks gets wrong gradients.
        """
        return local_values if self.parallel.size == 1 else _GatherRow.apply(local_values, self)

    def _pad(self, values: Tensor, fill: int) -> Tensor:
        missing = self.padded_length - len(values)
        return F.pad(values, (0, 0) * (values.ndim - 1) + (0, missing), value=fill) if missing else values


class _GatherRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_values: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        parallel, row = shard.parallel, local_values
        if parallel.sp_group is not None:
            row = gather_blocks(row, parallel.sp_group).flatten(0, 1)
        if parallel.cp_group is not None:
            row = gather_blocks(row, parallel.cp_group).transpose(0, 1).flatten(0, 1)
        return row[: shard.packed.num_tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.take(grads[0]), None


def _place(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """A group with its size and this rank's place in it; a group of one is none at all."""
    if group is None or dist.get_world_size(group) == 1:
        return None, 1, 0
    return group, dist.get_world_size(group), dist.get_rank(group)
