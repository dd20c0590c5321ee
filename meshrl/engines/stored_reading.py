"""Reading what `stored_state` describes: of all files only the bytes that overlap what is asked for.

The index is a pickle, as torch writes it; only the classes it is made of are let in, so that reading runs nothing.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import EnumMeta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from meshrl.config.names import count
from meshrl.engines import stored_listings
from meshrl.engines.stored_state import INDEX, PARAM, STEP, Shape

Key = tuple[str, str]
# The lengths of a name and of what follows it stand here in a zip entry's header, which ends with these two.
ZIP_LENGTHS, ZIP_HEADER = 26, 30


@dataclass(frozen=True)
class Chunk:
    """A stored rectangle; `view()` is something that can be sliced without reading the rest."""

    start: Shape
    size: Shape
    view: Callable[[], Any]


class Stored:
    """All rectangles of a role's checkpoint, wherever they lie."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.shapes: dict[Key, Shape] = {}
        self._where: dict[Key, list[Chunk]] = {}
        self._mapped: dict[str, mmap.mmap] = {}
        if not self.folder.is_dir():
            raise FileNotFoundError(f"no checkpoint at '{folder}'")
        if (self.folder / INDEX).is_file():
            self._take(read_index(self.folder / INDEX))
        elif listings := stored_listings.entries(self.folder):
            for kind, name, shape, start, size, view in listings:
                self._add((kind, name), shape, Chunk(start, size, view))
        else:
            raise FileNotFoundError(f"'{folder}' is no checkpoint: it has no {INDEX}")

    def _take(self, index: Metadata) -> None:
        for key, path in index.planner_data.items():
            held = index.state_dict_metadata[key]
            assert isinstance(held, TensorStorageMetadata)
            name, kind = (path[1], PARAM) if path[0] == "model" else path[2:]
            for number, chunk in enumerate(held.chunks):
                info = index.storage_data[MetadataIndex(key, chunk.offsets, number)]
                start, size = tuple(chunk.offsets), tuple(chunk.sizes)
                view = partial(self._tensor, info, size, held.properties.dtype, name)
                self._add((kind, name), tuple(held.size), Chunk(start, size, view))

    def _add(self, key: Key, shape: Shape, chunk: Chunk) -> None:
        self.shapes[key] = shape
        self._where.setdefault(key, []).append(chunk)

    def steps_of(self, name: str | None = None) -> int:
        """How many optimizer steps a parameter has had; as many as any other where it has no number of its own."""
        names = [name] if name is not None and (STEP, name) in self.shapes else self.names(STEP)
        return max((int(self.whole(found, STEP)) for found in names), default=0)

    def names(self, kind: str = PARAM) -> list[str]:
        """The tensors of a kind, in the order they were written in."""
        return [name for found, name in self._where if found == kind]

    def check_no_more_than(self, names: Collection[str]) -> None:
        """A `ValueError` if there are weights that a model with these does not have."""
        more = [name for name in self.names() if name not in names]
        if more:
            raise ValueError(
                f"'{self.folder}' is of another model: it holds {count(len(more), 'weight')} more, such as '{more[0]}'"
            )

    def check(self, name: str, shape: Shape, kind: str = PARAM) -> None:
        """A `ValueError` unless all of a tensor of this shape is there."""
        held = sum(prod(chunk.size) for chunk in self._where.get((kind, name), []))
        if held != prod(shape) or self.shapes.get((kind, name)) != shape:
            raise ValueError(f"'{self.folder}' holds {held} of {prod(shape)} elements of '{name}' ({kind})")

    def whole(self, name: str, kind: str = PARAM, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, put together."""
        if (kind, name) not in self.shapes:
            raise ValueError(f"the checkpoint at '{self.folder}' has no '{name}' ({kind})")
        first, shape = self._where[kind, name][0], self.shapes[kind, name]
        view = first.view()
        if first.size == shape:
            found: Tensor = view[tuple(slice(0, length) for length in shape)]
            return found if dtype is None else found.to(dtype)
        target = torch.empty(shape, dtype=dtype or view[tuple(slice(0, 0) for _ in shape)].dtype)
        self.fill(kind, name, shape, tuple(0 for _ in shape), target)
        return target

    def fill(self, kind: str, name: str, shape: Shape, start: Shape, target: Tensor) -> None:
        """Copies all that is stored of a rectangle of a tensor of `shape` into `target`, which has the rectangle's."""
        filled = 0
        found = self.shapes.get((kind, name), shape)
        if found != shape:
            raise ValueError(
                f"'{name}' ({kind}) is {list(found)} in the checkpoint and {list(shape)} in the model: it is of "
                "another model, or of adapters of another rank"
            )
        ends = [begin + length for begin, length in zip(start, target.shape, strict=True)]
        for chunk in self._where.get((kind, name), []):
            low = [max(a, b) for a, b in zip(start, chunk.start, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(ends, chunk.start, chunk.size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            stored = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, chunk.start, strict=True))
            own = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            target[own] = chunk.view()[stored].to(target.device)
            filled += prod(b - a for a, b in zip(low, high, strict=True))
        if filled != target.numel():
            raise ValueError(
                f"the checkpoint holds {filled} of {target.numel()} elements of '{name}' "
                f"({kind}, from {list(start)} on): it is of another model, or incomplete"
            )

    def _tensor(self, info: _StorageInfo, size: Shape, dtype: torch.dtype, name: str) -> Tensor:
        """A stored tensor where it lies: its pages are read when they are looked at."""
        path, end = self.folder / info.relative_path, info.offset + info.length
        if not path.is_file():
            raise FileNotFoundError(f"the checkpoint lacks '{path}', which holds '{name}'")
        if info.relative_path not in self._mapped:
            with path.open("rb") as stream:
                self._mapped[info.relative_path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        memory = self._mapped[info.relative_path]
        if end > len(memory):
            raise ValueError(f"'{path}' has {len(memory)} bytes and '{name}' ends at {end}: it is truncated or damaged")
        begin = info.offset + _data_offset(memory, info)
        return torch.frombuffer(memory, dtype=dtype, count=prod(size), offset=begin).view(size)


class _Window(io.RawIOBase):
    """A stretch of memory as a file."""

    def __init__(self, memory: mmap.mmap, offset: int, length: int):
        self._memory, self._begin, self._end, self._at = memory, offset, offset + length, offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._memory[self._at : min(self._at + len(buffer), self._end)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: self._begin, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at - self._begin


def _data_offset(memory: mmap.mmap, info: _StorageInfo) -> int:
    """Where a tensor's bytes begin in what `torch.save` wrote: a zip archive in which they are not compressed."""
    try:
        with zipfile.ZipFile(_Window(memory, info.offset, info.length)) as archive:
            entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ValueError(f"{info.relative_path} holds no tensor at byte {info.offset}: it is damaged") from error
    at = entry.header_offset
    lengths: tuple[int, int] = struct.unpack_from("<HH", memory, info.offset + at + ZIP_LENGTHS)
    return at + ZIP_HEADER + sum(lengths)


def _enum_member(kind: Any, name: str) -> Any:
    """Stands for `getattr`, by which Python 3.11 up to 3.11.3 writes members of enums: it reaches those alone."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"attribute {name} of {kind} is no part of an index of tensors")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    """Lets in what torch's index is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # Not whatever the module can reach: it has imports of its own, and a name may have dots.
        known = getattr(torch_metadata, name, None) if module == torch_metadata.__name__ else None
        if isinstance(known, type) and known.__module__ == module:
            return known
        if (module, name) == (_StorageInfo.__module__, _StorageInfo.__name__):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index of tensors")


def read_index(file: Path) -> Metadata:
    """The index of a folder; a `ValueError` where it is not one that `write_index` wrote."""
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"'{file}' cannot be read ({error}): it is damaged, or none of ours") from error
    if not isinstance(index, Metadata) or not isinstance(index.planner_data, dict):
        raise ValueError(f"'{file}' is no index of ours: it names no tensors")
    return index
