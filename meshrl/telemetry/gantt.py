"""A step as a picture: a row for every process, a colour for everything it did."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.files import writing_whole
from meshrl.telemetry.trace import LEDGER, STEPS, Event, read_timeline, step_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "prefill": "#8c6bb1",
    "generate": "#4c78a8",
    "reward": "#e0a030",
    "log_prob": "#72b7b2",
    "ref": "#b2d8d5",
    "value": "#9fbf5f",
    "update_forward": "#a6d99f",
    "update_backward": "#54a24b",
    "update_optimizer": "#2f6b2a",
    "sync": "#e45756",
    "checkpoint": "#9d755d",
    "other": "#8a8f98",
}
# Pale: nobody works.
WAITS = {
    "wait_controller": "#dfe2e7",
    "wait_peers": "#f6dccb",
    "wait_reward": "#f6ecc9",
    "wait_actor_rollout_ref": "#dcecd9",
    "wait_rollout": "#d3e2f2",
    "wait_critic": "#e8dcf0",
    "wait_reward_model": "#f2e3b3",
}
OTHER_WAIT = "#eceef1"
PIPELINE = {"forward": "#a6d99f", "backward": "#54a24b"}
MICRO_BATCH = re.compile(r"^(forward|backward) (\d+)$")


def draw_step(run: Path, step: int | None = None, out: Path | None = None) -> Path:
    """Draws one step (the last, if none is named) of a run's timeline; a PNG, or an SVG by the name of `out`."""
    path = run / "timeline.json.gz" if run.is_dir() else run
    if not path.exists():
        raise ValueError(f"there is no {path}: train with trainer.timeline=true")
    events = read_timeline(path)
    steps = sorted({step_of(event) for event in events if event.get("cat") == STEPS})
    if not steps:
        raise ValueError(f"{path} has no step yet")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(f"{path} has no step {chosen}: it has {', '.join(str(known) for known in steps)}")
    out = out or path.parent / f"timeline-step-{chosen}.png"
    if out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out must end in .png or .svg, got {out}")
    _draw(events, chosen, out)
    return out


def _draw(events: Sequence[Event], step: int, out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    mine = [event for event in events if event["ph"] == "X" and step_of(event) == step]
    whole = next(event for event in mine if event["cat"] == STEPS)
    rows = _rows(mine, processes)
    colours = _colours(event["name"] for _, found in rows for event in found if event["cat"] == LEDGER)
    figure = Figure(figsize=(13, 0.46 * len(rows) + 1.5), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (_, found) in enumerate(rows):
        _draw_row(axes, row, found, whole, colours)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=9)
    axes.set_xlim(0, whole["dur"] / 1e6)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the step began", fontsize=9)
    axes.set_title(f"step {step}: {whole['dur'] / 1e6:.3f} s", loc="left", fontsize=12, fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=9)
    patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    with writing_whole(out) as aside:
        figure.savefig(aside, format=out.suffix[1:])


def _rows(events: Sequence[Event], processes: dict[int, str]) -> list[tuple[str, list[Event]]]:
    """(label, events): the ledger of every process and, below it, the chunks of its pipeline."""
    rows: list[tuple[str, list[Event]]] = []
    for pid, who in sorted(processes.items()):
        own = [event for event in events if event["pid"] == pid]
        rows.append((who, [event for event in own if event["cat"] == LEDGER]))
        for track in sorted({event["cat"] for event in own if event["cat"].startswith("pipeline")}):
            rows.append((track.removeprefix("pipeline "), [event for event in own if event["cat"] == track]))
    return rows


def _colours(names: Any) -> dict[str, str]:
    """A colour for each name that is there: work in the order of a step, then waits in greys."""
    there = set(names)
    waits = sorted(name for name in there if name.startswith("wait_"))
    known = {name: colour for name, colour in COLOURS.items() if name in there}
    strange = dict.fromkeys(sorted(there - set(known) - set(waits)), "#000000")
    return known | strange | {name: WAITS.get(name, OTHER_WAIT) for name in waits}


def _draw_row(axes: Axes, row: int, events: Sequence[Event], whole: Event, colours: dict[str, str]) -> None:
    for event in events:
        left, width = (event["ts"] - whole["ts"]) / 1e6, event["dur"] / 1e6
        micro_batch = MICRO_BATCH.match(event["name"])
        colour = PIPELINE[micro_batch[1]] if micro_batch else colours.get(event["name"], OTHER_WAIT)
        axes.barh(row, width, left=left, height=0.78, color=colour, linewidth=0)
        if micro_batch and event["dur"] > whole["dur"] / 100:
            axes.text(left + width / 2, row, micro_batch[2], ha="center", va="center", fontsize=7)
        elif event["dur"] > whole["dur"] / 12 and event["cat"] == LEDGER:
            ink = "white" if event["name"] in COLOURS else "#5d6775"
            label = event["name"].replace("update_", "")
            axes.text(left + width / 2, row, label, ha="center", va="center", fontsize=8, color=ink)
