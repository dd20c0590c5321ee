"""What a pipeline stage did and when: forward and backward of every micro-batch, and what it waited for.

`PipelineTimeline` speaks the protocol of Megatron's timers, so that its schedules fill it without knowing it:

    timeline = PipelineTimeline()
    with timeline.attached(engine.model):
        engine.forward_backward_batch(data, loss)
    timeline.spans
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.files import write_json, writing_whole
from meshrl.telemetry.time_ledger import PEERS, booked, current_ledger

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor, nn


COMPUTE = ("forward", "backward")
COLOURS = {"forward": ("#4c78a8", "#9ecae9", "#2f4b6e"), "backward": ("#54a24b", "#a6d99f", "#33682d")}
WAIT_COLOUR = "#e8e8e8"


@dataclass(frozen=True)
class Span:
    """One stretch of a stage's time. `work` is what it cost: seconds of the processor, not of the wall clock."""

    kind: str
    chunk: int
    micro_batch: int
    start: float
    end: float
    work: float = 0.0


class PipelineTimeline:
    """Records one rank's spans, in seconds since it was made or cleared.

    On a GPU pass `synchronize`, so that a span ends when its kernels have ended; this costs some of their overlap.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], float] = time.thread_time,
        synchronize: Callable[[], Any] | None = None,
    ) -> None:
        self._clock, self._busy, self._synchronize = clock, busy, synchronize
        self._watches: dict[str, Stopwatch] = {}
        self.clear()

    def clear(self) -> None:
        """Forgets all spans and starts the clock anew."""
        self.spans: list[Span] = []
        self._current: tuple[int, int] | None = None
        self._passed: Counter[int] = Counter()
        self._origin = self._clock()

    @contextmanager
    def attached(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, what Megatron's schedules do with these chunks of one model is recorded."""
        handles = [chunk.register_forward_hook(partial(self._ran, number)) for number, chunk in enumerate(chunks)]
        config: Any = chunks[0].config
        config.timers = self
        try:
            yield
        finally:
            config.timers = None
            for handle in handles:
                handle.remove()

    def _ran(self, chunk: int, module: nn.Module, arguments: Any, output: Tensor) -> None:
        # A chunk sees the micro-batches in their order, whatever it does in between.
        self.watch(output, chunk, self._passed[chunk])
        self._passed[chunk] += 1

    def record(self, kind: str, chunk: int, micro_batch: int, start: float, end: float, work: float = 0.0) -> None:
        """Adds a span: `forward` or `backward` of a micro-batch through a chunk, or a `wait`."""
        self.spans.append(Span(kind, chunk, micro_batch, start, end, work))

    def watch(self, output: Tensor, chunk: int, micro_batch: int) -> None:
        """Called during a forward with what the chunk gave: names the running forward and, later, its backward."""
        self._current = (chunk, micro_batch)
        if output.requires_grad:

            def name_backward(gradient: Tensor) -> None:
                self._current = (chunk, micro_batch)

            output.register_hook(name_backward)

    def __call__(self, name: str, log_level: int = 0) -> Stopwatch:
        if name not in self._watches:
            self._watches[name] = Stopwatch(self, name)
        return self._watches[name]

    def now(self) -> tuple[float, float]:
        """Seconds since the start, and seconds of the processor."""
        if self._synchronize is not None:
            self._synchronize()
        return self._clock() - self._origin, self._busy()

    def close(self, name: str, start: tuple[float, float]) -> None:
        """Ends what Megatron's timer `name` began at `start`."""
        end = self.now()
        kind = name.removesuffix("-compute")
        if kind == "forward-backward":
            return  # the whole schedule
        if kind not in COMPUTE:
            self.record("wait", -1, -1, start[0], end[0])
            return
        if self._current is None:
            raise ValueError(f"a {kind} ended that nobody has named: call watch(output, chunk, micro_batch) in it")
        self.record(kind, *self._current, start[0], end[0], end[1] - start[1])
        self._current = None


class Stopwatch:
    """One of Megatron's timers."""

    def __init__(self, timeline: PipelineTimeline, name: str) -> None:
        self._timeline, self._name = timeline, name
        self._start: tuple[float, float] = (0.0, 0.0)

    def start(self, barrier: bool = False) -> None:
        self._start = self._timeline.now()

    def stop(self, barrier: bool = False) -> None:
        self._timeline.close(self._name, self._start)


