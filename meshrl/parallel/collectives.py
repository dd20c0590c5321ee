"""Collectives the sequence-parallel contexts are made of: blocks exchanged, rows gathered, a ring that turns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    """All-to-all: `blocks[i]` goes to rank i of the group, and `result[i]` is what rank i had for this one.

    Differentiable. `blocks` has one entry for each rank of the group in its first dim.
    """
    return _ExchangeBlocks.apply(blocks, group)


def gather_blocks(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather: the equally shaped `block` of every rank, stacked in a new first dim. Not differentiable."""
    gathered = block.new_empty((dist.get_world_size(group), *block.shape))
    dist.all_gather(list(gathered.unbind(0)), block.contiguous(), group=group)
    return gathered


class RingTransfer:
    """One turn of the ring under way: `outgoing` to the next rank of the group, an equal shape from the previous.

    It runs beside whatever is computed until `wait`; `outgoing` must not be written to before that. Transfers of the
    same kind must be started in the same order on every rank; those of another kind need a `tag` of their own.
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
        """What came from the previous rank."""
        for work in self._works:
            work.wait()
        return self._incoming
