"""An engine's state in a folder of torch's distributed checkpoints (DCP), which any layout and either engine can read.

    .metadata               the index: names, shapes, and where each rectangle lies
    __<rank>_0.distcp       the rectangles a rank wrote, one after the other, each as `torch.save` writes it
    extra-<rank>.pt         schedule and random states, beside it

Tensors are `model.<name>` (float32 masters where there are any) and `optimizer.state.<name>.<kind>` (AdamW's moments
and `step`) under the modules' names. A rank writes the rectangles that no rank before it holds, and nobody waits for
anybody: what each rank says of its file (`Part`) makes the index. torch's own planners are not used: they know
DTensors, not parts of Megatron's packed parameters, and agree over collectives.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Shape = tuple[int, ...]
INDEX = ".metadata"
# Of the index, as torch numbers it.
VERSION = "1.0.0"
PARAM = "param"
STEP = "step"
READ_BYTES = 8 << 20
# Every tensor's bytes begin at a multiple of this, so that they can be used where they lie.
ALIGNMENT = 64


@dataclass(frozen=True)
class Rectangle:
    """`[start, start + tensor.shape)` of the whole tensor with this name and shape, of one kind of state."""

    kind: str
    name: str
    shape: Shape
    start: Shape
    tensor: Tensor


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes. The tensors may be the engine's own: `copied` makes them independent of it."""

    rectangles: Iterable[Rectangle] = ()
    extra: dict[str, Any] | None = None

    def copied(self) -> Snapshot:
        """The same in host memory of its own."""
        kept = [replace(r, tensor=r.tensor.detach().to("cpu", copy=True)) for r in self.rectangles]
        return replace(self, rectangles=kept)


@dataclass(frozen=True)
class Entry:
    """Where a rectangle lies: `length` bytes of a file of its folder."""

    kind: str
    name: str
    shape: Shape
    start: Shape
    size: Shape
    dtype: torch.dtype
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Part:
    """What one rank has written into a folder; `write_index` completes the folder with those of all ranks.

    `sums` has the checksums that were taken while writing.
    """

    files: list[Path] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    sums: dict[Path, int] = field(default_factory=dict)

    def records(self, root: Path) -> list[FileRecord]:
        """The files as they must be found again."""
        return [record_file(file, root, self.sums.get(file)) for file in self.files]


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it must be found again; `name` is relative to the checkpoint."""

    name: str
    size: int
    crc32: int


def path_in_state(kind: str, name: str) -> tuple[str, ...]:
    """Where a tensor is in the nested dict that the folder stands for."""
    return ("model", name) if kind == PARAM else ("optimizer", "state", name, kind)


def write_snapshot(snapshot: Snapshot, folder: Path, rank: int) -> Part:
    """Writes a rank's files; of rectangles that come as a stream, one is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    part, file = Part(), folder / f"__{rank}_0.distcp"
    with file.open("wb") as plain:
        stream = _Summed(plain)
        for rectangle in snapshot.rectangles:
            stream.write(bytes(-stream.written % ALIGNMENT))
            offset = stream.written
            stream.save(_alone(rectangle.tensor))
            size, dtype = tuple(rectangle.tensor.shape), rectangle.tensor.dtype
            place = rectangle.kind, rectangle.name, rectangle.shape, rectangle.start, size
            part.entries.append(Entry(*place, dtype, file.name, offset, stream.written - offset))
    if part.entries:
        part.files.append(file)
        part.sums[file] = stream.sum
    else:
        file.unlink()
    if snapshot.extra is not None:
        part.files.append(folder / f"extra-{rank}.pt")
        torch.save(snapshot.extra, part.files[-1])
    return part


class _Summed:
    """A file that takes its checksum while it is written: reading it again would cost as much as writing it."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.written, self.sum = stream, 0, 0
        self._problem: OSError | None = None

    def save(self, tensor: Tensor) -> None:
        """Appends a tensor; where the file cannot be written, the error says why."""
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except RuntimeError:
            if self._problem is None:
                raise
            raise self._problem from None  # torch tells only of a place that it did not expect

    def write(self, data: bytes) -> int:
        self.sum = zlib.crc32(data, self.sum)
        self.written += len(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self._problem = OSError(error.errno, error.strerror, self._stream.name)
            raise self._problem from error

    def flush(self) -> None:
        self._stream.flush()


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in host memory that holds nothing else: `torch.save` writes all of the memory a view is of."""
    dense = tensor.detach().to("cpu").contiguous()
    is_alone = dense.untyped_storage().nbytes() == dense.numel() * dense.element_size()
    return dense if is_alone else dense.clone()


def write_index(folder: Path, parts: Iterable[Iterable[Entry]]) -> Path:
    """Completes a folder: what all ranks have written, as torch's index of it."""
    tensors: dict[str, Any] = {}
    paths: dict[str, tuple[str, ...]] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for entry in (entry for part in parts for entry in part):
        path = path_in_state(entry.kind, entry.name)
        key = ".".join(path)
        whole = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), [])
        chunks = tensors.setdefault(key, whole).chunks
        where = MetadataIndex(key, entry.start, len(chunks))
        places[where] = _StorageInfo(entry.file, entry.offset, entry.length)
        chunks.append(ChunkStorageMetadata(torch.Size(entry.start), torch.Size(entry.size)))
        paths[key] = path
    with (folder / INDEX).open("wb") as stream:
        pickle.dump(Metadata(tensors, paths, places, StorageMeta(), VERSION), stream)
    return folder / INDEX


def record_file(file: Path, root: Path, crc32: int | None = None) -> FileRecord:
    """Size and checksum (unless it is known) of a file that has just been written; it is on the disk afterwards."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    return FileRecord(str(file.relative_to(root)), file.stat().st_size, checksum(file) if crc32 is None else crc32)


def checksum(file: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value
