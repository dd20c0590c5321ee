"""Devices, process groups, and layouts of named parallel axes over ranks.

- `prepare_device`, `resolve_device`: the device of a rank.
- `init_process_group`, `new_groups`, `contiguous_group`, `sharding_mesh`: torch.distributed groups and meshes.
- `Layout`, `sample_layout`, `shard_layout`: axes and their sizes as plain numbers, without a process group.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.telemetry.time_ledger import watch_cuda

KEPT_BYTES = 1 << 30


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for `name` (auto, cpu or cuda); `auto` takes a GPU if there is one.

    Each local rank gets a GPU of its own.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ValueError(f"trainer.device must be auto, cpu or cuda, got '{name}'")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(f"trainer.device=cuda needs a GPU for local rank {local_rank}, but this machine has {count}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def init_process_group(device: torch.device, timeout_seconds: float) -> None:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, unless already joined."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    outlive_other_groups()
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout_seconds))
    atexit.register(_leave_process_group)


def outlive_other_groups() -> None:
    """Let this process survive errors in groups other than its first one, such as a group between two pools.

    Call this before the process creates its first group. When any group fails, torch's monitor of the first group dumps
    the recorded operations and then ends the process. That dump is not needed, because meshrl's own reports (`calls`)
    hold the same information.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def new_groups(layout: Layout, *axes: str) -> dist.ProcessGroup | None:
    """Return this rank's process group along the axes, or None if the group would have one rank.

    Collective: every rank must call this with the same arguments.
    """
    if layout.size(*axes) == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration(layout.groups(*axes))
    return mine


def contiguous_group(size: int, timeout_seconds: float) -> dist.ProcessGroup | None:
    """Return this rank's group when the world is cut into groups of `size` neighbouring ranks; None if `size` is 1.

    Collective: every rank must call this with the same arguments.
    """
    if size == 1:
        return None
    if dist.get_world_size() % size:
        raise ValueError(f"{dist.get_world_size()} ranks cannot be cut into groups of {size}")
    ranks = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    mine, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=timeout_seconds))
    return mine


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait until all ranks of a group have called this, at most until the group's timeout.

    The objects are gathered on the CPU, so no GPU takes part.
    """
    dist.all_gather_object([None] * dist.get_world_size(group), None, group=group)


def sharding_mesh(shards: Layout, device_type: str) -> DeviceMesh:
    """Return the FSDP device mesh (copies × shards): it shards along the second dim and adds gradients along both."""
    table = torch.from_numpy(shards.table(("ddp",), ("fsdp",)))
    if table.shape[0] == 1:
        return DeviceMesh(device_type, table[0], mesh_dim_names=("fsdp",))
    return DeviceMesh(device_type, table, mesh_dim_names=("copies", "fsdp"))


def _leave_process_group() -> None:
    """Destroy all groups and end their threads.

    A gloo thread that frees a tensor during interpreter shutdown would abort the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def prepare_device(name: str, local_rank: int) -> torch.device:
    """Return the rank's device, set up for training in float32 on a CPU or in any type on a GPU."""
    device = resolve_device(name, local_rank)
    if device.type == "cpu":
        # oneDNN has more overhead per call than plain BLAS for the small matrices that are trained on CPUs.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        keep_freed_memory()
    else:
        watch_cuda()
    return device


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it.

    Otherwise each large tensor of a step on a CPU would be backed by newly zeroed pages.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold = -1, -3  # the numbers of mallopt's parameters
    allocator = ctypes.CDLL(None)
    allocator.mallopt(trim_threshold, KEPT_BYTES)
    allocator.mallopt(mmap_threshold, KEPT_BYTES)


# Layouts: named axes over ranks, as plain numbers. Building, querying or printing a layout needs no process group.


@dataclass(frozen=True)
class Layout:
    """Named axes with their sizes, in row-major order: neighbouring ranks differ in the last axis."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(axes: Mapping[str, int]) -> Layout:
        """Build a layout from axis sizes, the slowest axis first."""
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
        """Return how many ranks the axes span together."""
        sizes = dict(self.axes)
        return prod(sizes[axis] for axis in axes)

    def ranks(self) -> np.ndarray:
        """Return all ranks as an array with one dim per axis."""
        return np.arange(self.world_size).reshape([size for _, size in self.axes])

    def index(self, rank: int, *axes: str) -> int:
        """Return the index of a rank along the given axes flattened into one; the first axis is the slowest."""
        coordinates = dict(zip(self.names, np.unravel_index(rank, [size for _, size in self.axes]), strict=True))
        sizes = dict(self.axes)
        place = 0
        for axis in axes:
            place = place * sizes[axis] + int(coordinates[axis])
        return place

    def table(self, rows: tuple[str, ...], columns: tuple[str, ...]) -> np.ndarray:
        """Return the ranks as a matrix: one row per index along `rows`, one column per index along `columns`."""
        if sorted((*rows, *columns)) != sorted(self.names):
            raise ValueError(f"rows {rows} and columns {columns} must name each of the axes {self.names} once")
        order = [self.names.index(axis) for axis in (*rows, *columns)]
        return self.ranks().transpose(order).reshape(self.size(*rows), self.size(*columns))

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks along these axes; the ranks of a group have equal indices on all other axes."""
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
    """Return the layout by which ranks of the FSDP engine share samples: data parallel × ring × Ulysses.

    The ranks of an `sp` group are neighbours.
    """
    if world_size % (cp * sp):
        raise ValueError(
            f"n_gpus ({world_size}) must be divisible by context_parallel_size * ulysses_sequence_parallel_size "
            f"({cp} * {sp} = {cp * sp})"
        )
    return Layout.of({"dp": world_size // (cp * sp), "cp": cp, "sp": sp})


def shard_layout(world_size: int, fsdp_size: int = -1) -> Layout:
    """Return the layout by which ranks of the FSDP engine share weights: copies × shards.

    The shards of a copy are neighbouring ranks. Ranks that share a sequence hold different shards, as all other ranks
    do, because gradients are added up over all ranks anyway. So shard groups and sequence groups need not nest.
    """
    shards = world_size if fsdp_size == -1 else fsdp_size
    if shards < 1 or world_size % shards:
        raise ValueError(f"n_gpus ({world_size}) must be divisible by fsdp_size ({fsdp_size})")
    return Layout.of({"ddp": world_size // shards, "fsdp": shards})
