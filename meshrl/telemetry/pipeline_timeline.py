"""Timeline of pipeline stages: forward and backward of every micro-batch, and waits for other stages.

PipelineTimeline:                 records spans
write_chrome_trace, draw_gantt:   write spans as a trace file or a picture
BookingTimeline:                  records the same times in the time ledger

`PipelineTimeline` implements the protocol of Megatron's timers, so that Megatron's schedules fill it unchanged:

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
    """One time span of a pipeline stage, in seconds; `work` is its CPU time, not wall time."""

    kind: str
    chunk: int
    micro_batch: int
    start: float
    end: float
    work: float = 0.0


class PipelineTimeline:
    """A recorder of one rank's spans, in seconds since construction or the last `clear`.

    On a GPU, pass `synchronize`, so that a span ends when its kernels have ended. This costs some of the overlap of
    kernels.
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
        """Delete all spans and restart the clock at zero."""
        self.spans: list[Span] = []
        self._current: tuple[int, int] | None = None
        self._passed: Counter[int] = Counter()
        self._origin = self._clock()

    @contextmanager
    def attached(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Record, during the `with` block, what Megatron's schedules do with these chunks of one model."""
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
        # Every chunk gets the micro-batches in order, so a counter per chunk gives the micro-batch's number.
        self.watch(output, chunk, self._passed[chunk])
        self._passed[chunk] += 1

    def record(self, kind: str, chunk: int, micro_batch: int, start: float, end: float, work: float = 0.0) -> None:
        """Add a span: the `forward` or `backward` of a micro-batch through a chunk, or a `wait`."""
        self.spans.append(Span(kind, chunk, micro_batch, start, end, work))

    def watch(self, output: Tensor, chunk: int, micro_batch: int) -> None:
        """Assign the running forward, and later its backward, to a chunk and micro-batch.

        Call it during the forward with the chunk's `output`, whose gradient hook marks the backward.
        """
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
        """Return the seconds since the start and the CPU seconds, after synchronizing if configured."""
        if self._synchronize is not None:
            self._synchronize()
        return self._clock() - self._origin, self._busy()

    def close(self, name: str, start: tuple[float, float]) -> None:
        """Record the span that Megatron's timer `name` began at `start` and ends now."""
        end = self.now()
        kind = name.removesuffix("-compute")
        if kind == "forward-backward":
            return  # the timer of the whole schedule
        if kind not in COMPUTE:
            self.record("wait", -1, -1, start[0], end[0])
            return
        if self._current is None:
            raise ValueError(f"a {kind} ended that nobody has named: call watch(output, chunk, micro_batch) in it")
        self.record(kind, *self._current, start[0], end[0], end[1] - start[1])
        self._current = None


class Stopwatch:
    """A timer in Megatron's protocol that records its spans in a timeline."""

    def __init__(self, timeline: PipelineTimeline, name: str) -> None:
        self._timeline, self._name = timeline, name
        self._start: tuple[float, float] = (0.0, 0.0)

    def start(self, barrier: bool = False) -> None:
        self._start = self._timeline.now()

    def stop(self, barrier: bool = False) -> None:
        self._timeline.close(self._name, self._start)


def write_chrome_trace(stages: Sequence[Sequence[Span]], path: Path) -> None:
    """Write the spans of all stages for chrome://tracing or Perfetto; a stage is a process, a chunk a thread."""
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
    """Draw titled timelines below each other on one time axis, with a row per stage and a box per micro-batch."""
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
                ink = "#1c2430" if span.chunk % 3 == 1 else "white"  # the second shade is light
                axis.text(centre, stage, str(span.micro_batch), ha="center", va="center", fontsize=7, color=ink)
    axis.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axis.invert_yaxis()
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False, labelsize=8)


# The time ledger of Megatron's pipeline schedules: forward and backward of every micro-batch, waits for other stages.

COMPUTE_PHASES = {"forward-compute": "update_forward", "backward-compute": "update_backward"}
WHOLE = "forward-backward"


class BookingTimeline(PipelineTimeline):
    """A timeline that also books its times in the current ledger; sends and receives count as waits for peers."""

    def __init__(self, forward_only: bool) -> None:
        super().__init__()
        self.forward_only = forward_only

    def __call__(self, name: str, log_level: int = 0) -> Stopwatch:
        if name not in self._watches:
            self._watches[name] = BookingStopwatch(self, name, self._book_of(name))
        return self._watches[name]

    def _book_of(self, name: str) -> str | None:
        if name == WHOLE or (self.forward_only and name in COMPUTE_PHASES):
            return None  # its time stays with the enclosing block
        if name in COMPUTE_PHASES:
            return COMPUTE_PHASES[name]
        return "update_backward" if "grads" in name else PEERS


class BookingStopwatch(Stopwatch):
    """A timer in Megatron's protocol that also books its time under a name of the ledger."""

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
    """Book, during the `with` block, the times of Megatron's schedules on these chunks of one model.

    If the ledger traces, the spans are kept for the timeline as well. Nothing is done without a ledger, or if the
    model's config has timers already.
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
