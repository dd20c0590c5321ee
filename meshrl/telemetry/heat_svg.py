"""How a quantity is spread over the samples, step by step: a field of cells, darker where more samples are."""

import math
from html import escape

from meshrl.telemetry.curves_svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    axis_names,
    grid,
    hit,
    nice_ticks,
    step_names,
)
from meshrl.telemetry.distributions import Spread
from meshrl.telemetry.report_text import number

_LEVELS = 8


def draw_spread(spread: Spread) -> str:
    """One spread as an `<svg>` element; its title is the page's."""
    columns, rows = len(spread.shares), len(spread.shares[0])
    x = Scale(0, columns, LEFT, WIDTH - RIGHT)
    y = Scale(0, rows, HEIGHT - BOTTOM, TOP)
    most = max(map(max, spread.shares))
    paths: dict[int, list[str]] = {}
    for column, shares in enumerate(spread.shares):
        for row, share in enumerate(shares):
            if share > 0:
                # The root lifts rare values: one sample in a hundred can still be seen.
                level = max(1, math.ceil(_LEVELS * math.sqrt(share / most) - 1e-9))
                left, top, right, bottom = x(column), y(row + 1), x(column + 1), y(row)
                cell = f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}z"
                paths.setdefault(level, []).append(cell)
    cells = [
        f'<path class="c0 cell" fill-opacity="{level / _LEVELS:.3g}" d="{"".join(paths[level])}"/>'
        for level in sorted(paths)
    ]
    parts = [*cells, _names(spread, y), _steps(spread, x), axis_names(spread.unit), _hits(spread, x)]
    label = escape(f"{spread.title}: share of the samples over steps")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def quantile(spread: Spread, column: int, share: float) -> float:
    """The value below which this share of a column's samples lies, even within a bin."""
    size = (spread.high - spread.low) / len(spread.shares[column])
    below = 0.0
    for row, part in enumerate(spread.shares[column]):
        if part > 0 and below + part >= share - 1e-9:
            return spread.low + (row + (share - below) / part) * size
        below += part
    return spread.high


def _names(spread: Spread, y: Scale) -> str:
    """The rows by name, or a scale of their values."""
    rows = len(spread.shares[0])
    if spread.labels:
        return "".join(
            f'<text x="{LEFT - 7}" y="{y(row + 0.5):.1f}" dy="0.32em" text-anchor="end">{escape(label)}</text>'
            for row, label in enumerate(spread.labels)
        )
    if not spread.high > spread.low:
        return ""
    values = Scale(spread.low, spread.high, y(0), y(rows))
    ticks = [tick for tick in nice_ticks(spread.low, spread.high) if spread.low <= tick <= spread.high]
    return grid(ticks, values) if len(ticks) > 1 else ""


def _steps(spread: Spread, x: Scale) -> str:
    """The names of the steps below: columns may stand for several."""
    first, last, count = spread.steps[0], spread.steps[-1], len(spread.steps)
    if count == 1:
        return step_names([(x(0.5), first)])
    at = Scale(first, last, x(0.5), x(count - 0.5))
    ticks = [t for t in nice_ticks(first, last, 6) if first <= t <= last and float(t).is_integer()]
    return step_names([(at(tick), tick) for tick in ticks])


def _hits(spread: Spread, x: Scale) -> str:
    parts = []
    for column, shares in enumerate(spread.shares):
        step = f"step {spread.steps[column]:,.0f}"
        if spread.labels:
            lines = [f"{label}: {share:.1%}" for label, share in zip(spread.labels, shares, strict=True) if share]
        else:
            found = [number(quantile(spread, column, share)) for share in (0.1, 0.5, 0.9)]
            lines = [f"lowest tenth below {found[0]}", f"median {found[1]}", f"highest tenth above {found[2]}"]
        parts.append(hit(x(column), x(column + 1), x(column + 0.5), "\n".join([step, *lines])))
    return "".join(parts)
