"""Megatron's pipeline schedules in the ledger: forward and backward of every micro-batch, waits for other stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshrl.telemetry.accounts import PEERS
from meshrl.telemetry.ledger import booked, current_ledger
from meshrl.telemetry.timeline import PipelineTimeline, Stopwatch

if TYPE_CHECKING:
    from torch import nn

COMPUTE = {"forward-compute": "update_forward", "backward-compute": "update_backward"}
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
        if name == WHOLE or (self.forward_only and name in COMPUTE):
            return None  # it counts as what it is a part of
        if name in COMPUTE:
            return COMPUTE[name]
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
