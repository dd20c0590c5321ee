"""Copies and checksums of many rectangles on a GPU in one kernel, from a table of tiles that is made once.

A sync between layouts of one process has hundreds of copies and as many checksums, each a few microseconds of work.
Launching them one by one would take longer than moving the bytes. The checksums are those of `executor`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from meshrl.weights.executor import COL_SEED, ROW_SEED, weight_table
from meshrl.weights.placement import Shards
from meshrl.weights.planner import RankPlan, ReshardPlan

TILE_ROWS, TILE_COLS = 64, 1024
AT_ONCE = 16  # rows of a tile that are read before they are written
# Bytes that a thread reads or writes at once, if addresses, strides and widths are multiples of this number.
WORD = 16
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# A table's columns: the addresses that a rectangle is read from and written to (0: only summed), its size, the row
# strides, and its place in the tensor.
FROM, TO, ROWS, COLS, FROM_STRIDE, TO_STRIDE, ROW, COL = range(8)
FIELDS = 8
Made = TypeVar("Made")


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    tiles, numbers, row_weights, col_weights, sums,
    from_type: tl.constexpr, to_type: tl.constexpr, with_sums: tl.constexpr, aligned: tl.constexpr,
    tile_rows: tl.constexpr, tile_cols: tl.constexpr, at_once: tl.constexpr, fields: tl.constexpr,
    together: tl.constexpr, word: tl.constexpr,
):  # fmt: skip
    """Process one tile per program, some rows at a time: read, write if there is a target address, and sum the bits.

    Every thread sums its own elements, by column over the rows and by row over its few columns. It multiplies these
    sums by the weights. Only the last step combines the threads.
    """
    tile = tiles + tl.program_id(0) * fields
    origin, target = tl.load(tile).to(tl.pointer_type(from_type)), tl.load(tile + 1)
    rows, width = tl.load(tile + 2), tl.load(tile + 3)
    from_stride, to_stride = tl.load(tile + 4), tl.load(tile + 5)
    row, col = tl.arange(0, at_once), tl.arange(0, tile_cols)
    if aligned:
        width = tl.multiple_of(width, word // 2)
    of_rows = row_weights + tl.load(tile + 6)
    # Sums of 16-bit integers over a tile's rows, or over one thread's columns, fit into 32 bits.
    integer: tl.constexpr = tl.int32 if to_type.primitive_bitwidth == 16 else tl.int64
    by_col = tl.zeros((tile_cols,), integer)
    by_row = tl.zeros((tile_cols // together,), tl.int64)
    for first in range(0, tl.minimum(rows, tile_rows), at_once):
        there = (first + row < rows)[:, None] & (col < width)[None, :]
        source = origin + ((first + row) * from_stride)[:, None] + col[None, :]
        sink = target.to(tl.pointer_type(to_type)) + ((first + row) * to_stride)[:, None] + col[None, :]
        if aligned:
            source, sink = tl.multiple_of(source, (1, word)), tl.multiple_of(sink, (1, word))
        values = tl.load(source, mask=there, other=0.0).to(to_type)
        if target != 0:
            tl.store(sink, values, mask=there)
        if with_sums:
            if to_type.primitive_bitwidth == 16:
                bits = values.to(tl.int16, bitcast=True).to(integer)
            else:
                bits = values.to(tl.int32, bitcast=True).to(integer)
            by_col += tl.sum(bits, 0)
            own = tl.sum(tl.reshape(bits, (at_once, tile_cols // together, together)), 2).to(tl.int64)
            by_row += tl.sum(own * tl.load(of_rows + first + row, mask=first + row < rows, other=0)[:, None], 0)
    if with_sums:
        of_cols = tl.load(col_weights + tl.load(tile + 7) + col, mask=col < width, other=0)
        total = tl.sum(by_row, 0) + tl.sum(by_col.to(tl.int64) * of_cols, 0)
        tl.atomic_add(sums + tl.load(numbers + tl.program_id(0)), total)


@dataclass(frozen=True)
class _Batch:
    """The tiles of rectangles with the same pair of dtypes that are alike in `turned` and `aligned`."""

    from_type: torch.dtype
    to_type: torch.dtype
    turned: bool
    aligned: bool
    tiles: Tensor  # int64 [tiles, FIELDS]: a table of the tiles
    numbers: Tensor  # int32 [tiles]: the number of each tile's rectangle

    @property
    def together(self) -> int:
        """The number of neighbouring elements of a row in one thread, which sums them before it multiplies."""
        return WORD // self.to_type.itemsize if self.aligned else 1


class Grouped:
    """Rectangles of one rank, in the order given: `run` copies those that have a target, and sums all of them.

    With `records`, a second run is recorded as a CUDA graph, because launching takes the host longer than replaying.
    """

    def __init__(
        self,
        table: np.ndarray,
        types: Sequence[tuple[torch.dtype, torch.dtype]],
        device: torch.device,
        records: bool = True,
    ):
        self.device, self.count, self.records = device, len(table), records
        table, turned = _turned(table)
        ends = (table[:, ROW] + table[:, ROWS]).max(initial=1), (table[:, COL] + table[:, COLS]).max(initial=1)
        self.weights = [weight_table(int(max(ends)), seed, device) for seed in (ROW_SEED, COL_SEED)]
        ways = zip(turned.tolist(), _aligned(table).tolist(), strict=True)
        kinds = [(*pair, *way) for pair, way in zip(types, ways, strict=True)]
        self.batches = []
        for kind in dict.fromkeys(kinds):
            numbers = np.array([number for number, own in enumerate(kinds) if own == kind])
            tiles, owners = _tiles(table[numbers], *(dtype.itemsize for dtype in kind[:2]))
            sent = (torch.from_numpy(array).to(device) for array in (tiles, numbers[owners].astype(np.int32)))
            self.batches.append(_Batch(*kind, *sent))
        self.sums = torch.zeros(self.count, dtype=torch.int64, device=device)
        self._recorded: dict[bool, torch.cuda.CUDAGraph | None] = {}  # by `with_sums`; None: has run once, not recorded

    def run(self, with_sums: bool = True) -> Tensor:
        """Copy the rectangles that have a target, and sum all of them.

        Return the checksum of each rectangle as it was read (zeros without `with_sums`), int64 `[rectangles]`. The next
        run overwrites the returned tensor.
        """
        with torch.cuda.device(self.device):
            if with_sums not in self._recorded or not self.records:
                self._launch(with_sums)
                self._recorded[with_sums] = None
            else:
                recorded = self._recorded[with_sums] = self._recorded[with_sums] or self._record(with_sums)
                recorded.replay()
        return self.sums

    def _record(self, with_sums: bool) -> torch.cuda.CUDAGraph:
        graph, stream, collects = torch.cuda.CUDAGraph(), torch.cuda.Stream(), gc.isenabled()
        gc.disable()  # freeing objects may call CUDA, which is not allowed during a recording
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch(with_sums)
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph

    def _launch(self, with_sums: bool) -> None:
        self.sums.zero_()
        for batch in self.batches:
            weights = self.weights[::-1] if batch.turned else self.weights
            _move[(len(batch.tiles),)](
                batch.tiles, batch.numbers, *weights, self.sums, TYPES[batch.from_type], TYPES[batch.to_type],
                with_sums, batch.aligned, TILE_ROWS, TILE_COLS, AT_ONCE, FIELDS, batch.together, WORD, num_warps=4,
            )  # fmt: skip


def _turned(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the table with contiguous column vectors turned into rows, and a mask of the turned rectangles."""
    steps = table[:, FROM_STRIDE] == 1, (table[:, TO_STRIDE] == 1) | (table[:, TO] == 0)
    turned = (table[:, COLS] == 1) & steps[0] & steps[1]
    table = table.copy()
    for down, across in ((ROWS, COLS), (ROW, COL)):
        table[np.ix_(turned, [down, across])] = table[np.ix_(turned, [across, down])]
    return table, turned


