"""Charts of the report.

draw_panel:   curves and stacked areas as SVG
draw_spread:  a distribution over the samples and steps as an SVG heat map
write_curves: all panels in one PNG, by matplotlib

The SVG charts take their colours from the page's style sheet, so they follow its light and dark themes.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from meshrl.files import writing_whole
from meshrl.telemetry.metrics import Spread
from meshrl.telemetry.page import number, visible
from meshrl.telemetry.panels import COLORS, Panel, Series, smooth, smoothing_window, starts_at_zero, thin

# Curves as SVG. Sizes are in SVG units; `_MAX_HITS` limits the columns that react to the pointer.

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 68, 12, 12, 38
_MAX_HITS = 120


@dataclass(frozen=True)
class Scale:
    """A mapping from the values of an axis to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        if high == low:  # values so large that floating point cannot tell the ends apart
            return (self.start + self.end) / 2
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def draw_panel(panel: Panel) -> str:
    """Draw one panel as an `<svg>` element, without title and legend, which the page draws."""
    bands = _bands(panel) if panel.stacked else []
    curves = [] if panel.stacked else [_thinned(curve) for curve in panel.series]
    drawn = bands or curves
    x = _x_scale(drawn)
    y = _y_scale(panel, drawn)
    parts = [_grid(x, y), axis_names(panel.unit)]
    if panel.stacked:
        parts += _areas(bands, x, y)
    else:
        parts += [_curve(curve, x, y) for curve in curves]
    parts.append(_hits(curves or [_thinned(curve) for curve in panel.series], x))
    label = escape(visible(f"{panel.title}: {panel.unit} over steps", 160))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def sparkline(values: Sequence[float], width: int = 110, height: int = 22) -> str:
    """Draw a small curve without axes for a table cell; return "" for fewer than two values."""
    _, thinned = thin(range(len(values)), values, 60)
    if len(thinned) < 2:
        return ""
    low, high = min(thinned), max(thinned)
    x = Scale(0, len(thinned) - 1, 2, width - 2)
    y = Scale(low, high if high > low else low + (abs(low) or 1.0), height - 3, 3)
    points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(thinned))
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">'
        f'<polyline points="{points}"/></svg>'
    )


# For smaller spans, the steps between ticks would be denormal floating-point numbers.
SMALLEST_SPAN = 1e-290


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover `low` to `high`; a span too small to show is widened."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, SMALLEST_SPAN):
        pad = 0.1 * abs(low) if size > SMALLEST_SPAN else 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _thinned(curve: Series) -> Series:
    steps, values = thin(curve.steps, curve.values)
    return Series(curve.label, steps, values, curve.sparse, curve.color)


def _bands(panel: Panel) -> list[Series]:
    """Return the upper edges of the stacked phases as curves, from the bottom up."""
    edges: list[Series] = []
    for curve in map(_thinned, panel.series):
        below = edges[-1].values if edges else [0.0] * len(curve.values)
        top = [a + b for a, b in zip(below, curve.values, strict=True)]
        edges.append(Series(curve.label, curve.steps, top, color=curve.color))
    return edges


def _x_scale(drawn: Sequence[Series]) -> Scale:
    low = min(curve.steps[0] for curve in drawn)
    high = max(curve.steps[-1] for curve in drawn)
    if low == high:
        low, high = low - 1, high + 1
    return Scale(low, high, LEFT, WIDTH - RIGHT)


def _y_scale(panel: Panel, drawn: Sequence[Series]) -> Scale:
    values = [value for curve in drawn for value in curve.values]
    low, high = min(values), max(values)
    if panel.log_scale:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        # At least one decade, because thinning to means may leave only equal values.
        return Scale(10.0**first, 10.0 ** max(first + 1, last), HEIGHT - BOTTOM, TOP, log=True)
    if panel.stacked or starts_at_zero(values):
        low = 0.0
    ticks = nice_ticks(low, high)
    return Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)


