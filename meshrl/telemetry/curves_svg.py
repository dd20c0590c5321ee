"""The report's curves as SVG: colours come from the page's style sheet, so they follow light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshrl.telemetry.panels import COLORS, Panel, Series, smooth, smoothing_window, starts_at_zero, thin
from meshrl.telemetry.report_text import number, visible

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 68, 12, 12, 38
_MAX_HITS = 120


@dataclass(frozen=True)
class Scale:
    """Maps values of an axis to pixels, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        if high == low:  # so large that one step more is none
            return (self.start + self.end) / 2
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def draw_panel(panel: Panel) -> str:
    """One panel as an `<svg>` element; its title and legend are the page's."""
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
    """A small curve without axes, for a table cell."""
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


# Below this, steps between ticks would be no normal floating-point numbers.
SMALLEST_SPAN = 1e-290


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low..high; a span too small to show is widened."""
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
    """The upper edges of the stacked phases."""
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
        # Means of many points may all be alike where the points were not.
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
    """Lines across at the ticks, with their numbers at the left."""
    parts = []
    for tick in ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at}" dy="0.32em" text-anchor="end">{_tick(tick, ticks, y.log)}</text>')
    return "".join(parts)


def step_names(places: Sequence[tuple[float, float]]) -> str:
    """The line below a picture, and the numbers of steps at their places."""
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
    """What the axes show."""
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
    """The bands between neighbouring edges."""
    areas = []
    lower: Sequence[float] = [0.0] * len(bands[0].values)
    for band in bands:
        points = _points(band.steps, band.values, x, y) + " " + _points(band.steps[::-1], list(lower)[::-1], x, y)
        areas.append(f'<polygon class="area c{band.color % COLORS}" points="{points}"/>')
        lower = band.values
    return areas


def _hits(curves: Sequence[Series], x: Scale) -> str:
    """Invisible columns that show the values of their step when pointed at, with or without a script."""
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
    """A column that shows a text when pointed at, and a line at its place."""
    return (
        f'<g class="hit"><title>{escape(text)}</title>'
        f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.1):.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'
        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></g>'
    )
