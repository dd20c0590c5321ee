"""Reading of the folders that `state_files` describes; only bytes that overlap the requested rectangles are read."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrl.config.keys import count
from meshrl.config.model_folder import read_header
from meshrl.data.serialization import DTYPE_NAMES, inside
from meshrl.engines import old_state_files
from meshrl.engines.state_files import INDEX, PARAM, STEP, VERSION, Rectangle, Shape, key_of
from meshrl.files import read_json

Key = tuple[str, str]
TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


@dataclass(frozen=True)
class Chunk:
    """A stored rectangle; `view()` returns an object that can be sliced without reading the rest."""

    start: Shape
    size: Shape
    view: Callable[[], Any]


@dataclass(frozen=True)
class _File:
    """A memory-mapped file of tensors, whose pages are read at first access."""

    memory: mmap.mmap
    begin: int
    entries: dict[str, Any]


class Stored:
    """All rectangles of a role's checkpoint, in whichever files they are.

    With `before`, folders of older formats are accepted as well; `meshrl convert` uses this.
    """

    def __init__(self, folder: Path, before: bool = False):
        self.folder = Path(folder)
        self.shapes: dict[Key, Shape] = {}
        self._where: dict[Key, list[Chunk]] = {}
        self._opened: dict[str, _File] = {}
        if not self.folder.is_dir():
            raise FileNotFoundError(f"no checkpoint at '{folder}'")
        if (self.folder / INDEX).is_file():
            self._take_index()
        elif before and (listed := old_state_files.entries(self.folder)):
            for kind, name, shape, start, size, view in listed:
                self._add((kind, name), shape, Chunk(start, size, view))
        else:
            raise FileNotFoundError(f"'{folder}' is no checkpoint: it has no {INDEX}")

    def _take_index(self) -> None:
        try:
            content = read_json(self.folder / INDEX)
            if content["format"] != VERSION:
                raise ValueError(f"its format is {content['format']}, not {VERSION}")
            for kind, name, shape, start, size, dtype, file in content["tensors"]:
                place = tuple(map(int, start)), tuple(map(int, size))
                inside(self.folder, file)
                view = partial(self._tensor, file, key_of(kind, name), place[1], TYPES[dtype])
                self._add((str(kind), str(name)), tuple(map(int, shape)), Chunk(*place, view))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"'{self.folder / INDEX}' cannot be read ({error}): it is damaged, or none of ours"
            ) from error

    def _add(self, key: Key, shape: Shape, chunk: Chunk) -> None:
        self.shapes[key] = shape
        self._where.setdefault(key, []).append(chunk)

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield all stored rectangles as they were written."""
        for (kind, name), chunks in self._where.items():
            for chunk in chunks:
                yield Rectangle(kind, name, self.shapes[kind, name], chunk.start, chunk.view())

    def steps_of(self, name: str | None = None) -> int:
        """Return how many optimizer steps a parameter has had.

        A parameter without its own count gets the largest count of all parameters.
        """
        names = [name] if name is not None and (STEP, name) in self.shapes else self.names(STEP)
        return max((int(self.whole(found, STEP)) for found in names), default=0)

    def names(self, kind: str = PARAM) -> list[str]:
        """Return the names of the tensors of a kind, in the order in which they were written."""
        return [name for found, name in self._where if found == kind]

    def check_no_more_than(self, names: Collection[str]) -> None:
        """Raise a `ValueError` if there are weights whose names are not in `names`, the model's weights."""
        more = [name for name in self.names() if name not in names]
        if more:
            raise ValueError(
                f"'{self.folder}' is of another model: it holds {count(len(more), 'weight')} more, such as '{more[0]}'"
            )

    def check(self, name: str, shape: Shape, kind: str = PARAM) -> None:
        """Raise a `ValueError` unless all elements of a tensor of this shape are stored."""
        held = sum(prod(chunk.size) for chunk in self._where.get((kind, name), []))
        if held != prod(shape) or self.shapes.get((kind, name)) != shape:
            raise ValueError(f"'{self.folder}' holds {held} of {prod(shape)} elements of '{name}' ({kind})")

    def whole(self, name: str, kind: str = PARAM, dtype: torch.dtype | None = None) -> Tensor:
        """Return one whole tensor, assembled from its rectangles."""
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
        """Copy the stored values of a rectangle into `target`, which has the rectangle's shape.

        The rectangle begins at `start` of a tensor of `shape`. Raise a `ValueError` if any element of it is not stored.
        """
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

    def _tensor(self, name: str, key: str, size: Shape, dtype: torch.dtype) -> Tensor:
        """Return a stored tensor as a view of the memory-mapped file."""
        path = self.folder / name
        if name not in self._opened:
            self._opened[name] = _open(path, key)
        file = self._opened[name]
        held = file.entries.get(key)
        if held is None or held["dtype"] != DTYPE_NAMES[dtype] or tuple(held["shape"]) != size:
            raise ValueError(f"'{path}' does not hold '{key}' as {list(size)} of {dtype}: it is of another checkpoint")
        begin, end = file.begin + held["data_offsets"][0], file.begin + held["data_offsets"][1]
        if end > len(file.memory) or end - begin != prod(size) * dtype.itemsize or held["data_offsets"][0] < 0:
            raise ValueError(
                f"'{path}' has {len(file.memory)} bytes and '{key}' ends at {end}: it is truncated or damaged"
            )
        if begin == end:
            return torch.empty(size, dtype=dtype)
        return torch.frombuffer(file.memory, dtype=dtype, count=prod(size), offset=begin).view(size)


def _open(path: Path, key: str) -> _File:
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint lacks '{path}', which holds '{key}'")
    try:
        length, entries = read_header(path)
    except Exception as error:
        raise ValueError(f"'{path}' has no header of safetensors: it is truncated or damaged") from error
    with path.open("rb") as stream:
        return _File(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), 8 + length, entries)
