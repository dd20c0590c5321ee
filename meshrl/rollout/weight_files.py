"""Streams of (name, tensor) on the way into a rollout, and the shared-memory files that carry them between processes.

Parts: the expected names and shapes of a model, conversion to the names in checkpoint files (`FileWeights`), checks of
a stream (`checked`), buckets (`buckets`), and buffers in shared memory (`SharedFile`, `as_one_segment`).
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshrl.models.names import parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Named = tuple[str, Tensor]


def model_without_memory(config: Any) -> PreTrainedModel:
    """Build a model with this config on the meta device, so that no memory is allocated."""
    from meshrl.models.loading import causal_lm_class

    with torch.device("meta"):
        model: PreTrainedModel = causal_lm_class(config).from_config(config)
    model.tie_weights()
    return model


def shapes_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """Return the shapes of a model's weights by Hugging Face name."""
    from meshrl.models.loading import named_weights

    return {name: list(weight.shape) for name, weight in named_weights(model).items()}


def expected_shapes(config: Any) -> dict[str, list[int]]:
    """Return the weight shapes by Hugging Face name of a model with this config."""
    return shapes_of(model_without_memory(config))


class FileWeights:
    """A converter of a model's weights to the names in its checkpoint files, by which an external engine loads them.

    `shapes` has the expected shapes by Hugging Face name.
    """

    def __init__(self, config: Any):
        from meshrl.models.saving import other_names

        self._model, self._type = model_without_memory(config), str(config.model_type)
        self._others = other_names(self._model)
        self.shapes = shapes_of(self._model)

    def renamed(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Yield the stream under the names of checkpoint files. Stacked experts are often split into single experts."""
        from meshrl.models.saving import as_file_tensors, kind_of

        for name, tensor in weights:
            if kind_of(name) in self._others:
                yield from as_file_tensors([(name, tensor)], self._model, turns_squares=True)
                continue
            parts = parts_of(name, tuple(tensor.shape), self._type)
            if len(parts) == 1:
                yield parts[0].name, tensor
                continue
            tensor = tensor.detach().contiguous()
            for part in parts:
                place = tensor.storage_offset() + part.offset
                yield part.name, tensor.as_strided(part.shape, (part.row_stride, part.col_stride), place)


def checked(weights: Iterable[Named], expected: Mapping[str, Iterable[int]]) -> Iterator[Named]:
    """Check each tensor of a weight stream and yield it unchanged.

    Raises ValueError for an unknown, repeated or misshapen tensor, and at the end of the stream for missing tensors.
    """
    left = dict(expected)
    for name, tensor in weights:
        shape = left.pop(name, None)
        if shape is None:
            raise ValueError(f"weight sync: the rollout has no parameter '{name}', or got it twice")
        if tuple(shape) != tensor.shape:
            sizes = f"has shape {list(shape)} here, but was sent as {list(tensor.shape)}"
            raise ValueError(f"weight sync: '{name}' {sizes}")
        yield name, tensor
    if left:
        raise ValueError(f"weight sync: {len(left)} parameters were never sent, such as '{next(iter(left))}'")


@contextmanager
def noted(first: BaseException, words: str) -> Iterator[None]:
    """Run cleanup after the error `first`. An error of the cleanup is added to `first` as a note."""
    try:
        yield
    except Exception as error:
        first.add_note(f"{words}: {type(error).__name__}: {error}")


def buckets(weights: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Group neighbouring tensors into buckets of up to `max_bytes`. A larger tensor has its own bucket.

    A bucket is cleared when the next one is requested. Otherwise the consumer's variable would keep its tensors alive.
    """
    bucket: list[Named] = []
    held = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > max_bytes:
            yield bucket
            bucket.clear()
            held = 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket


# Tensors for other processes of this machine, stored one after another in a file in shared memory.

# A tensor's name, dtype, shape and offset in bytes, in types that JSON can represent.
Entry = tuple[str, str, list[int], int]
ALIGNMENT = 64
MEMORY = Path("/dev/shm")


def memory_folder() -> str:
    """Create a private folder in shared memory, or in the default folder for temporary files without shared memory."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    return tempfile.mkdtemp(prefix="meshrl-", dir=parent)


def take_memory(file: IO[bytes], start: int, size: int) -> None:
    """Reserve space for a part of a file; raise OSError if there is not enough.

    Without the reservation, a write to mapped memory without space would kill the process.
    """
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
    """Round a size in bytes up to `ALIGNMENT`, so that a tensor of any dtype can follow."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SharedFile:
    """A file in shared memory that is filled repeatedly. It grows to the size of the largest filling."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Entry]:
        """Copy the tensors into the file and return their entries."""
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
    """Return the tensors of a `SharedFile` as views of its memory. Copy them before the next filling."""
    buffer = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
    return _views(buffer, entries)


def as_one_segment(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copy tensors into one segment of shared memory and return views of it. The segment lives as long as the views."""
    entries, end = _laid_out(tensors)
    buffer = torch.empty(end, dtype=torch.uint8).share_memory_()
    views = list(_views(buffer, entries))
    for (_, tensor), (_, place) in zip(tensors, views, strict=True):
        place.copy_(tensor.detach())
    return views


def _laid_out(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[Entry], int]:
    """Return the entry of each tensor and the end of the last tensor in bytes."""
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