def _grid(x: Scale, y: Scale) -> str:
    if y.log:
        decades = range(round(math.log10(y.low)), round(math.log10(y.high)) + 1)
        ticks = [10.0**power for power in decades][:: max(1, len(decades) // 6)]
    else:
        ticks = nice_ticks(y.low, y.high)
    steps = [tick for tick in nice_ticks(x.low, x.high, 6) if x.low <= tick <= x.high and float(tick).is_integer()]
    return grid(ticks, y) + step_names([(x(tick), tick) for tick in steps])


def grid(ticks: Sequence[float], y: Scale) -> str:
    """Draw horizontal grid lines at the ticks, with the tick labels on the left."""
    parts = []
    for tick in ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at}" dy="0.32em" text-anchor="end">{_tick(tick, ticks, y.log)}</text>')
    return "".join(parts)


def step_names(places: Sequence[tuple[float, float]]) -> str:
    """Draw the x axis and its labels; `places` are (x in pixels, step) pairs."""
    base = HEIGHT - BOTTOM
    names = [f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{step:,.0f}</text>' for x, step in places]
    return f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>' + "".join(names)


def _tick(value: float, ticks: Sequence[float], log: bool) -> str:
    if log:
        return f"1e{round(math.log10(value))}"
    if value == 0:
        return "0"
    size, spacing = max(map(abs, ticks)), ticks[1] - ticks[0]
    if size >= 1e6 or size < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    digits = max(0, 1 - math.floor(math.log10(spacing)))
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:,.0f}"


def axis_names(unit: str) -> str:
    """Draw the axis titles: "step" below, and `unit` at the left."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">step</text>'
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{escape(unit)}</text>'
    )


def _points(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))


def _curve(curve: Series, x: Scale, y: Scale) -> str:
    name = f"c{curve.color % COLORS}"
    window = 1 if curve.sparse else smoothing_window(len(curve.values))
    if window > 1:
        raw, bold = curve.values, smooth(curve.values, window)
        return (
            f'<polyline class="raw {name}" points="{_points(curve.steps, raw, x, y)}"/>'
            f'<polyline class="line {name}" points="{_points(curve.steps, bold, x, y)}"/>'
        )
    dots = "".join(
        f'<circle class="dot {name}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.6"/>'
        for step, value in zip(curve.steps, curve.values, strict=True)
    )
    return f'<polyline class="line {name}" points="{_points(curve.steps, curve.values, x, y)}"/>{dots}'


def _areas(bands: Sequence[Series], x: Scale, y: Scale) -> list[str]:
    """Draw each band as the polygon between its upper edge and the edge below."""
    areas = []
    lower: Sequence[float] = [0.0] * len(bands[0].values)
    for band in bands:
        points = _points(band.steps, band.values, x, y) + " " + _points(band.steps[::-1], list(lower)[::-1], x, y)
        areas.append(f'<polygon class="area c{band.color % COLORS}" points="{points}"/>')
        lower = band.values
    return areas


def _hits(curves: Sequence[Series], x: Scale) -> str:
    """Draw invisible columns that show the values of their step under the pointer.

    The text is a `<title>` element, so that it appears without a script as well.
    """
    at: dict[float, list[str]] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            at.setdefault(step, []).append(f"{visible(curve.label, 60)}: {number(value)}")
    steps = sorted(at)
    steps = steps[:: -(-len(steps) // _MAX_HITS)] if steps else []
    parts = []
    for i, step in enumerate(steps):
        left = x.start if i == 0 else (x(steps[i - 1]) + x(step)) / 2
        right = x.end if i == len(steps) - 1 else (x(step) + x(steps[i + 1])) / 2
        parts.append(hit(left, right, x(step), "\n".join([f"step {step:,.0f}", *at[step]])))
    return "".join(parts)


def hit(left: float, right: float, middle: float, text: str) -> str:
    """Draw a column from `left` to `right` that shows a text and a vertical line at `middle` under the pointer."""
    return (
        f'<g class="hit"><title>{escape(text)}</title>'
        f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.1):.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'
        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></g>'
    )


# Heat maps: the distribution of a quantity over the samples, step by step. A cell is darker if it has more samples.

_LEVELS = 8


def draw_spread(spread: Spread) -> str:
    """Draw a distribution over steps as an `<svg>` element, without its title, which the page draws."""
    columns, rows = len(spread.shares), len(spread.shares[0])
    x = Scale(0, columns, LEFT, WIDTH - RIGHT)
    y = Scale(0, rows, HEIGHT - BOTTOM, TOP)
    most = max(map(max, spread.shares))
    paths: dict[int, list[str]] = {}
    for column, shares in enumerate(spread.shares):
        for row, share in enumerate(shares):
            if share > 0:
                # The square root lifts rare values, so that one sample in a hundred is still visible.
                level = max(1, math.ceil(_LEVELS * math.sqrt(share / most) - 1e-9))
                left, top, right, bottom = x(column), y(row + 1), x(column + 1), y(row)
                cell = f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}z"
                paths.setdefault(level, []).append(cell)
    cells = [
        f'<path class="c0 cell" fill-opacity="{level / _LEVELS:.3g}" d="{"".join(paths[level])}"/>'
        for level in sorted(paths)
    ]
    parts = [*cells, _names(spread, y), _steps(spread, x), axis_names(spread.unit), _column_hits(spread, x)]
    label = escape(f"{spread.title}: share of the samples over steps")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def quantile(spread: Spread, column: int, share: float) -> float:
    """Return the value below which this share of a column's samples lies, interpolated within a bin."""
    size = (spread.high - spread.low) / len(spread.shares[column])
    below = 0.0
    for row, part in enumerate(spread.shares[column]):
        if part > 0 and below + part >= share - 1e-9:
            return spread.low + (row + (share - below) / part) * size
        below += part
    return spread.high


def _names(spread: Spread, y: Scale) -> str:
    """Draw the row labels, or a value axis if the rows are bins without labels."""
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
    """Draw the step axis below the cells; a column may cover several steps."""
    first, last, count = spread.steps[0], spread.steps[-1], len(spread.steps)
    if count == 1:
        return step_names([(x(0.5), first)])
    at = Scale(first, last, x(0.5), x(count - 0.5))
    ticks = [t for t in nice_ticks(first, last, 6) if first <= t <= last and float(t).is_integer()]
    return step_names([(at(tick), tick) for tick in ticks])


def _column_hits(spread: Spread, x: Scale) -> str:
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


# curves.png: all panels of a run in one picture, drawn by matplotlib without changing matplotlib's global state.

PNG_COLORS = (
    *("#2a6fdb", "#e0631b", "#14967a", "#9457c9", "#c99a06", "#d1477a", "#3fa7d6", "#9aa1ab"),
    *("#6b8e23", "#7a5230", "#5560a4", "#b0a08c", "#c9ced6"),
    *("#f0a884", "#ead78f", "#8fc1f2", "#aed8a6", "#d78fc0"),
)
_INK, _MUTED, _GRID = "#1c2430", "#5d6775", "#e6e9ee"
# Sizes in inches. They are fixed, because an automatic layout draws everything twice, which takes longer than a short
# run trains.
_WIDTH, _HEIGHT, _HEAD = 5.2, 3.5, 0.55
_LEFT, _RIGHT, _ABOVE, _BELOW = 0.95, 0.2, 0.55, 0.6


def write_curves(panels: list[Panel], title: str, path: Path) -> None:
    """Draw all panels into one PNG file, which appears only when it is complete."""
    figure = curves_figure(panels, title)
    with writing_whole(path) as aside, warnings.catch_warnings():
        # Characters that the built-in font lacks are drawn as boxes. The run needs no warning about them.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(aside, format="png")


def curves_figure(panels: list[Panel], title: str) -> Any:
    """Draw the panels, two or three in a row, into a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = -(-len(panels) // columns)
    width, height = _WIDTH * columns, _HEIGHT * rows + _HEAD
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(_safe(title), y=1 - 0.15 / height, va="top", fontsize=15, fontweight="bold", color=_INK)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=_margins(columns, rows))
    steps = [step for panel in panels for curve in panel.series for step in curve.steps]
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel)
        axes.set_xlim(*_with_margin(min(steps), max(steps)))
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    return figure


def _with_margin(first: float, last: float) -> tuple[float, float]:
    """Return the step range with a margin.

    All panels use the same range, so that events of one step are at the same place in every panel.
    """
    room = 0.02 * (last - first) or 0.5
    return first - room, last + room


def _margins(columns: int, rows: int) -> dict[str, float]:
    """Return matplotlib's `gridspec_kw` with the margins around and between the panels.

    Outer margins are fractions of the figure, and gaps are fractions of one panel.
    """
    width, height = _WIDTH * columns, _HEIGHT * rows + _HEAD
    return {
        "left": _LEFT / width,
        "right": 1 - _RIGHT / width,
        "bottom": _BELOW / height,
        "top": 1 - (_HEAD + _ABOVE) / height,
        "wspace": (_LEFT + _RIGHT) / (_WIDTH - _LEFT - _RIGHT),
        "hspace": (_ABOVE + _BELOW) / (_HEIGHT - _ABOVE - _BELOW),
    }


def _draw(axes: Any, panel: Panel) -> None:
    axes.set_title(_safe(panel.title), loc="left", y=1, pad=18, fontsize=12, fontweight="bold", color=_INK)
    if panel.note:
        axes.text(0, 1.03, _safe(panel.note), transform=axes.transAxes, fontsize=8.5, color=_MUTED)
    if panel.stacked:
        _draw_stack(axes, panel)
    else:
        for curve in panel.series:
            _draw_curve(axes, curve)
        if panel.log_scale:
            axes.set_yscale("log")
        elif not any(value for curve in panel.series for value in curve.values):
            axes.set_ylim(0, 1)
        elif starts_at_zero(value for curve in panel.series for value in curve.values):
            axes.set_ylim(bottom=0)
    if not panel.log_scale:
        # Full tick labels, because matplotlib would draw a common factor over the title.
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("step", fontsize=9.5, color=_MUTED)
    axes.set_ylabel(_safe(panel.unit), fontsize=9.5, color=_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(which="both", colors=_MUTED, labelsize=8.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c4cad3")
    if panel.stacked:
        # Leaves room above the stack for the legend.
        axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
        axes.legend(fontsize=8, labelcolor=_INK, ncols=3, frameon=False, loc="upper right", columnspacing=1.2)
    elif len(panel.series) > 1 or panel.series[0].sparse:
        axes.legend(fontsize=8, labelcolor=_INK, framealpha=0.8, edgecolor="none", loc="best")


def _draw_curve(axes: Any, curve: Series) -> None:
    color = PNG_COLORS[curve.color % len(PNG_COLORS)]
    label = _safe(curve.label)
    steps, values = thin(curve.steps, curve.values)
    window = smoothing_window(len(values))
    if curve.sparse or window == 1:
        axes.plot(steps, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(values, window), color=color, linewidth=2.2, label=label)


def _draw_stack(axes: Any, panel: Panel) -> None:
    thinned = [thin(curve.steps, curve.values) for curve in panel.series]
    colors = [PNG_COLORS[curve.color % len(PNG_COLORS)] for curve in panel.series]
    labels = [_safe(curve.label) for curve in panel.series]
    axes.stackplot(thinned[0][0], *(values for _, values in thinned), labels=labels, colors=colors, linewidth=0)


def _safe(text: str) -> str:
    """Escape a text for a title or legend of matplotlib.

    A `$` would start math mode, and a leading underscore would hide a label from the legend.
    """
    shown = visible(text, 60).replace("\n", " ").replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown
