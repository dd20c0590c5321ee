"""An engine's state in a folder of safetensors, which any layout and either engine can read.

    tensors.json                  the index: names, whole shapes, and in which file each rectangle lies
    tensors-<rank>.safetensors    the rectangles a rank wrote (-<rank>-1: a second one of the same tensor, and so on)
    extra-<rank>.plain            schedule and random states, beside it, as plain data

Tensors are `model.<name>` (float32 masters where there are any) and `optimizer.state.<name>.<kind>` (AdamW's moments
and `step`) under the modules' names. A rank writes the rectangles that no rank before it holds, and nobody waits for
anybody: what each rank says of its file (`Part`) makes the index. Where a rectangle begins also stands in the file's
header as torch's distributed checkpoints (DCP) have it, whose `HuggingFaceStorageReader` reads such a folder. torch's
own planners are not used: they know DTensors, not parts of Megatron's packed parameters, and agree over collectives;
nor are its files, whose index is a pickle.
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
# Of the index and the files that it names.
VERSION = 3
# What torch's reader looks for in the header of a file.
DCP_PLACES = "DCP_SHARDING_INFO"
PARAM = "param"
STEP = "step"
READ_BYTES = 8 << 20


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
    """In which file of its folder a rectangle lies, under the name that `key_of` gives it."""

    kind: str
    name: str
    shape: Shape
    start: Shape
    size: Shape
    dtype: torch.dtype
    file: str


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


def key_of(kind: str, name: str) -> str:
    """What a tensor is called in a file, and in the state that torch makes of the folder."""
    return f"model.{name}" if kind == PARAM else f"optimizer.state.{name}.{kind}"


def write_snapshot(snapshot: Snapshot, folder: Path, rank: int) -> Part:
    """Writes a rank's files; one tensor at a time is copied to host memory."""
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
    """A file that takes its checksum while it is written: reading it again would cost as much as writing it."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.sum = stream, 0

    def write(self, data: bytes) -> int:
        self.sum = zlib.crc32(data, self.sum)
        try:
            return self._stream.write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._stream.name) from error


def write_index(folder: Path, parts: Iterable[Iterable[Entry]]) -> Path:
    """Completes a folder: what all ranks have written."""
    listed = [
        [e.kind, e.name, e.shape, e.start, e.size, str(e.dtype).removeprefix("torch."), e.file]
        for part in parts
        for e in part
    ]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in listed)
    (folder / INDEX).write_text(f'{{"format": {VERSION}, "tensors": [\n{lines}\n]}}\n')
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


# What a checkpoint keeps beside tensors: the schedule and the random states, one file a rank.


def extra_state(device: torch.device, schedule: LearningRate | None) -> dict[str, Any]:
    """This rank's schedule and random states, as tensors and plain values only."""
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
    """Reads it back; on a larger world new ranks take the schedule of rank 0 and keep their own random states."""
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
