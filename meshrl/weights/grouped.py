"""Many rectangles at once on a GPU: copied and summed by one kernel, from a table of addresses that is made once.

A sync between layouts of one process has hundreds of copies and as many sums, each a few microseconds of work: one by
one, launching them would take longer than moving the bytes. The sums are those of `checksum`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from meshrl.weights.checksum import COL_SEED, ROW_SEED, weight_table
from meshrl.weights.plan import RankPlan, ReshardPlan
from meshrl.weights.shards import Shards

TILE_ROWS, TILE_COLS = 16, 1024
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The table's columns: where a rectangle is read and written (0: only summed), its size, row strides, and its place.
FROM, TO, ROWS, COLS, FROM_STRIDE, TO_STRIDE, ROW, COL = range(8)
FIELDS = 8
Made = TypeVar("Made")


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    table, tiles, row_weights, col_weights, sums,
    from_type: tl.constexpr, to_type: tl.constexpr, with_sums: tl.constexpr,
    tile_rows: tl.constexpr, tile_cols: tl.constexpr, fields: tl.constexpr,
):  # fmt: skip
    """One tile a program, row after row: read once, written if there is somewhere to write, and summed by its bits.

    Every thread keeps sums of its own columns; only the last step brings them together.
    """
    tile = tl.program_id(0)
    number = tl.load(tiles + 3 * tile)
    first = tl.load(tiles + 3 * tile + 1)
    cols = tl.load(tiles + 3 * tile + 2) + tl.arange(0, tile_cols)
    entry = table + number.to(tl.int64) * fields
    rows = tl.load(entry + 2)
    inside = cols < tl.load(entry + 3)
    origin = tl.load(entry).to(tl.pointer_type(from_type)) + first * tl.load(entry + 4)
    target = tl.load(entry + 1)
    place = target.to(tl.pointer_type(to_type)) + first * tl.load(entry + 5)
    from_stride, to_stride = tl.load(entry + 4), tl.load(entry + 5)
    of_rows = row_weights + tl.load(entry + 6) + first
    of_cols = tl.load(col_weights + tl.load(entry + 7) + cols, mask=inside, other=0)
    total = tl.zeros((tile_cols,), tl.int64)
    for row in tl.static_range(tile_rows):
        there = inside & (first + row < rows)
        values = tl.load(origin + row * from_stride + cols, mask=there, other=0.0).to(to_type)
        if target != 0:
            tl.store(place + row * to_stride + cols, values, mask=there)
        if with_sums:
            if to_type.primitive_bitwidth == 16:
                bits = values.to(tl.int16, bitcast=True).to(tl.int64)
            else:
                bits = values.to(tl.int32, bitcast=True).to(tl.int64)
            total += bits * (of_cols + tl.load(of_rows + row, mask=first + row < rows, other=0))
    if with_sums:
        tl.atomic_add(sums + number, tl.sum(total, 0))


@dataclass(frozen=True)
class _Batch:
    """The rectangles of one pair of types."""

    from_type: torch.dtype
    to_type: torch.dtype
    tiles: Tensor  # [tiles, 3]: number of the rectangle, first row, first column


class Grouped:
    """Rectangles of one rank, in the order given: `run` copies those that have a target, and sums all of them."""

    def __init__(self, table: np.ndarray, types: Sequence[tuple[torch.dtype, torch.dtype]], device: torch.device):
        self.device, self.count = device, len(table)
        self.table = torch.from_numpy(table).to(device)
        ends = (table[:, ROW] + table[:, ROWS]).max(initial=1), (table[:, COL] + table[:, COLS]).max(initial=1)
        self.weights = tuple(
            weight_table(int(end), seed, device) for end, seed in zip(ends, (ROW_SEED, COL_SEED), strict=True)
        )
        self.batches = []
        for pair in dict.fromkeys(types):
            numbers = np.array([number for number, own in enumerate(types) if own == pair])
            tiles = torch.from_numpy(_tiles(table, numbers)).to(device)
            self.batches.append(_Batch(*pair, tiles))

    def run(self, with_sums: bool = True) -> Tensor:
        """The sum of each rectangle as it was read (zeros without `with_sums`), int64 [rectangles]."""
        sums = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        for batch in self.batches:
            _move[(len(batch.tiles),)](
                self.table, batch.tiles, *self.weights, sums, TYPES[batch.from_type], TYPES[batch.to_type],
                with_sums, TILE_ROWS, TILE_COLS, FIELDS, num_warps=4,
            )  # fmt: skip
        return sums


def _tiles(table: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[tiles, 3] int32: every tile of the rectangles `numbers`."""
    down, across = -(-table[numbers, ROWS] // TILE_ROWS), -(-table[numbers, COLS] // TILE_COLS)
    counts = down * across
    owner = np.repeat(np.arange(len(numbers)), counts)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    row, col = np.divmod(place, across[owner])
    return np.stack([numbers[owner], row * TILE_ROWS, col * TILE_COLS], 1).astype(np.int32)


def can_group(*sides: tuple[Shards, np.ndarray]) -> bool:
    """Whether these slices can go through the kernel: known types, rows in one piece."""
    return all(
        bool(((held["col_stride"] == 1) | (held["cols"] == 1)).all())
        and all(shards.tensors[shards.placement.parameters[p]].dtype in TYPES for p in np.unique(held["parameter"]))
        for shards, held in sides
    )


def addresses(shards: Shards, held: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, list[torch.dtype]]:
    """Where each rectangle `boxes` of the slices `held` begins in memory, and its type."""
    owners, of_owner = np.unique(held["parameter"], return_inverse=True)
    tensors = [shards.tensors[shards.placement.parameters[owner]] for owner in owners]
    bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)[of_owner]
    sizes = np.array([tensor.element_size() for tensor in tensors], dtype=np.int64)[of_owner]
    offsets = held["offset"] + (boxes["row"] - held["row"]) * held["row_stride"] + boxes["col"] - held["col"]
    return bases + offsets * sizes, [tensors[owner].dtype for owner in of_owner.tolist()]


