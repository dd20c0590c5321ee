"""A rank's own part of a model: its local parameters, and the rectangles in them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from meshrl.weights.placement import Placement


class Shards:
    """The local parameters of one rank of a placement, by the placement's names."""

    def __init__(self, placement: Placement, rank: int, tensors: Mapping[str, Tensor]):
        self.placement, self.rank, self.tensors = placement, rank, tensors
        held = placement.of_rank(rank)
        ends = held["offset"] + (held["rows"] - 1) * held["row_stride"] + (held["cols"] - 1) * held["col_stride"] + 1
        for number in np.unique(held["parameter"]).tolist():
            name = placement.parameters[number]
            if name not in tensors:
                raise ValueError(f"'{placement.title}': rank {rank} has no parameter '{name}'")
            needed = int(ends[held["parameter"] == number].max())
            found = tensors[name]
            if found.numel() < needed or not found.is_contiguous():
                raise ValueError(
                    f"'{placement.title}': parameter '{name}' of rank {rank} has {found.numel()} elements "
                    f"{'in one piece' if found.is_contiguous() else 'with gaps'}, but its slices need {needed} in one "
                    "piece"
                )

    @property
    def device(self) -> torch.device:
        """Where this rank's parameters are."""
        return next(iter(self.tensors.values())).device

    def region(self, held: np.ndarray, box: np.ndarray | None = None) -> Tensor:
        """The rectangle `box` (by default all) of a slice, as a view of the local parameter."""
        tensor = self.tensors[self.placement.parameters[held["parameter"]]]
        offset = int(held["offset"])
        if box is None:
            box = held
        else:
            offset += int(box["row"] - held["row"]) * int(held["row_stride"])
            offset += int(box["col"] - held["col"]) * int(held["col_stride"])
        return torch.as_strided(
            tensor,
            (int(box["rows"]), int(box["cols"])),
            (int(held["row_stride"]), int(held["col_stride"])),
            tensor.storage_offset() + offset,
        )

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Shards:
        """The same shards in other memory."""
        made = copy.copy(self)
        made.tensors = tensors
        return made


def local_tensors(placement: Placement, rank: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cuts whole tensors into a rank's local parameters, as flat tensors: for tests, benchmarks and replicas."""
    held = placement.of_rank(rank)
    names = list(placement.tensors)
    ends = held["offset"] + (held["rows"] - 1) * held["row_stride"] + (held["cols"] - 1) * held["col_stride"] + 1
    made: dict[str, Tensor] = {}
    for number in np.unique(held["parameter"]).tolist():
        mine = held["parameter"] == number
        like = whole[names[held["tensor"][mine][0]]]
        made[placement.parameters[number]] = like.new_zeros(int(ends[mine].max()))
    shards = Shards(placement, rank, made)
    for piece in held:
        tensor = whole[names[piece["tensor"]]]
        matrix = tensor.reshape(len(tensor) if tensor.dim() else 1, -1)
        rows, cols = (slice(int(piece[n]), int(piece[n] + piece[n + "s"])) for n in ("row", "col"))
        shards.region(piece).copy_(matrix[rows, cols])
    return made
