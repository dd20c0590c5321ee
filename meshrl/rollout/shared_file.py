"""Tensors for other processes of this machine, laid end to end in a file that lives in memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

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
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return entries, end


def _views(buffer: Tensor, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    for name, type_name, shape, start in entries:
        dtype = getattr(torch, type_name)
        size = math.prod(shape) * dtype.itemsize
        yield name, buffer[start : start + size].view(dtype).view(shape)
