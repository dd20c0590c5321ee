"""What layers with a state remember of each running row, beside the keys and values of the layers that attend.

A state is as large after one token as after a thousand, so rows have a place for it and no blocks. It cannot be cut
into prefixes either: the samples of a prompt get copies of what its prefill leaves behind, and that is all sharing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.parallel.delta_rule import DeltaRule, States
from meshrl.parallel.packed import PackedSequences
from meshrl.parallel.recurrence import recurrences
from meshrl.rollout.embedded.scheduler import Piece
from meshrl.rollout.embedded.slots import untouched_zeros


def bytes_of_states(hf_model: PreTrainedModel) -> int:
    """Memory that a row's states take over all layers."""
    layers: list[Any] = recurrences(hf_model)
    recent = sum(layer.conv_dim * (layer.conv_kernel_size - 1) for layer in layers) * hf_model.dtype.itemsize
    return recent + sum(layer.num_v_heads * layer.head_k_dim * layer.head_v_dim for layer in layers) * 4


class StateStore:
    """Room for the states of all rows, and of one more for places that nobody takes; made on first use."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device = capacity, device
        self._layers: dict[int, States] = {}

    def of(self, layer: int, rule: DeltaRule, like: Tensor) -> States:
        """Those of a layer, of all rows."""
        if layer not in self._layers:
            small = rule.no_states(0, like)
            shapes = [(self.capacity + 1, *x.shape[1:]) for x in small]
            if self.device.type == "cpu":  # rows that are never taken take no memory
                made = [untouched_zeros(shape, x.dtype) for shape, x in zip(shapes, small, strict=True)]
            else:
                made = [x.new_zeros(shape) for shape, x in zip(shapes, small, strict=True)]
            self._layers[layer] = States(*made)
        return self._layers[layer]

    def move(self, moves: Seq[tuple[int, int]]) -> None:
        """Copies rows (from, to)."""
        source, target = (torch.tensor(side, device=self.device) for side in zip(*moves, strict=True))
        for states in self._layers.values():
            for x in states:
                x[target] = x[source]

    def drop(self) -> None:
        """Gives the memory back."""
        self._layers.clear()


class PieceStates:
    """The recurrence of packed prefill pieces: from where their rows are, to the rows of all who wait for them."""

    def __init__(self, store: StateStore, pieces: Seq[Piece]):
        self.store = store
        rows = [[piece.sequence.row, *(f.row for f in piece.sequence.followers)] for piece in pieces]
        device, starts = store.device, np.array([piece.start for piece in pieces])
        self.goes_on = bool(starts.any())
        self.rows = torch.tensor([own[0] for own in rows]).to(device)
        self.begins = torch.from_numpy(starts == 0).to(device)
        self.takers = torch.tensor([row for own in rows for row in own]).to(device)
        self.piece_of = torch.arange(len(pieces)).repeat_interleave(torch.tensor([len(own) for own in rows])).to(device)

    def recur(
        self, layer: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor, packed: PackedSequences
    ) -> Tensor:
        """See `RecurrentContext`."""
        kept, before = self.store.of(layer, rule, channels), None
        if self.goes_on:
            before = States(*(_emptied(x[self.rows], self.begins) for x in kept))
        out, after = rule.over(channels, decay, rate, packed, before, wants_after=True)
        assert after is not None
        for own, new in zip(kept, after, strict=True):
            own[self.takers] = new[self.piece_of].to(own.dtype)
        return out


def _emptied(x: Tensor, where: Tensor) -> Tensor:
    return x.masked_fill(where.view(-1, *(1,) * (x.ndim - 1)), 0)