def _aligned(table: np.ndarray) -> np.ndarray:
    """Return a mask of the rectangles that can be read and written in whole words.

    Widths and strides count elements of the smallest type.
    """
    elements = WORD // 2  # of the smallest type
    starts = (table[:, [FROM, TO]] % WORD == 0).all(1)
    steps = (table[:, [FROM_STRIDE, TO_STRIDE]] % elements == 0).all(1) | (table[:, ROWS] == 1)
    return starts & steps & (table[:, COLS] % elements == 0)


def _tiles(table: np.ndarray, from_size: int, to_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of the rectangles' tiles, and the index of each tile's rectangle.

    `from_size` and `to_size` are the bytes of an element.
    """
    down, across = -(-table[:, ROWS] // TILE_ROWS), -(-table[:, COLS] // TILE_COLS)
    counts = down * across
    owner = np.repeat(np.arange(len(table)), counts)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    row, col = np.divmod(place, across[owner])
    row, col = row * TILE_ROWS, col * TILE_COLS
    tiles = table[owner]
    for start, stride, size in ((FROM, FROM_STRIDE, from_size), (TO, TO_STRIDE, to_size)):
        tiles[:, start] += np.where(tiles[:, start] == 0, 0, (row * tiles[:, stride] + col) * size)
    for offset, place_of, extent in ((row, ROW, ROWS), (col, COL, COLS)):
        tiles[:, place_of] += offset
        tiles[:, extent] -= offset
    return tiles, owner


def can_group(*sides: tuple[Shards, np.ndarray]) -> bool:
    """Return whether the kernel can process these slices: on a GPU, of known dtypes, with contiguous rows."""
    for shards, held in sides:
        tensors = [shards.tensors[shards.placement.parameters[number]] for number in np.unique(held["parameter"])]
        if not all(tensor.is_cuda and tensor.dtype in TYPES for tensor in tensors):
            return False
        if not ((held["col_stride"] == 1) | (held["cols"] == 1)).all():
            return False
    return True


def addresses(shards: Shards, held: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, list[torch.dtype]]:
    """Return the memory address and the dtype of each rectangle `boxes` within the slices `held`."""
    owners, of_owner = np.unique(held["parameter"], return_inverse=True)
    tensors = [shards.tensors[shards.placement.parameters[owner]] for owner in owners]
    bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)[of_owner]
    sizes = np.array([tensor.element_size() for tensor in tensors], dtype=np.int64)[of_owner]
    offsets = held["offset"] + (boxes["row"] - held["row"]) * held["row_stride"] + boxes["col"] - held["col"]
    return bases + offsets * sizes, [tensors[owner].dtype for owner in of_owner.tolist()]


def grouped_sums(shards: Shards, held: np.ndarray, records: bool = True) -> Grouped | None:
    """Return the checksums' kernel table for whole slices, or None if the kernel cannot process them."""
    if not can_group((shards, held)):
        return None
    table = np.zeros((len(held), FIELDS), dtype=np.int64)
    table[:, FROM], types = addresses(shards, held, held)
    _describe(table, held, held)
    return Grouped(table, [(dtype, dtype) for dtype in types], shards.device, records)


@dataclass(frozen=True)
class Copies:
    """The copies within one rank of a plan, and their bytes. `shared` bytes already lie in the destination's memory."""

    moves: Grouped
    copied: int
    shared: int


def grouped_copies(
    plan: ReshardPlan, part: RankPlan, source: Shards, destination: Shards, records: bool = True
) -> Copies | None:
    """Return the kernel table for all copies of a rank, or None if the kernel cannot process them."""
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
    moves = Grouped(table, list(zip(from_types, to_types, strict=True)), destination.device, records)
    return Copies(moves, int(sizes.sum()), int(sizes[same].sum()))


def _describe(table: np.ndarray, held: np.ndarray, boxes: np.ndarray) -> None:
    table[:, FROM_STRIDE] = held["row_stride"]
    for column, name in ((ROWS, "rows"), (COLS, "cols"), (ROW, "row"), (COL, "col")):
        table[:, column] = boxes[name]


class Tables:
    """A cache of the kernel tables of a sync's copies and checksums.

    The tables are valid while the tensors stay at the same addresses. `records`: whether the kernels may be recorded as
    CUDA graphs. They may not while a rollout may record its own steps at the same time.
    """

    def __init__(self, records: bool = True) -> None:
        self.records = records
        self._made: dict[str, tuple[list[int], Any]] = {}

    def copies(self, plan: ReshardPlan, part: RankPlan, source: Shards, destination: Shards) -> Copies | None:
        """Return the cached result of `grouped_copies` for this plan."""
        return self._get(
            "copies", (source, destination), lambda: grouped_copies(plan, part, source, destination, self.records)
        )

    def sums(self, shards: Shards, held: np.ndarray) -> Grouped | None:
        """Return the cached result of `grouped_sums`; `held` must be the same slices in every call."""
        return self._get("sums", (shards,), lambda: grouped_sums(shards, held, self.records))

    def _get(self, what: str, sides: Sequence[Shards], make: Callable[[], Made | None]) -> Made | None:
        if any(type(shards.tensors) is not dict for shards in sides):
            return None
        memory = [pointer for shards in sides for pointer in map(Tensor.data_ptr, shards.tensors.values())]
        known = self._made.get(what)
        if known is None or known[0] != memory:
            known = self._made[what] = memory, make()
        return known[1]
