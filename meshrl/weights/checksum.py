"""Checksums of rectangles that add up: those of disjoint parts of a rectangle make that of the whole, on any layout.

Every element counts by its bits, times a number that depends on its row plus one that depends on its column, modulo
2^64. So what is missing, changed, or at another place changes the sum, unless the sums of all rows and of all columns
stay as they were: of equal elements that trade places crosswise it sees nothing. Integer sums are the same on every
device whatever the order. No temporary of the data's size is made: some rows are summed at a time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are converted at once.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}
# Weights of rows and of columns.
ROW_SEED, COL_SEED = 0x1234567, 0x7654321


def checksum(values: Tensor, row: int, col: int, dtype: torch.dtype | None = None) -> Tensor:
    """The sum (one int64) of a matrix that starts at (row, col) of its tensor, as elements of `dtype`."""
    dtype = dtype or values.dtype
    rows, cols = values.shape
    by_row = _weights(rows, row, ROW_SEED, values.device)
    by_col = _weights(cols, col, COL_SEED, values.device)
    step = max(1, CHUNK_ELEMENTS.get(values.device.type, 1 << 17) // max(1, cols))
    sums = [
        _sum(part.to(dtype).view(INTEGERS[dtype.itemsize]), weights, by_col)
        for part, weights in zip(values.split(step), by_row.split(step), strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _sum(bits: Tensor, by_row: Tensor, by_col: Tensor) -> Tensor:
    wide = bits.long()
    return (wide.sum(1) * by_row).sum() + (wide.sum(0) * by_col).sum()


def _weights(count: int, first: int, seed: int, device: torch.device) -> Tensor:
    first = int(first)
    return weight_table(first + count, seed, device)[first : first + count]


def weight_table(count: int, seed: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers that look random, one for each index; at least `count` of them."""
    return _weight_table(1 << max(10, (count - 1).bit_length()), seed, str(device))


@lru_cache(maxsize=32)
def _weight_table(count: int, seed: int, device: str) -> Tensor:
    x = torch.arange(count, dtype=torch.int64, device=device) + seed
    for shift, factor in ((30, -0x4B47D0C5B6F0D1A3), (27, -0x61C8864680B583EB), (31, 0x2545F4914F6CDD1D)):
        x = (x ^ (x >> shift)) * factor
    return x | 1
