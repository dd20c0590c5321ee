"""Process groups: how the ranks of a worker group find each other."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.parallel.layout import Layout
from meshrl.telemetry.ledger import watch_cuda

KEPT_BYTES = 1 << 30


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes a GPU where there is one; each local rank gets its own."""
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
    """Joins the ranks named by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); once a process."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    outlive_other_groups()
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout_seconds))
    atexit.register(_leave_process_group)


def outlive_other_groups() -> None:
    """To be called before a process makes its first group: has it outlive errors in others, as between pools.

    When any group fails, the monitor of the first one writes down what ran and then ends the process. What ran is in
    our own reports (`flight_recorder`).
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def new_groups(layout: Layout, *axes: str) -> dist.ProcessGroup | None:
    """This rank's process group along the axes, or None where it would be alone. Every rank must call this alike."""
    if layout.size(*axes) == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration(layout.groups(*axes))
    return mine


def contiguous_group(size: int, timeout_seconds: float) -> dist.ProcessGroup | None:
    """This rank's group when the world is cut into groups of `size` neighbours; None where it would be alone.

    Every rank must call this alike.
    """
    if size == 1:
        return None
    if dist.get_world_size() % size:
        raise ValueError(f"{dist.get_world_size()} ranks cannot be cut into groups of {size}")
    ranks = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    mine, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=timeout_seconds))
    return mine


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Waits until all ranks of a group are here, within its deadline; no device takes part."""
    dist.all_gather_object([None] * dist.get_world_size(group), None, group=group)


def sharding_mesh(shards: Layout, device_type: str) -> DeviceMesh:
    """A mesh of (copies × shards) for FSDP, which shards along the second dim and adds gradients along both."""
    table = torch.from_numpy(shards.table(("ddp",), ("fsdp",)))
    if table.shape[0] == 1:
        return DeviceMesh(device_type, table[0], mesh_dim_names=("fsdp",))
    return DeviceMesh(device_type, table, mesh_dim_names=("copies", "fsdp"))


def _leave_process_group() -> None:
    """Destroy all groups and end their threads: a gloo thread that still frees a tensor while Python ends aborts it."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def prepare_device(name: str, local_rank: int) -> torch.device:
    """The rank's device, set up for training in float32 on a CPU or in any type on a GPU."""
    device = resolve_device(name, local_rank)
    if device.type == "cpu":
        # oneDNN costs more per call than the plain BLAS does for the small matrices that are trained on CPUs.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        keep_freed_memory()
    else:
        watch_cuda()
    return device


def keep_freed_memory() -> None:
    """Has glibc keep what is freed: large tensors of a CPU step would else be new pages of zeros each time."""
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold = -1, -3  # the numbers of mallopt's parameters
    allocator = ctypes.CDLL(None)
    allocator.mallopt(trim_threshold, KEPT_BYTES)
    allocator.mallopt(mmap_threshold, KEPT_BYTES)
