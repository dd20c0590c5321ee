"""Sequence parallelism: the tokens of one packed row over the ranks of a `cp` × `sp` group.

    row, padded          0  1  2  3  4  5  6  7  8  9 10 11      cp = 2, sp = 2
    cp rank 0            0     2     4     6     8    10         a stripe (RingContext)
      sp rank 0 / 1      0     2     4  |  6     8    10         equal parts of the stripe (UlyssesContext)
    cp rank 1               1     3     5     7     9    11
      sp rank 0 / 1         1     3     5  |  7     9    11

Every rank of the group gets the same row. It runs the model on its own tokens only, with the positions and the
attention context of its `SequenceShard`. Then the ranks gather the per-token results (log-probs, values) into the whole
row. Every rank computes the same loss from the whole row, so the loss code does not depend on sequence parallelism.
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
    """The Ulysses (`sp`) and ring (`cp`) groups that split packed rows.

    An axis without a group, or with a group of one rank, is not split.
    """

    def __init__(self, sp_group: dist.ProcessGroup | None, cp_group: dist.ProcessGroup | None):
        self.sp_group, self.sp_size, self.sp_rank = _place(sp_group)
        self.cp_group, self.cp_size, self.cp_rank = _place(cp_group)

    @property
    def size(self) -> int:
        """The number of ranks that a row is split over."""
        return self.sp_size * self.cp_size

    def shard(self, packed: PackedSequences) -> SequenceShard:
        """Return this rank's shard of a row; every rank of the group must pass the same row."""
        return SequenceShard(packed, self)


@dataclass(frozen=True)
class SequenceShard:
    """One rank's tokens of a packed row: their indices, their attention context, and the gather back into the whole
    row.
    """

    packed: PackedSequences
    parallel: SequenceParallel

    @cached_property
    def padded(self) -> PackedSequences:
        """The row with one more document at its end, which pads it to a multiple of the group's size."""
        missing = -self.packed.num_tokens % self.parallel.size
        if not missing:
            return self.packed
        return PackedSequences.of((*self.packed.lengths, missing), self.packed.device)

    @property
    def padded_length(self) -> int:
        return self.padded.num_tokens

    @property
    def local_length(self) -> int:
        """The number of tokens that each rank of the group holds."""
        return self.padded_length // self.parallel.size

    @cached_property
    def index(self) -> Tensor:
        """The indices of this rank's tokens in the padded row, int64 `[local]`, in the order the rank holds them."""
        first = self.parallel.sp_rank * self.local_length
        places = torch.arange(first, first + self.local_length, device=self.packed.device)
        return places * self.parallel.cp_size + self.parallel.cp_rank

    @cached_property
    def position_ids(self) -> Tensor:
        """The positions of this rank's tokens in their documents, int64 `[1, local]`."""
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
        """Return this rank's part `[local, ...]` of `values` `[tokens, ...]`, which all ranks hold; padding gets
        `fill`.
        """
        return values if self.parallel.size == 1 else self._pad(values, fill)[self.index]

    def gather(self, local_values: Tensor) -> Tensor:
        """Gather the whole row `[tokens, ...]`, without padding, from every rank's `[local, ...]`.

        Differentiable under this contract: every rank computes the same loss from the gathered row. A rank's backward
        then takes its own tokens' part of the gradient. That part is already complete, so nothing is added over the
        group. The parameter gradients of a rank therefore cover its own tokens only, and the engine must *sum* (not
        average) them over the group. A loss that differs between the ranks gets wrong gradients.
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
    """Return a group with its size and this rank's index in it; a group of one rank becomes None."""
    if group is None or dist.get_world_size(group) == 1:
        return None, 1, 0
    return group, dist.get_world_size(group), dist.get_rank(group)
