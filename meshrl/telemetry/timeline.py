"""timeline.json.gz: the activities of every process of a run, for Perfetto (ui.perfetto.dev) or chrome://tracing.

TimelineFile:   writes the file, step by step
read_timeline:  reads the file, even if it is incomplete
draw_step:      draws one step as a picture

Times are microseconds since 1970 on the controller's clock. Each step is appended when it ends. The file of a killed
run lacks its closing bracket, which neither the viewers nor `read_timeline` need.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.files import naming, writing_whole
from meshrl.telemetry.time_ledger import Key, Segment, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes


logger = logging.getLogger(__name__)

CONTROLLER = ("controller", 0)
LEDGER, STEPS = "ledger", "steps"
Event = dict[str, Any]


class TimelineFile:
    """A writer of a run's timeline; events of steps up to `last_step` that are in the file already are kept.

    `steps` are the steps to write; if it is empty, all steps are written.
    """

    def __init__(self, path: Path, steps: Sequence[int] = (), last_step: int = -1) -> None:
        self.path, self.steps = path, frozenset(steps)
        # The zero of `perf_counter` is arbitrary; this offset turns its seconds into seconds since 1970.
        self._since_1970 = time.time() - time.perf_counter()
        self._pids: dict[Key, int] = {CONTROLLER: 0}
        self._tids: dict[tuple[int, str, int], int] = {}
        kept = [event for event in read_timeline(path) if step_of(event) <= last_step] if path.exists() else []
        self._go_on_from(kept)
        with writing_whole(path) as aside, gzip.open(aside, "wt", encoding="utf-8") as file:
            file.write("[\n" + _lines(kept))

    def _go_on_from(self, kept: Sequence[Event]) -> None:
        """Take over the process and track numbers of the kept events; new numbers could otherwise collide with them."""
        lanes: Counter[tuple[int, str]] = Counter()
        for event in kept:
            pid, name = event.get("pid", 0), str(event.get("args", {}).get("name"))
            if event.get("name") == "process_name" and name != CONTROLLER[0]:
                who, _, rank = name.rpartition(" rank ")
                self._pids[who, int(rank)] = pid
            elif event.get("name") == "thread_name":
                self._tids[pid, name, lanes[pid, name]] = event["tid"]
                lanes[pid, name] += 1

    def wants(self, step: int) -> bool:
        """Return whether the timeline of this step is to be written."""
        return not self.steps or step in self.steps

    def write(
        self,
        step: int,
        begin: float,
        end: float,
        accounts: Mapping[Key, Sequence[Segment]],
        spans: Mapping[Key, Sequence[Span]],
        uncertainty: Mapping[Key, float],
    ) -> None:
        """Append a step from `begin` to `end`: the ledger segments of every process, and its other spans.

        All times are seconds of the controller's clock. `uncertainty` is the clock error of each process in seconds.
        """
        events = self._track(CONTROLLER, STEPS, [(begin, end, f"step {step}")], step)
        for key, segments in accounts.items():
            events += self._track(key, LEDGER, segments, step, uncertainty.get(key))
            tracks: dict[str, list[Segment]] = {}
            for span in spans.get(key, ()):
                tracks.setdefault(span.track, []).append((span.start, span.end, span.name))
            for track, found in tracks.items():
                events += self._track(key, track, sorted(found), step)
        with naming(self.path), gzip.open(self.path, "at", 3, encoding="utf-8") as file:
            file.write(_lines(events))

    def _track(
        self, key: Key, track: str, segments: Sequence[Segment], step: int, uncertainty: float | None = None
    ) -> list[Event]:
        """Return the events of one track; overlapping segments go to different lanes.

        Names of processes and tracks are emitted once, when a lane is first used.
        """
        pid = self._pids.setdefault(key, max(self._pids.values()) + 1)
        events: list[Event] = []
        lanes: list[float] = []
        for start, end, name in segments:
            lane = next((lane for lane, free in enumerate(lanes) if free <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            tid = self._tids.get((pid, track, lane))
            if tid is None:
                tid = self._tids[pid, track, lane] = max(self._tids.values(), default=-1) + 1
                events += _names(key, pid, tid, track, step, uncertainty)
            ts, dur = round((start + self._since_1970) * 1e6, 1), round((end - start) * 1e6, 1)
            event = {"ph": "X", "pid": pid, "tid": tid, "cat": track, "name": name, "ts": ts, "dur": dur}
            events.append(event | {"args": {"step": step}})
        return events

    def close(self) -> None:
        """Write the closing bracket of the JSON list."""
        with naming(self.path), gzip.open(self.path, "at", 3, encoding="utf-8") as file:
            file.write("{}\n]\n")


def _names(key: Key, pid: int, tid: int, track: str, step: int, uncertainty: float | None) -> list[Event]:
    """Return the metadata events that name and sort a process and its track in the viewers."""
    who = key[0] if key == CONTROLLER else f"{key[0]} rank {key[1]}"
    said: dict[str, dict[str, Any]] = {
        "process_name": {"name": who},
        "process_sort_index": {"sort_index": pid},
        "thread_name": {"name": track},
        "thread_sort_index": {"sort_index": tid},
    }
    if uncertainty is not None:
        said["process_labels"] = {"labels": f"clock ± {uncertainty * 1e6:.0f} µs"}
    return [{"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {**a, "step": step}} for what, a in said.items()]


def _lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event, ensure_ascii=False) + ",\n" for event in events)


def step_of(event: Event) -> int:
    """Return the step that an event belongs to, or -1."""
    return int(event.get("args", {}).get("step", -1))


def read_timeline(path: Path) -> list[Event]:
    """Read the events of a timeline file, even if it is still being written or was cut off by a kill."""
    lines: list[str] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines += file
    except gzip.BadGzipFile as error:
        if not lines:
            raise ValueError(f"{path} is no timeline: {error}") from error
    except (EOFError, zlib.error) as error:
        logger.debug("%s is read up to its last whole line: %s", path, error)
    events = (line.strip().rstrip(",") for line in lines)
    return [event for line in events if line.startswith("{") and line.endswith("}") and (event := json.loads(line))]


# The picture of one step: a row for every process, a colour for every activity.

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
# Waits have pale colours.
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
    """Draw one step of a run's timeline, by default the last; return the path of the picture.

    The picture is a PNG, or an SVG if `out` has that suffix.
    """
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
    """Return the rows of the picture as (label, events): each process's ledger, followed by its pipeline chunks."""
    rows: list[tuple[str, list[Event]]] = []
    for pid, who in sorted(processes.items()):
        own = [event for event in events if event["pid"] == pid]
        rows.append((who, [event for event in own if event["cat"] == LEDGER]))
        for track in sorted({event["cat"] for event in own if event["cat"].startswith("pipeline")}):
            rows.append((track.removeprefix("pipeline "), [event for event in own if event["cat"] == track]))
    return rows


def _colours(names: Any) -> dict[str, str]:
    """Return a colour for each name that occurs: work in the order of a step, then waits in pale colours."""
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
