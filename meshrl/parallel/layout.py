"""Layouts: named axes over ranks, as plain numbers. No process group is needed to make, ask or print one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Axes with their sizes, row-major: ranks next to each other differ in the last axis."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(axes: Mapping[str, int]) -> Layout:
        """A layout from axis sizes, the slowest axis first."""
        for name, size in axes.items():
            if size < 1:
                raise ValueError(f"axis {name} must have at least one rank, got {size}")
        return Layout(tuple(axes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, *axes: str) -> int:
        """How many ranks the axes span together."""
        sizes = dict(self.axes)
        return prod(sizes[axis] for axis in axes)

    def ranks(self) -> np.ndarray:
        """All ranks, in an array with one dim an axis."""
        return np.arange(self.world_size).reshape([size for _, size in self.axes])

    def index(self, rank: int, *axes: str) -> int:
        """The place of a rank along the axes taken as one, the first of them slowest."""
        coordinates = dict(zip(self.names, np.unravel_index(rank, [size for _, size in self.axes]), strict=True))
        sizes = dict(self.axes)
        place = 0
        for axis in axes:
            place = place * sizes[axis] + int(coordinates[axis])
        return place

    def table(self, rows: tuple[str, ...], columns: tuple[str, ...]) -> np.ndarray:
        """Ranks as a matrix: one row for each place along `rows`, one column for each along `columns`."""
        if sorted((*rows, *columns)) != sorted(self.names):
            raise ValueError(f"rows {rows} and columns {columns} must name each of the axes {self.names} once")
        order = [self.names.index(axis) for axis in (*rows, *columns)]
        return self.ranks().transpose(order).reshape(self.size(*rows), self.size(*columns))

    def groups(self, *axes: str) -> list[list[int]]:
        """The ranks that work together along these axes: they differ in nothing else."""
        others = tuple(name for name in self.names if name not in axes)
        return self.table(others, axes).tolist()

    def __str__(self) -> str:
        lines = [" * ".join(f"{name} {size}" for name, size in self.axes) + f" = {self.world_size} ranks"]
        for name, size in self.axes:
            if size > 1:
                lines.append(f"{name}: {' '.join(str(group) for group in self.groups(name))}")
        return "\n".join(lines)


DATA_AXES = ("dp",)
SEQUENCE_AXES = ("cp", "sp")


def sample_layout(world_size: int, cp: int = 1, sp: int = 1) -> Layout:
    """Which ranks of the FSDP engine share samples: data parallel × ring × Ulysses; `sp` ranks are neighbours."""
    if world_size % (cp * sp):
        raise ValueError(
            f"n_gpus ({world_size}) must be divisible by context_parallel_size * ulysses_sequence_parallel_size "
            f"({cp} * {sp} = {cp * sp})"
        )
    return Layout.of({"dp": world_size // (cp * sp), "cp": cp, "sp": sp})


def shard_layout(world_size: int, fsdp_size: int = -1) -> Layout:
    """Which ranks of the FSDP engine share weights: copies × shards; the shards of a copy are neighbours.

    Ranks of one sequence hold different shards like all others: gradients are added up over all ranks anyway. So
    shards and sequences need not fit into each other.
    """
    shards = world_size if fsdp_size == -1 else fsdp_size
    if shards < 1 or world_size % shards:
        raise ValueError(f"n_gpus ({world_size}) must be divisible by fsdp_size ({fsdp_size})")
    return Layout.of({"ddp": world_size // shards, "fsdp": shards})
