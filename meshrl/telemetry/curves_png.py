"""curves.png: the panels of a run in one picture, drawn by matplotlib without touching its global state."""

import warnings
from pathlib import Path
from typing import Any

from meshrl.files import writing_whole
from meshrl.telemetry.panels import Panel, Series, smooth, smoothing_window, starts_at_zero, thin
from meshrl.telemetry.report_text import visible

COLORS = (
    *("#2a6fdb", "#e0631b", "#14967a", "#9457c9", "#c99a06", "#d1477a", "#3fa7d6", "#9aa1ab"),
    *("#6b8e23", "#7a5230", "#5560a4", "#b0a08c", "#c9ced6"),
    *("#f0a884", "#ead78f", "#8fc1f2", "#aed8a6", "#d78fc0"),
)
_INK, _MUTED, _GRID = "#1c2430", "#5d6775", "#e6e9ee"
# Inches. Fixed ones: a layout that looks for them draws everything twice, longer than a short run trains.
_WIDTH, _HEIGHT, _HEAD = 5.2, 3.5, 0.55
_LEFT, _RIGHT, _ABOVE, _BELOW = 0.95, 0.2, 0.55, 0.6


def write_curves(panels: list[Panel], title: str, path: Path) -> None:
    """Draws the panels into a PNG."""
    figure = curves_figure(panels, title)
    with writing_whole(path) as aside, warnings.catch_warnings():
        # A name in a script that the built-in font lacks is drawn with boxes; that is no concern of the run.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(aside, format="png")


def curves_figure(panels: list[Panel], title: str) -> Any:
    """The panels, two or three in a row, as a matplotlib figure."""
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
    """The range of all panels, so that what happened at once stands at one place."""
    room = 0.02 * (last - first) or 0.5
    return first - room, last + room


def _margins(columns: int, rows: int) -> dict[str, float]:
    """What matplotlib wants to know of the room around and between the panels, each in shares of its own."""
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
        # Each tick in full: matplotlib's common factor would stand in the title.
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
        # Room above the stack, so that the legend hides nothing of it.
        axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
        axes.legend(fontsize=8, labelcolor=_INK, ncols=3, frameon=False, loc="upper right", columnspacing=1.2)
    elif len(panel.series) > 1 or panel.series[0].sparse:
        axes.legend(fontsize=8, labelcolor=_INK, framealpha=0.8, edgecolor="none", loc="best")


def _draw_curve(axes: Any, curve: Series) -> None:
    color = COLORS[curve.color % len(COLORS)]
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
    colors = [COLORS[curve.color % len(COLORS)] for curve in panel.series]
    labels = [_safe(curve.label) for curve in panel.series]
    axes.stackplot(thinned[0][0], *(values for _, values in thinned), labels=labels, colors=colors, linewidth=0)


def _safe(text: str) -> str:
    """Text as it is: no math mode from a `$`, and no leading underscore, which would hide it from the legend."""
    shown = visible(text, 60).replace("\n", " ").replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown
