"""How a quantity is spread over the samples of a step: small histograms, and their picture over the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

BINS = 24
# So many different values or fewer are counted one by one: rewards of 0 and 1 need no bins.
MOST_VALUES = 12
Histogram = Mapping[str, Any]


def histogram(values: np.ndarray) -> dict[str, Any]:
    """`values` and `counts` of a few different values, else `low`, `high` and the `counts` of equal bins between.

    Values that are not finite are counted in `nonfinite` where there are any.
    """
    import numpy as np

    given = np.asarray(values, dtype=np.float64).ravel()
    finite = given[np.isfinite(given)]
    found: dict[str, Any] = {"nonfinite": len(given) - len(finite)} if len(finite) < len(given) else {}
    different, counts = np.unique(finite, return_counts=True)
    if len(different) <= MOST_VALUES:
        return {"values": [_short(v) for v in different], "counts": counts.tolist(), **found}
    low, high = float(different[0]), float(different[-1])
    # By hand: numpy's own refuses spans that are tiny beside the values. Halves, because the whole span may overflow.
    span = max(high / 2 - low / 2, np.finfo(np.float64).tiny)
    places = np.minimum((BINS * ((finite / 2 - low / 2) / span)).astype(np.int64), BINS - 1)
    return {"low": low, "high": high, "counts": np.bincount(places, minlength=BINS).tolist(), **found}


@dataclass(frozen=True)
class Spread:
    """A quantity over the run: for each (span of) steps the shares of its samples in rows from low to high.

    `labels` name the rows where they are single values; else they are equal bins from `low` to `high`.
    """

    title: str
    unit: str
    steps: list[float]
    shares: list[list[float]]
    low: float
    high: float
    labels: list[str]
    note: str = "darker: more of the step's samples"
    section: str = "learning"


def spread_of(
    name: str, title: str, unit: str, records: Sequence[Mapping[str, Any]], columns: int = 100, rows: int = BINS
) -> Spread | None:
    """The histograms of a quantity put together; neighbouring steps share a column where there are too many."""
    found = [(record["step"], record[name]) for record in records if _is_histogram(record.get(name))]
    if not found:
        return None
    every = -(-len(found) // columns)
    parts = [found[start : start + every] for start in range(0, len(found), every)]
    low = min(_bounds(histogram)[0] for _, histogram in found)
    high = max(_bounds(histogram)[1] for _, histogram in found)
    single = sorted({v for _, histogram in found for v in histogram.get("values", ())})
    exact = all("values" in histogram for _, histogram in found) and len(single) <= MOST_VALUES
    count = len(single) if exact else rows
    shares = []
    for part in parts:
        sums = [0.0] * count
        for _, h in part:
            for place, weight in _exact(h, single) if exact else _binned(h, low, high, rows):
                sums[place] += weight
        whole = sum(sums)
        shares.append([value / whole for value in sums])
    labels = [f"{value:g}" for value in single] if exact else []
    return Spread(title, unit, [_middle(part) for part in parts], shares, low, high, labels)


def finish_shares(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """For each step that says so: the share of its samples that ended by each reason."""
    found = []
    for record in records:
        counts = record.get("finish")
        if isinstance(counts, Mapping) and _are_numbers(list(counts.values())) and (whole := sum(counts.values())) > 0:
            found.append({"step": record["step"], **{str(name): n / whole for name, n in counts.items()}})
    return found


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _are_numbers(value.get("counts")) or not sum(value["counts"]) > 0:
        return False
    if "values" in value:
        values = value["values"]
        return _are_numbers(values) and len(values) == len(value["counts"]) and values == sorted(values)
    return _are_numbers([value.get("low"), value.get("high")]) and value["low"] < value["high"]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int | float) and abs(v) < 1e100 for v in values)


def _middle(part: Sequence[tuple[float, Histogram]]) -> float:
    return (part[0][0] + part[-1][0]) / 2


def _bounds(h: Histogram) -> tuple[float, float]:
    return (h["values"][0], h["values"][-1]) if "values" in h else (h["low"], h["high"])


def _exact(h: Histogram, single: Sequence[float]) -> list[tuple[int, float]]:
    return [(single.index(value), count) for value, count in zip(h["values"], h["counts"], strict=True)]


def _binned(h: Histogram, low: float, high: float, rows: int) -> list[tuple[int, float]]:
    """The counts in rows from low to high; a bin that lies across several gives each its part."""
    size = (high - low) / rows
    if not size > 0:
        return [(0, float(sum(h["counts"])))]
    if "values" in h:
        return [(_row(v, low, size, rows), n) for v, n in zip(h["values"], h["counts"], strict=True)]
    parts = []
    width = (h["high"] - h["low"]) / len(h["counts"])
    for number, count in enumerate(h["counts"]):
        if count:
            start = h["low"] + number * width
            first, last = _row(start, low, size, rows), _row(start + width, low, size, rows)
            for row in range(first, last + 1):
                inside = min(start + width, low + (row + 1) * size) - max(start, low + row * size)
                parts.append((row, count * max(inside, 0.0) / width))
    return parts


def _row(value: float, low: float, size: float, rows: int) -> int:
    return min(max(int((value - low) / size), 0), rows - 1)


def _short(value: float) -> float:
    """Six digits: enough for a label, and short in the file."""
    return float(f"{value:.6g}")
