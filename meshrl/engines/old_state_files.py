"""Checkpoints older than format 3, which only `meshrl convert` reads, and the index of torch's distributed checkpoints.

Format 1 was safetensors with listings in JSON. Format 2 was torch's distributed checkpoints (DCP), which Megatron-Core
writes as well. The index of DCP is a pickle. Only the classes of such an index are allowed in it, so that reading runs
no foreign code. A tensor's bytes are read directly from the archive that `torch.save` wrote, without unpickling.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import EnumMeta
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from meshrl.data.serialization import inside, open_tensors
from meshrl.engines.state_files import PARAM, STEP, Shape
from meshrl.files import read_json

DCP_INDEX = ".metadata"
# Kind, name, whole shape, start and size of the rectangle, and a function that returns its values.
Listed = tuple[str, str, Shape, Shape, Shape, Callable[[], Any]]
# The offset of the two length fields (name, extra data) in a zip entry's header, and the size of that header in bytes.
ZIP_LENGTHS, ZIP_HEADER = 26, 30
# Other names in an index. Python 3.11 up to 3.11.3 pickles members of enums with `getattr`.
STRANGERS = (
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
)
# Megatron-Core's index also holds the plans by which it was written.
PLANS = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.")


def is_before(folder: Path) -> bool:
    """Return whether a role's folder has a format older than the current one."""
    return (folder / DCP_INDEX).is_file() or any(folder.glob("tensors-*.json"))


def entries(folder: Path) -> list[Listed]:
    """Return all rectangles in a folder of format 1 or 2; none if the folder has another format."""
    return _of_format_2(folder) if (folder / DCP_INDEX).is_file() else _of_format_1(folder)


def _of_format_2(folder: Path) -> list[Listed]:
    index = read_index(folder / DCP_INDEX)
    if not index.paths:
        raise ValueError(f"'{folder / DCP_INDEX}' is no index of ours: it names no tensors")
    mapped: dict[str, mmap.mmap] = {}
    found: list[Listed] = []
    for key, path in index.paths.items():
        held = index.tensors[key]
        name, kind = (path[1], PARAM) if path[0] == "model" else path[2:]
        for start, size in held.chunks:
            view = partial(_tensor, folder, mapped, index.places[key, start], size, held.dtype, name)
            found.append((kind, name, held.size, start, size, view))
    return found


def _of_format_1(folder: Path) -> list[Listed]:
    opened = cache(open_tensors)
    steps: dict[str, int] = {}
    found: list[Listed] = []
    for listing in sorted(folder.glob("tensors-*.json")):
        content = read_json(listing)
        for name, count in content["steps"].items():
            steps[name] = max(count, steps.get(name, 0))
        for entry in content["tensors"]:
            place = (tuple(entry[key]) for key in ("shape", "start", "size"))
            view = partial(_slice, opened, inside(folder, entry["file"]), entry["entry"])
            found.append((entry["kind"], entry["name"], *place, view))
    counts = {name: torch.tensor(float(count)) for name, count in steps.items()}
    return found + [(STEP, name, (), (), (), partial(torch.clone, count)) for name, count in counts.items()]


def _slice(opened: Callable[[Path], Any], file: Path, entry: str) -> Any:
    return opened(file).get_tensor(entry)  # memory-mapped: pages are read at first access


def _tensor(
    folder: Path, mapped: dict[str, mmap.mmap], info: Place, size: Shape, dtype: torch.dtype, name: str
) -> Tensor:
    """Return a stored tensor as a view of the memory-mapped file; its pages are read at first access."""
    path, end = inside(folder, info.file), info.offset + info.length
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint lacks '{path}', which holds '{name}'")
    if info.file not in mapped:
        with path.open("rb") as stream:
            mapped[info.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    memory = mapped[info.file]
    if end > len(memory):
        raise ValueError(f"'{path}' has {len(memory)} bytes and '{name}' ends at {end}: it is truncated or damaged")
    begin = info.offset + _data_offset(memory, info)
    return torch.frombuffer(memory, dtype=dtype, count=prod(size), offset=begin).view(size)


class _Window(io.RawIOBase):
    """A read-only file object over a stretch of memory."""

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


def _data_offset(memory: mmap.mmap, info: Place) -> int:
    """Return the byte offset of a tensor's data in what `torch.save` wrote: a zip archive without compression."""
    try:
        with zipfile.ZipFile(_Window(memory, info.offset, info.length)) as archive:
            entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ValueError(f"{info.file} holds no tensor at byte {info.offset}: it is damaged") from error
    at = entry.header_offset
    lengths: tuple[int, int] = struct.unpack_from("<HH", memory, info.offset + at + ZIP_LENGTHS)
    return at + ZIP_HEADER + sum(lengths)


class _Word:
    """A stand-in for objects of an index that nothing reads: enums, layouts, paths, plans. It accepts any arguments."""

    def __init__(self, *values: Any):
        self.values = values

    def __setstate__(self, state: Any) -> None:
        """Ignore the state, because nothing reads it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the item, because nothing reads it."""

    def append(self, value: Any) -> None:
        """Ignore the value, because nothing reads it."""

    def extend(self, values: Any) -> None:
        """Ignore the values, because nothing reads them."""


class _Properties:
    """A stand-in for a tensor's properties in an index, of which only the dtype is read."""

    dtype: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that allows only the classes of torch's index.

    A pickle can change any class that it gets. So the unpickler returns classes made for this reading, or torch's
    immutable types.
    """

    def __init__(self, stream: BinaryIO):
        super().__init__(stream)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._made:
            self._made[module, name] = self._make(module, name)
        return self._made[module, name]

    def _make(self, module: str, name: str) -> Any:
        # Only the module's own classes: it also has imports, and a name may have dots.
        known = getattr(torch_metadata, name, None) if module == torch_metadata.__name__ else None
        if (module, name) == (_StorageInfo.__module__, _StorageInfo.__name__):
            known = _StorageInfo
        elif (module, name) == ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"):
            known = Metadata
        if known is TensorProperties:
            return type(name, (_Properties,), {})
        if isinstance(known, type) and known.__module__ in (torch_metadata.__name__, _StorageInfo.__module__):
            return type(name, (_Word,) if isinstance(known, EnumMeta) else (known,), {})
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in STRANGERS or module.startswith(PLANS):
            return type(name, (_Word,), {})
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index of tensors")


@dataclass(frozen=True)
class Place:
    """The location of a rectangle's bytes: `length` bytes from `offset` in a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an index: its whole size, its type, and the start and size of each rectangle."""

    size: Shape
    dtype: torch.dtype
    chunks: list[tuple[Shape, Shape]]


@dataclass(frozen=True)
class DcpIndex:
    """The contents of torch's index of a folder, as plain values.

    `paths` maps a tensor to its path in the nested state.
    """

    tensors: dict[str, StoredTensor]
    places: dict[tuple[str, Shape], Place]
    paths: dict[str, tuple[str, ...]]


def read_index(file: Path) -> DcpIndex:
    """Read torch's index of a folder; raise a `ValueError` if the file is no index or holds anything else."""
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        if not isinstance(index, Metadata):
            raise ValueError(f"it holds a {type(index).__name__}")
        held = {n: t for n, t in index.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
        tensors = {name: _stored_tensor(tensor) for name, tensor in held.items()}
        places = {
            (str(where.fqn), _shape(where.offset)): Place(str(at.relative_path), int(at.offset), int(at.length))
            for where, at in index.storage_data.items()
            if where.offset is not None
        }
        paths = index.planner_data if isinstance(index.planner_data, dict) else {}
        return DcpIndex(tensors, places, {name: tuple(path) for name, path in paths.items() if name in tensors})
    except Exception as error:
        raise ValueError(f"'{file}' cannot be read ({error}): it is damaged, or none of ours") from error


def _stored_tensor(held: TensorStorageMetadata) -> StoredTensor:
    dtype = held.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of a tensor")
    return StoredTensor(_shape(held.size), dtype, [(_shape(c.offsets), _shape(c.sizes)) for c in held.chunks])


def _shape(sizes: Any) -> Shape:
    return tuple(map(int, sizes))
