"""An engine's state as a folder of safetensors, which any layout and either engine can read.

    tensors.json                  the index: names, whole shapes, and in which file each rectangle lies
    tensors-<rank>.safetensors    the rectangles a rank wrote (-<rank>-1: a second one of the same tensor, and so on)
    extra-<rank>.plain            schedule and random states, as plain data

Tensors are named `model.<name>` (float32 masters if there are any) and `optimizer.state.<name>.<kind>` (AdamW's moments
and `step`), where `<name>` is the modules' name. A rank writes the rectangles that no lower rank holds, and ranks do
not wait for each other. The index is made from each rank's description of its files (`Part`).

The start of a rectangle also stands in the file's header, in the form of torch's distributed checkpoints (DCP). torch's
`HuggingFaceStorageReader` can therefore read such a folder. torch's planners are not used: they handle DTensors but not
parts of Megatron's packed parameters, and they need collectives. torch's files are not used either, because their index
is a pickle.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from meshrl.data import plain_data
from meshrl.data.serialization import write_tensors
from meshrl.engines.optim import LearningRate

Shape = tuple[int, ...]
INDEX = "tensors.json"
# The format of the index and of the files that it names.
VERSION = 3
# The key that torch's reader looks for in the header of a file.
DCP_PLACES = "DCP_SHARDING_INFO"
PARAM = "param"
STEP = "step"
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Rectangle:
    """The part `[start, start + tensor.shape)` of the whole tensor with this name and shape, of one kind of state."""

    kind: str
    name: str
    shape: Shape
    start: Shape
    tensor: Tensor


@dataclass(frozen=True)
class Snapshot:
    """The part of a model's state that one rank writes.

    The tensors may be the engine's own memory; `copied` makes them independent of the engine.
    """

    rectangles: Iterable[Rectangle] = ()
    extra: dict[str, Any] | None = None

    def copied(self) -> Snapshot:
        """Return a snapshot whose tensors are copies in host memory."""
        kept = [replace(r, tensor=r.tensor.detach().to("cpu", copy=True)) for r in self.rectangles]
        return replace(self, rectangles=kept)


@dataclass(frozen=True)
class Entry:
    """An entry of the index: the file of its folder in which a rectangle lies, under the name given by `key_of`."""

    kind: str
    name: str
    shape: Shape
    start: Shape
    size: Shape
    dtype: torch.dtype
    file: str


@dataclass(frozen=True)
class Part:
    """The files that one rank has written into a folder; `write_index` completes the folder from all ranks' entries.

    `sums` holds the checksums that were computed while writing.
    """

    files: list[Path] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    sums: dict[Path, int] = field(default_factory=dict)

    def records(self, root: Path) -> list[FileRecord]:
        """Return the name, size and checksum of each file of this rank."""
        return [record_file(file, root, self.sums.get(file)) for file in self.files]


@dataclass(frozen=True)
class FileRecord:
    """The expected size (bytes) and CRC-32 of a checkpoint file; `name` is relative to the checkpoint."""

    name: str
    size: int
    crc32: int


def key_of(kind: str, name: str) -> str:
    """Return a tensor's name in a file, which is also its name in the state that torch reads from the folder."""
    return f"model.{name}" if kind == PARAM else f"optimizer.state.{name}.{kind}"


def write_snapshot(snapshot: Snapshot, folder: Path, rank: int) -> Part:
    """Write a rank's files; one tensor at a time is copied to host memory."""
    folder.mkdir(parents=True, exist_ok=True)
    part = Part()
    files: list[dict[str, Rectangle]] = []
    seen: dict[str, int] = {}
    for rectangle in snapshot.rectangles:
        key = key_of(rectangle.kind, rectangle.name)
        number = seen[key] = seen.get(key, -1) + 1  # a name occurs once in a file
        files += [{}] if number == len(files) else []
        files[number][key] = rectangle
    for number, rectangles in enumerate(files):
        file = folder / f"tensors-{rank}{f'-{number}' if number else ''}.safetensors"
        places = {key: {"saved_offsets": list(rectangle.start)} for key, rectangle in rectangles.items()}
        with file.open("wb") as plain_stream:
            stream = _Summed(plain_stream)
            tensors = {key: rectangle.tensor for key, rectangle in rectangles.items()}
            write_tensors(tensors, stream, {DCP_PLACES: json.dumps(places, separators=(",", ":"))})
        part.files.append(file)
        part.sums[file] = stream.sum
        part.entries.extend(
            Entry(r.kind, r.name, r.shape, r.start, tuple(r.tensor.shape), r.tensor.dtype, file.name)
            for r in rectangles.values()
        )
    if snapshot.extra is not None:
        part.files.append(folder / f"extra-{rank}.plain")
        plain_data.save(snapshot.extra, part.files[-1], "the state beside the tensors")
    return part


class _Summed:
    """A binary file that computes its CRC-32 while it is written; reading it again would cost as much as writing it."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.sum = stream, 0

    def write(self, data: bytes) -> int:
        self.sum = zlib.crc32(data, self.sum)
        try:
            return self._stream.write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._stream.name) from error


def write_index(folder: Path, parts: Iterable[Iterable[Entry]]) -> Path:
    """Write the index of a folder from the entries of all ranks, which completes the folder."""
    listed = [
        [e.kind, e.name, e.shape, e.start, e.size, str(e.dtype).removeprefix("torch."), e.file]
        for part in parts
        for e in part
    ]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in listed)
    (folder / INDEX).write_text(f'{{"format": {VERSION}, "tensors": [\n{lines}\n]}}\n')
    return folder / INDEX


def record_file(file: Path, root: Path, crc32: int | None = None) -> FileRecord:
    """Flush a newly written file to disk and return its size and checksum.

    The checksum is computed unless `crc32` gives it.
    """
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    return FileRecord(str(file.relative_to(root)), file.stat().st_size, checksum(file) if crc32 is None else crc32)


def checksum(file: Path) -> int:
    """Compute the CRC-32 of a file's content, block by block."""
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value


# The state that a checkpoint keeps besides tensors: the schedule and the random states, one file per rank.


def extra_state(device: torch.device, schedule: LearningRate | None) -> dict[str, Any]:
    """Return this rank's schedule and random states, as tensors and plain values only."""
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {"schedule_steps": None if schedule is None else schedule.steps, "random": states}


def load_extra(folder: Path, rank: int, device: torch.device, schedule: LearningRate | None) -> dict[str, Any]:
    """Load the schedule and random states of this rank.

    On a larger world, new ranks take the schedule of rank 0 and keep their own random states.
    """
    own = folder / f"extra-{rank}.plain"
    extra: dict[str, Any] = plain_data.load(own if own.is_file() else folder / "extra-0.plain")
    if schedule is not None and extra["schedule_steps"] is not None:
        schedule.set_steps(extra["schedule_steps"])
    if not own.is_file():
        return {}
    states: dict[str, Any] = extra["random"]
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    if device.type == "cuda" and isinstance(states.get("cuda"), Tensor):
        torch.cuda.set_rng_state(states["cuda"], device)
    return extra
