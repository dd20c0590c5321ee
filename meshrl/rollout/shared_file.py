"""Tensors for other processes of this machine, laid end to end in a file that lives in memory."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

# Name, dtype, shape and first byte of a tensor, in types that JSON knows.
Entry = tuple[str, str, list[int], int]
ALIGNMENT = 64
MEMORY = Path("/dev/shm")


def memory_folder() -> str:
    """A new private folder in shared memory, or in the usual place for temporary files where there is none."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    return tempfile.mkdtemp(prefix="meshrl-", dir=parent)


def take_memory(file: IO[bytes], start: int, size: int) -> None:
    """Sets room for a part of a file aside: writing to mapped memory that finds none would end the process at once."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), start, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        there = os.fstatvfs(file.fileno())
        raise OSError(
            errno.ENOSPC,
            f"No space left for {size} bytes of weights, {there.f_bavail * there.f_frsize} bytes are free: lower "
            "rollout.update_weights_bucket_megabytes, or give the container more shared memory (--shm-size)",
            file.name,
        ) from error


def aligned(size: int) -> int:
    """Rounded up, so that what follows may be of any type."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SharedFile:
    """A buffer that is filled again and again; it grows with the largest filling."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Entry]:
        """Lays the tensors down and says where."""
        entries, end = _laid_out(tensors)
        if end > len(self._buffer):
            with open(self.path, "ab") as file:
                take_memory(file, 0, end)
                file.truncate(end)
            self._buffer = torch.from_file(self.path, shared=True, size=end, dtype=torch.uint8)
        for (_, tensor), (_, place) in zip(tensors, _views(self._buffer, entries), strict=True):
            place.copy_(tensor.detach())
        return entries


def read_tensors(path: str, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a file, as views of its memory: to be copied before the next filling."""
    buffer = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
    return _views(buffer, entries)


def as_one_segment(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copies of tensors as views of a single segment of shared memory, which lives as long as they do."""
    entries, end = _laid_out(tensors)
    buffer = torch.empty(end, dtype=torch.uint8).share_memory_()
    views = list(_views(buffer, entries))
    for (_, tensor), (_, place) in zip(tensors, views, strict=True):
        place.copy_(tensor.detach())
    return views


def _laid_out(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[Entry], int]:
    """Where each tensor goes, and where the last one ends."""
    entries: list[Entry] = []
    end = 0
    for name, tensor in tensors:
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += aligned(tensor.numel() * tensor.element_size())
    return entries, end


def _views(buffer: Tensor, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    for name, type_name, shape, start in entries:
        dtype = getattr(torch, type_name)
        size = math.prod(shape) * dtype.itemsize
        yield name, buffer[start : start + size].view(dtype).view(shape)
