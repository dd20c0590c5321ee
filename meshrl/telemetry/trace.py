"""timeline.json.gz: what every process of a run did, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Times are microseconds of the controller's clock since 1970. Each step is appended when it ends; a file whose run was
killed lacks its last bracket, which both viewers and `read_timeline` do without.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.files import naming, writing_whole
from meshrl.telemetry.accounts import Key, Segment
from meshrl.telemetry.ledger import Span

logger = logging.getLogger(__name__)

CONTROLLER = ("controller", 0)
LEDGER, STEPS = "ledger", "steps"
Event = dict[str, Any]


class TimelineFile:
    """Writes the timeline of a run; what is there of steps up to `last_step` stays.

    `steps`: those to write, all of them if empty.
    """

    def __init__(self, path: Path, steps: Sequence[int] = (), last_step: int = -1) -> None:
        self.path, self.steps = path, frozenset(steps)
        # Our clock counts from anywhere.
        self._since_1970 = time.time() - time.perf_counter()
        self._pids: dict[Key, int] = {CONTROLLER: 0}
        self._tids: dict[tuple[int, str, int], int] = {}
        kept = [event for event in read_timeline(path) if step_of(event) <= last_step] if path.exists() else []
        self._go_on_from(kept)
        with writing_whole(path) as aside, gzip.open(aside, "wt", encoding="utf-8") as file:
            file.write("[\n" + _lines(kept))

    def _go_on_from(self, kept: Sequence[Event]) -> None:
        """Takes the numbers of processes and tracks from what is kept, or two tracks would become one."""
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
        """Whether this step is to be written."""
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
        """Adds a step: the ledger of every process, and beside it what else happened there."""
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
        """Events of one track, on as many lanes as there are at the same time; names are said once."""
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
        """Ends the file."""
        with naming(self.path), gzip.open(self.path, "at", 3, encoding="utf-8") as file:
            file.write("{}\n]\n")


def _names(key: Key, pid: int, tid: int, track: str, step: int, uncertainty: float | None) -> list[Event]:
    """What the viewers are to call a process and its track."""
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
    """The step that an event belongs to."""
    return int(event.get("args", {}).get("step", -1))


def read_timeline(path: Path) -> list[Event]:
    """The events of a timeline, also of one that is still written or was cut off."""
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
