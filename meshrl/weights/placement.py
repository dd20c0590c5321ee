"""Which rank holds which rectangle of which tensor, and where in its memory: what weight-sync plans are made of.

Everything here follows from sizes alone; no process group, no device. A tensor is a matrix (a vector is a column,
further dims join the columns). A slice is a rectangle of it and lies in one local parameter, at an offset and with two
strides, all in elements: this covers shards, packed and stacked parameters, transposed and flattened ones alike.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import ModuleNames, describe
from meshrl.engines.megatron.weight_map import Slice as MegatronSlice
from meshrl.models.key_map import Part, Shape, convert_weight_keys, matrix
from meshrl.parallel.layout import Layout
from meshrl.weights.boxes import ranges

FIELDS = ("rank", "tensor", "row", "rows", "col", "cols", "parameter", "offset", "row_stride", "col_stride")
SLICE = np.dtype([(name, np.int64) for name in FIELDS])


@dataclass(frozen=True)
class Placement:
    """A model over the ranks of one side. `slices` has one record (see `FIELDS`) for each rectangle of each rank."""

    title: str
    world_size: int
    tensors: dict[str, Shape]
    parameters: tuple[str, ...]
    slices: np.ndarray

    def of_rank(self, rank: int) -> np.ndarray:
        """The slices that a rank holds."""
        return self.slices[self.slices["rank"] == rank]

    def to_json(self) -> dict[str, Any]:
        """For another process."""
        fields = {name: getattr(self, name) for name in ("title", "world_size", "tensors", "parameters")}
        return fields | {"slices": base64.b64encode(zlib.compress(self.slices.tobytes(), 1)).decode()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Placement:
        """The inverse of `to_json`, also after a way through text."""
        return cls(
            fields["title"],
            fields["world_size"],
            {name: tuple(shape) for name, shape in fields["tensors"].items()},
            tuple(fields["parameters"]),
            np.frombuffer(zlib.decompress(base64.b64decode(fields["slices"])), SLICE),
        )

    def only(self, names: Iterable[str]) -> Placement:
        """The same placement of some tensors alone; parameters keep their numbers."""
        wanted = set(names)
        kept = np.array([place for place, name in enumerate(self.tensors) if name in wanted], np.int64)
        known = list(self.tensors)
        # Slices are sorted by tensor.
        start, end = (np.searchsorted(self.slices["tensor"], kept, side) for side in ("left", "right"))
        slices = self.slices[ranges(start, end - start)]
        slices["tensor"] = np.repeat(np.arange(len(kept)), end - start)
        tensors = {known[place]: self.tensors[known[place]] for place in kept.tolist()}
        return replace(self, tensors=tensors, slices=slices)

    def elements(self) -> int:
        """How many elements the tensors have together, each counted once."""
        return sum(rows * cols for rows, cols in map(matrix, self.tensors.values()))

    def elements_of_ranks(self) -> np.ndarray:
        """How many elements each rank holds."""
        size = self.slices["rows"] * self.slices["cols"]
        return np.bincount(self.slices["rank"], weights=size, minlength=self.world_size).astype(np.int64)


class PlacementBuilder:
    """Collects slices; numbers may be arrays that broadcast against each other."""

    def __init__(self, title: str, world_size: int):
        self.title, self.world_size = title, world_size
        self.tensors: dict[str, Shape] = {}
        self._tensor_ids: dict[str, int] = {}
        self._parameter_ids: dict[str, int] = {}
        self._single: list[tuple[int, ...]] = []
        self._arrays: list[np.ndarray] = []

    def tensor(self, name: str, shape: Shape) -> int:
        """The number of a tensor; the same name must always have the same shape."""
        known = self.tensors.setdefault(name, shape)
        if known != shape:
            raise ValueError(f"{self.title}: '{name}' has shape {list(known)} and {list(shape)}")
        return self._tensor_ids.setdefault(name, len(self._tensor_ids))

    def parameter(self, name: str) -> int:
        return self._parameter_ids.setdefault(name, len(self._parameter_ids))

    def add(self, *numbers: int) -> None:
        """One slice, its numbers in the order of `FIELDS`."""
        if numbers[3] > 0 and numbers[5] > 0:
            self._single.append(numbers)

    def add_arrays(self, **numbers: Any) -> None:
        """Many slices by field name; empty rectangles are left out."""
        shape = np.broadcast_shapes(*(np.shape(value) for value in numbers.values()))
        made = np.empty(shape, SLICE)
        for name in FIELDS:
            made[name] = numbers[name]
        self._arrays.append(made[(made["rows"] > 0) & (made["cols"] > 0)].reshape(-1))

    def build(self) -> Placement:
        single = np.array(self._single, SLICE) if self._single else np.empty(0, SLICE)
        slices = np.concatenate([single, *self._arrays])
        slices = slices[np.argsort(slices["tensor"], kind="stable")]
        return Placement(self.title, self.world_size, self.tensors, tuple(self._parameter_ids), slices)


def replicas(params: Mapping[str, Shape], world_size: int, model_type: str = "", title: str = "") -> Placement:
    """Every rank holds the whole model as a Hugging Face module."""
    builder = PlacementBuilder(title or f"{world_size} whole copies", world_size)
    ranks = np.arange(world_size)
    for name, parts in convert_weight_keys(params, model_type).items():
        parameter = builder.parameter(name)
        for part in parts:
            rows, cols = matrix(part.shape)
            builder.add_arrays(
                rank=ranks, tensor=builder.tensor(part.name, part.shape), row=0, rows=rows, col=0, cols=cols,
                parameter=parameter, offset=part.offset, row_stride=part.row_stride, col_stride=part.col_stride,
            )  # fmt: skip
    return builder.build()


def fsdp2(params: Mapping[str, Shape], layout: Layout, model_type: str = "") -> Placement:
    """FSDP2 by a `shard_layout`: rows of every parameter in equal steps, rounded up, over the axis `fsdp`.

    Ranks that differ along `ddp` hold the same rows: HSDP.
    """
    builder = PlacementBuilder(f"FSDP2 {_sizes(layout)}", layout.world_size)
    place = np.array([layout.index(rank, "fsdp") for rank in range(layout.world_size)])
    for name, parts in convert_weight_keys(params, model_type).items():
        shape = params[name]
        rows, cols = matrix(shape)
        step = -(-rows // layout.size("fsdp"))
        low = np.minimum(place * step, rows) * cols
        high = np.minimum((place + 1) * step, rows) * cols
        _add_ranges(builder, builder.parameter(name), parts, low, high)
    return builder.build()


def fsdp1(
    units: Mapping[str, Mapping[str, Shape]], layout: Layout, model_type: str = "", *, alignment: int = 1
) -> Placement:
    """FSDP1: each unit's parameters laid end to end in one flat parameter, which is cut into equal parts.

    `units` maps the name of a unit's flat parameter to its parameters in order. `alignment`: every parameter starts at
    a multiple of this many elements (torch pads to 16 bytes where `use_orig_params` is set).
    """
    builder = PlacementBuilder(f"FSDP1 {_sizes(layout)}", layout.world_size)
    place = np.array([layout.index(rank, "fsdp") for rank in range(layout.world_size)])
    shards = layout.size("fsdp")
    for unit, params in units.items():
        parts: list[Part] = []
        end = 0
        for name, inner in convert_weight_keys(params, model_type).items():
            rows, cols = matrix(params[name])
            end = -(-end // alignment) * alignment
            parts += [Part(p.name, p.shape, p.offset + end, p.row_stride, p.col_stride) for p in inner]
            end += rows * cols
        step = -(-end // shards)
        _add_ranges(builder, builder.parameter(unit), parts, place * step, (place + 1) * step)
    return builder.build()


def megatron(
    hf_config: Any,
    ranks: ParallelRanks,
    names: ModuleNames | None = None,
    *,
    vocab_size: int | None = None,
    value_head: bool = False,
) -> Placement:
    """A Megatron layout, from the engine's own description. Parameters are called `<chunk>/<name>`."""
    sizes = {axis: getattr(ranks, axis) for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    sizes["etp"] = 1 if ranks.etp == ranks.tp and ranks.ep == 1 else ranks.etp
    title = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    builder = PlacementBuilder(f"Megatron {title}".strip(), ranks.world_size)
    known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for rank in range(ranks.world_size):
        there = ranks.at(rank)
        key = (there.pp_rank, there.tp_rank, there.ep_rank, there.etp_rank)
        if key not in known:
            pieces = describe(hf_config, there, names, vocab_size=vocab_size, value_head=value_head)
            known[key] = [_megatron_numbers(builder, piece) for piece in pieces]
        for numbers in known[key]:
            builder.add(rank, *numbers)
    return builder.build()


def _megatron_numbers(builder: PlacementBuilder, piece: MegatronSlice) -> tuple[int, ...]:
    rows, cols = matrix(piece.size)
    row, col = piece.start[0], piece.start[1] if len(piece.start) > 1 else 0
    memory = piece.view or piece.parameter_shape
    strides = [1] * len(memory)
    for dim in range(len(memory) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * memory[dim + 1]
    offset = sum(place * stride for place, stride in zip(piece.offset, strides, strict=True))
    row_stride, col_stride = (strides[-2:][0], 1) if len(piece.size) > 1 else (1, 1)
    if piece.transposed:
        row_stride, col_stride = col_stride, row_stride
    parameter = builder.parameter(f"{piece.chunk}/{piece.parameter}")
    tensor = builder.tensor(piece.name, piece.shape)
    return tensor, row, rows, col, cols, parameter, offset, row_stride, col_stride


def _add_ranges(
    builder: PlacementBuilder, parameter: int, parts: Sequence[Part], low: np.ndarray, high: np.ndarray
) -> None:
    """Slices of ranks that hold elements [low, high) of a flat parameter: whole rows, or pieces of rows at the ends."""
    tensor = np.array([builder.tensor(part.name, part.shape) for part in parts])
    size = np.array([matrix(part.shape) for part in parts])
    start = np.array([part.offset for part in parts])
    cols = size[:, 1]
    ranks = np.arange(builder.world_size)[:, None]
    low, high = low[:, None], high[:, None]
    # Of each part, in its own elements.
    first = np.clip(low - start, 0, size[:, 0] * cols)
    last = np.clip(high - start, 0, size[:, 0] * cols)
    full, end = -(-first // cols), last // cols
    # A piece of the first row, whole rows, a piece of the last row; the first and the last may be the same row.
    head = np.where(first % cols > 0, np.minimum(last, full * cols) - first, 0)
    tail = np.where((last % cols > 0) & (end >= full), last % cols, 0)
    pieces: Iterable[tuple[Any, Any, Any, Any, Any]] = (
        (first // cols, np.minimum(head, 1), first % cols, head, first),
        (full, np.maximum(end - full, 0), 0, cols, full * cols),
        (end, np.minimum(tail, 1), 0, tail, end * cols),
    )
    for row, rows, col, width, begin in pieces:
        builder.add_arrays(
            rank=ranks, tensor=tensor, row=row, rows=rows, col=col, cols=width, parameter=parameter,
            offset=start + begin - low, row_stride=cols, col_stride=1,
        )  # fmt: skip


def _sizes(layout: Layout) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.axes if size > 1) or "1 rank"