def write_chrome_trace(stages: Sequence[Sequence[Span]], path: Path) -> None:
    """Writes the spans of all stages for chrome://tracing or Perfetto: a process a stage, a thread a chunk."""
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(stages):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}})
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": stage,
                    "tid": max(span.chunk, 0),
                    "name": span.kind if span.kind == "wait" else f"{span.kind} {span.micro_batch}",
                    "cat": span.kind,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"chunk": span.chunk, "micro_batch": span.micro_batch, "work_ms": span.work * 1e3},
                }
            )
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"}, indent=None)


def draw_gantt(panels: Mapping[str, Sequence[Sequence[Span]]], path: Path) -> None:
    """Draws timelines one under the other on one time axis, each with its title: a row a stage, a box a micro-batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sum(len(stages) for stages in panels.values())
    figure = Figure(figsize=(12, 0.42 * rows + 0.85 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(stages) for stages in panels.values()]
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axis, (title, stages) in zip(axes, panels.items(), strict=True):
        _draw_stages(axis, stages)
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel("seconds; blue forward, green backward, other shades for further chunks", fontsize=8)
    with writing_whole(path) as aside:
        figure.savefig(aside, format=path.suffix[1:], dpi=110)


def _draw_stages(axis: Axes, stages: Sequence[Sequence[Span]]) -> None:
    end = max((span.end for spans in stages for span in spans), default=1.0)
    for stage, spans in enumerate(stages):
        for span in sorted(spans, key=lambda span: span.kind != "wait"):
            width = span.end - span.start
            shades = COLOURS.get(span.kind)
            colour = WAIT_COLOUR if shades is None else shades[span.chunk % len(shades)]
            axis.barh(stage, width, left=span.start, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
            if shades is not None and width > end / 120:
                centre = span.start + width / 2
                ink = "#1c2430" if span.chunk % 3 == 1 else "white"  # the second shade is a light one
                axis.text(centre, stage, str(span.micro_batch), ha="center", va="center", fontsize=7, color=ink)
    axis.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axis.invert_yaxis()
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False, labelsize=8)


# Megatron's pipeline schedules in the ledger: forward and backward of every micro-batch, waits for other stages.

COMPUTE_PHASES = {"forward-compute": "update_forward", "backward-compute": "update_backward"}
WHOLE = "forward-backward"


class BookingTimeline(PipelineTimeline):
    """A timeline that also books what it hears of: sends and receives are waits for peers."""

    def __init__(self, forward_only: bool) -> None:
        super().__init__()
        self.forward_only = forward_only

    def __call__(self, name: str, log_level: int = 0) -> Stopwatch:
        if name not in self._watches:
            self._watches[name] = BookingStopwatch(self, name, self._book_of(name))
        return self._watches[name]

    def _book_of(self, name: str) -> str | None:
        if name == WHOLE or (self.forward_only and name in COMPUTE_PHASES):
            return None  # it counts as what it is a part of
        if name in COMPUTE_PHASES:
            return COMPUTE_PHASES[name]
        return "update_backward" if "grads" in name else PEERS


class BookingStopwatch(Stopwatch):
    """One of Megatron's timers, with the name that its time is booked to."""

    def __init__(self, timeline: PipelineTimeline, name: str, book: str | None) -> None:
        super().__init__(timeline, name)
        self._book = None if book is None else booked(book)

    def start(self, barrier: bool = False) -> None:
        super().start(barrier)
        if self._book is not None:
            self._book.__enter__()

    def stop(self, barrier: bool = False) -> None:
        if self._book is not None:
            self._book.__exit__(None, None, None)
        super().stop(barrier)


@contextmanager
def booking_pipeline(chunks: Sequence[nn.Module], forward_only: bool) -> Iterator[None]:
    """Inside, what Megatron's schedules do with these chunks of one model is booked, and kept where a run is traced.

    Without a ledger, or where somebody else listens to the schedule, nothing is done.
    """
    ledger = current_ledger()
    config = getattr(chunks[0], "config", None)
    if ledger is None or getattr(config, "timers", None) is not None:
        yield
        return
    timeline = BookingTimeline(forward_only)
    began = ledger.clock()
    with timeline.attached(chunks):
        yield
    for span in timeline.spans if ledger.traces else ():
        name = span.kind if span.kind == "wait" else f"{span.kind} {span.micro_batch}"
        ledger.span(f"pipeline chunk {max(span.chunk, 0)}", name, began + span.start, began + span.end)
