"""An engine's state in files that any layout and either engine can read: rectangles of tensors under module names.

    tensors-<rank>.json                  what a rank wrote: names, places, and what they are
    tensors-<rank>-<n>.safetensors       the rectangles themselves
    extra-<rank>.pt                      schedule and random states

A rank writes the rectangles that no rank before it holds, and reads, of all files, only what overlaps its own. Kinds
are `param` (float32 masters where there are any) and AdamW's two moments. No collective is needed once the state is a
`Snapshot`, so that a thread can write it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrl.models.tensor_files import open_tensors, save_tensors

Shape = tuple[int, ...]
FILE_BYTES = 2 << 30
READ_BYTES = 8 << 20
# For all parameters that have no number of steps of their own.
ALL = "*"


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
    steps: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] | None = None

    def copied(self) -> Snapshot:
        """The same in host memory of its own."""
        kept = [replace(r, tensor=r.tensor.detach().to("cpu", copy=True)) for r in self.rectangles]
        return replace(self, rectangles=kept)


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it must be found again; `name` is relative to the checkpoint."""

    name: str
    size: int
    crc32: int


def write_snapshot(snapshot: Snapshot, folder: Path, rank: int) -> list[Path]:
    """Writes a rank's files; of rectangles that come as a stream, one file's are in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    index: list[dict[str, Any]] = []
    for number, part in enumerate(_parts(snapshot.rectangles)):
        file = folder / f"tensors-{rank}-{number}.safetensors"
        tensors: dict[str, Tensor] = {}
        for rectangle in part:
            entry = str(len(index))
            tensors[entry] = rectangle.tensor
            index.append(
                {
                    "kind": rectangle.kind,
                    "name": rectangle.name,
                    "shape": rectangle.shape,
                    "start": rectangle.start,
                    "size": tuple(rectangle.tensor.shape),
                    "file": file.name,
                    "entry": entry,
                }
            )
        save_tensors(tensors, file)
        written.append(file)
        part.clear()
        tensors.clear()
    listing = folder / f"tensors-{rank}.json"
    listing.write_text(json.dumps({"steps": snapshot.steps, "tensors": index}))
    written.append(listing)
    if snapshot.extra is not None:
        torch.save(snapshot.extra, folder / f"extra-{rank}.pt")
        written.append(folder / f"extra-{rank}.pt")
    return written


def _parts(rectangles: Iterable[Rectangle]) -> Iterator[list[Rectangle]]:
    part: list[Rectangle] = []
    held = 0
    for rectangle in rectangles:
        size = rectangle.tensor.numel() * rectangle.tensor.element_size()
        if part and held + size > FILE_BYTES:
            yield part
            part, held = [], 0
        part.append(rectangle)
        held += size
    if part:
        yield part


def record_file(file: Path, root: Path) -> FileRecord:
    """Size and checksum of a file that has just been written; it is on the disk afterwards."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    return FileRecord(str(file.relative_to(root)), file.stat().st_size, checksum(file))


def checksum(file: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value


class Stored:
    """All rectangles of a role's checkpoint, wherever they lie."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.shapes: dict[tuple[str, str], Shape] = {}
        self.steps: dict[str, int] = {}
        self._where: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._open: dict[str, Any] = {}
        if not self.folder.is_dir():
            raise FileNotFoundError(f"no checkpoint at '{folder}'")
        listings = sorted(self.folder.glob("tensors-*.json"))
        if not listings:
            raise FileNotFoundError(f"'{folder}' is no checkpoint: it has no tensors-*.json")
        for listing in listings:
            content = json.loads(listing.read_text())
            for name, steps in content["steps"].items():
                self.steps[name] = max(steps, self.steps.get(name, 0))
            for entry in content["tensors"]:
                key = (entry["kind"], entry["name"])
                self.shapes[key] = tuple(entry["shape"])
                self._where.setdefault(key, []).append(entry)

    def steps_of(self, name: str) -> int:
        """How many optimizer steps a parameter has had."""
        return self.steps.get(name, max(self.steps.values(), default=0))

    def names(self, kind: str = "param") -> list[str]:
        """The tensors of a kind, in the order they were written in."""
        return [name for found, name in self._where if found == kind]

    def dtype(self, name: str, kind: str = "param") -> str:
        """The type a tensor is stored in, as safetensors calls it."""
        return str(self._view(self._where[kind, name][0]).get_dtype())

    def check(self, name: str, shape: Shape, kind: str = "param") -> None:
        """A `ValueError` unless all of a tensor of this shape is there."""
        held = sum(prod(entry["size"]) for entry in self._where.get((kind, name), []))
        if held != prod(shape) or self.shapes.get((kind, name)) != shape:
            raise ValueError(f"'{self.folder}' holds {held} of {prod(shape)} elements of '{name}' ({kind})")

    def whole(self, name: str, kind: str = "param", dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, put together."""
        if (kind, name) not in self.shapes:
            raise ValueError(f"the checkpoint at '{self.folder}' has no '{name}' ({kind})")
        entry, shape = self._where[kind, name][0], self.shapes[kind, name]
        first = self._view(entry)
        if tuple(entry["size"]) == shape:
            found: Tensor = first[tuple(slice(0, length) for length in shape)]
            return found if dtype is None else found.to(dtype)
        target = torch.empty(shape, dtype=dtype or first[tuple(slice(0, 0) for _ in shape)].dtype)
        self.fill(kind, name, tuple(0 for _ in shape), target)
        return target

    def fill(self, kind: str, name: str, start: Shape, target: Tensor) -> None:
        """Copies all that is stored of a rectangle into `target`, which has its shape."""
        filled = 0
        shape = self.shapes.get((kind, name), ())
        ends = [begin + length for begin, length in zip(start, target.shape, strict=True)]
        if shape and (len(shape) != target.dim() or any(a > b for a, b in zip(ends, shape, strict=True))):
            raise ValueError(
                f"'{name}' is {list(shape)} in the checkpoint, the model wants it up to {ends}: it is of another model"
            )
        for entry in self._where.get((kind, name), []):
            low = [max(a, b) for a, b in zip(start, entry["start"], strict=True)]
            high = [min(a, b + n) for a, b, n in zip(ends, entry["start"], entry["size"], strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            stored = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, entry["start"], strict=True))
            own = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            part = self._view(entry)[stored]
            target[own] = part.to(target.device)
            filled += prod(b - a for a, b in zip(low, high, strict=True))
        if filled != target.numel():
            raise ValueError(
                f"the checkpoint holds {filled} of {target.numel()} elements of '{name}' "
                f"({kind}, from {list(start)} on): it is of another model, or incomplete"
            )

    def _view(self, entry: dict[str, Any]) -> Any:
        file = entry["file"]
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise FileNotFoundError(f"the checkpoint lacks '{path}', which holds '{entry['name']}'")
            self._open[file] = open_tensors(path)
        return self._open[file].get_slice(entry["entry"])
