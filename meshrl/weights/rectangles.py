"""Operations on many rectangles at once: numbering, sorting, overlaps, intersections and cuts.

Rectangles are NumPy records with the fields `row`, `rows`, `col` and `cols`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

BOX_FIELDS = ("row", "rows", "col", "cols")
BOX = np.dtype([(name, np.int64) for name in ("tensor", *BOX_FIELDS)])
# The number of pairs that a join examines at once, which bounds its memory.
JOIN_PAIRS = 1 << 22
KEY_BITS = 62


def areas(boxes: np.ndarray) -> np.ndarray:
    return boxes["rows"] * boxes["cols"]


def as_boxes(records: np.ndarray) -> np.ndarray:
    """Return the tensor and rectangle of each record, as records of `BOX`."""
    made = np.empty(len(records), BOX)
    for name in BOX.names or ():
        made[name] = records[name]
    return made


def numbered(records: np.ndarray, fields: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Number the records by their combinations of `fields`.

    Return the number of each record's combination, and the index of the first record of each combination.
    """
    if not len(records):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = joined_keys([records[name] for name in fields])
    order = sorted_by(*keys)
    new = np.zeros(len(records), bool)
    new[0] = True
    for key in keys:
        column = key[order]
        new[1:] |= column[1:] != column[:-1]
    numbers = np.empty(len(records), np.int64)
    numbers[order] = np.cumsum(new) - 1
    return numbers, order[new]


def joined_keys(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Join columns of numbers into as few columns with the same sort order as possible.

    Columns of non-negative numbers are joined into one number while their bits fit; a column with negative numbers
    stays alone.
    """
    keys: list[np.ndarray] = []
    bits = KEY_BITS
    for column in columns:
        width = int(column.max(initial=0)).bit_length()
        if not keys or bits + width > KEY_BITS or int(column.min(initial=0)) < 0:
            keys.append(column)
            bits = width if int(column.min(initial=0)) >= 0 else KEY_BITS
        else:
            keys[-1] = (keys[-1] << width) | column
            bits += width
    return keys


def sorted_by(*columns: np.ndarray) -> np.ndarray:
    """Return the order that sorts by the first column, then the second, and so on."""
    keys = joined_keys(columns)
    return np.argsort(keys[0], kind="stable") if len(keys) == 1 else np.lexsort(keys[::-1])


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Return the start of each group if groups of these sizes lie end to end, and the end, `[groups + 1]`."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers [start, start + count) of each group, end to end."""
    total = int(counts.sum())
    first = offsets_of(counts)[:-1]
    return np.arange(total) + np.repeat(starts - first, counts)


def overlapping(group: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the groups in which two rectangles share an element."""
    if len(boxes) < 2:
        return np.empty(0, np.int64)
    order = sorted_by(group, boxes["row"], boxes["col"])
    group, boxes = group[order], boxes[order]
    same = group[1:] == group[:-1]
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    counts = np.diff(np.append(starts, len(group)))
    found: list[np.ndarray] = []
    done = counts == 1
    for along, length, across, width in (("row", "rows", "col", "cols"), ("col", "cols", "row", "rows")):
        # In groups that are cut along one dim, only neighbours can overlap.
        level = _constant(boxes[across], starts) & _constant(boxes[width], starts) & ~done
        if along == "col":
            order = sorted_by(group, boxes["col"])
            group, boxes = group[order], boxes[order]
        touches = (boxes[along][:-1] + boxes[length][:-1] > boxes[along][1:]) & same
        found.append(np.intersect1d(group[:-1][touches], group[starts[level]]))
        done |= level
    for start, count in zip(starts[~done], counts[~done], strict=True):
        if _any_overlap(boxes[start : start + count]):
            found.append(group[start : start + 1])
    return np.unique(np.concatenate(found))


def _constant(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.minimum.reduceat(values, starts) == np.maximum.reduceat(values, starts)


def _any_overlap(boxes: np.ndarray) -> bool:
    row, col = boxes["row"], boxes["col"]
    row_end, col_end = row + boxes["rows"], col + boxes["cols"]
    meets = (row[:, None] < row_end) & (row < row_end[:, None]) & (col[:, None] < col_end) & (col < col_end[:, None])
    return int(meets.sum()) > len(boxes)


def intersections(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pairs of rectangles of one tensor that share elements: left index, right index, shared rectangle.

    Both sides must be sorted by tensor.
    """
    begin = np.searchsorted(left["tensor"], right["tensor"], "left")
    count = np.searchsorted(left["tensor"], right["tensor"], "right") - begin
    parts = [_intersect(left, right, a, b, begin, count) for a, b in _chunks(count)]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, BOX)
    return (
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
    )


def _chunks(count: np.ndarray) -> Iterator[tuple[int, int]]:
    total = np.cumsum(count)
    start = 0
    while start < len(count):
        before = total[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(total, before + JOIN_PAIRS, "right")))
        yield start, stop
        start = stop


def _intersect(
    left: np.ndarray, right: np.ndarray, start: int, stop: int, begin: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    j = np.repeat(np.arange(start, stop), count[start:stop])
    i = ranges(begin[start:stop], count[start:stop])
    for first, length in (("row", "rows"), ("col", "cols")):
        # Filtered one dim after the other, so that fewer pairs are left for the second dim.
        a, b = left[first][i], right[first][j]
        low, high = np.maximum(a, b), np.minimum(a + left[length][i], b + right[length][j])
        keep = low < high
        i, j = i[keep], j[keep]
    made = np.empty(len(i), BOX)
    made["tensor"] = right["tensor"][j]
    for first, length in (("row", "rows"), ("col", "cols")):
        a, b = left[first][i], right[first][j]
        made[first] = np.maximum(a, b)
        made[length] = np.minimum(a + left[length][i], b + right[length][j]) - made[first]
    return i, j, made


def cut_to(boxes: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut rectangles into parts of at most `most` elements: by rows, and rows that are too long by columns.

    Return the parts and the index of each part's rectangle.
    """
    origin = np.arange(len(boxes))
    for first, length, other in (("row", "rows", "cols"), ("col", "cols", "rows")):
        step = np.maximum(1, most[origin] // np.maximum(1, boxes[other]))
        if first == "col":
            step = np.maximum(1, np.where(boxes["rows"] > 1, boxes["cols"], most[origin]))
        count = -(-boxes[length] // step)
        if not (count > 1).any():
            continue
        place = ranges(np.zeros(len(boxes), np.int64), count)
        boxes, origin, step = np.repeat(boxes, count), np.repeat(origin, count), np.repeat(step, count)
        boxes[length] = np.minimum(step, boxes[length] - place * step)
        boxes[first] += place * step
    return boxes, origin