def grouped_sums(shards: Shards, held: np.ndarray) -> Grouped | None:
    """Sums of whole slices; None where the kernel cannot."""
    if not can_group((shards, held)):
        return None
    table = np.zeros((len(held), FIELDS), dtype=np.int64)
    table[:, FROM], types = addresses(shards, held, held)
    _describe(table, held, held)
    return Grouped(table, [(dtype, dtype) for dtype in types], shards.device)


@dataclass(frozen=True)
class Copies:
    """The copies within one rank of a plan, and their bytes; `shared` of these lie in the same memory already."""

    moves: Grouped
    copied: int
    shared: int


def grouped_copies(plan: ReshardPlan, part: RankPlan, source: Shards, destination: Shards) -> Copies | None:
    """All copies of a rank; None where the kernel cannot."""
    boxes = part.copies
    ours, theirs = plan.source.slices[part.copy_source], plan.destination.slices[part.copy_destination]
    if not can_group((source, ours), (destination, theirs)):
        return None
    table = np.zeros((len(boxes), FIELDS), dtype=np.int64)
    table[:, FROM], from_types = addresses(source, ours, boxes)
    places, to_types = addresses(destination, theirs, boxes)
    same = (table[:, FROM] == places) & (ours["row_stride"] == theirs["row_stride"])
    same &= np.array([a == b for a, b in zip(from_types, to_types, strict=True)], dtype=bool)
    table[:, TO] = np.where(same, 0, places)
    table[:, TO_STRIDE] = theirs["row_stride"]
    _describe(table, ours, boxes)
    sizes = boxes["rows"] * boxes["cols"] * np.array([dtype.itemsize for dtype in to_types])
    moves = Grouped(table, list(zip(from_types, to_types, strict=True)), destination.device)
    return Copies(moves, int(sizes.sum()), int(sizes[same].sum()))


def _describe(table: np.ndarray, held: np.ndarray, boxes: np.ndarray) -> None:
    table[:, FROM_STRIDE] = held["row_stride"]
    for column, name in ((ROWS, "rows"), (COLS, "cols"), (ROW, "row"), (COL, "col")):
        table[:, column] = boxes[name]


class Tables:
    """Keeps what was made for a sync's copies and sums, as long as the memory that it points to stays where it is."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[list[int], Any]] = {}

    def copies(self, plan: ReshardPlan, part: RankPlan, source: Shards, destination: Shards) -> Copies | None:
        """See `grouped_copies`."""
        return self._get("copies", (source, destination), lambda: grouped_copies(plan, part, source, destination))

    def sums(self, shards: Shards, held: np.ndarray) -> Grouped | None:
        """See `grouped_sums`; `held` are always the same slices."""
        return self._get("sums", (shards,), lambda: grouped_sums(shards, held))

    def _get(self, what: str, sides: Sequence[Shards], make: Callable[[], Made | None]) -> Made | None:
        if any(type(shards.tensors) is not dict for shards in sides):
            return None
        memory = [tensor.data_ptr() for shards in sides for tensor in shards.tensors.values()]
        known = self._made.get(what)
        if known is None or known[0] != memory:
            known = self._made[what] = memory, make()
        return known[1]
