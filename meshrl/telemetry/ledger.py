"""What a process does with its time: every second is booked to exactly one name.

    with booked("sync"):        # or @booked("sync") above a function
        ...

An inner block takes its seconds from the outer one. Nothing is added up here: the ledger keeps the changes of the name
with their times, and whoever reads its pages (see `accounts`) adds them up between any two moments, or draws them.
Threads that work for the same ledger share its time: what was opened last counts, and work counts before waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

OTHER = "other"
WAIT = "wait_"
IDLE = "wait_controller"
UPDATE = "update_"
# Changes that nobody has asked for are dropped beyond this, the oldest first.
MOST_CHANGES = 1 << 16

_here = threading.local()
_push_range: Callable[[str], Any] | None = None
_pop_range: Callable[[], Any] | None = None
_mark_device: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Span:
    """Something that happened on a track of a process beside its ledger, such as a call or a micro-batch."""

    track: str
    name: str
    start: float
    end: float


@dataclass
class Page:
    """What a ledger has noted since it was last asked, in seconds of its own process's clock.

    `changes` are (time, name) from then on; the last name holds until `until`. `counts` add up over pages, of `peaks`
    the largest counts.
    """

    begin: float
    until: float
    changes: list[tuple[float, str]]
    counts: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    blocks: int = 0  # that were opened
    # What the device itself took for blocks of the update, by its own clock; empty on a CPU.
    device: dict[str, float] = field(default_factory=dict)

    def segments(self, shift: float = 0.0) -> Iterator[tuple[float, float, str]]:
        """(start, end, name) without gaps, `shift` seconds later."""
        ends = [at for at, _ in self.changes[1:]] + [self.until]
        for (start, name), end in zip(self.changes, ends, strict=True):
            if end > start:
                yield start + shift, end + shift, name


class Ledger:
    """The time of one process (or of one role in it). `idle` is the name of the time in which nobody works for it."""

    def __init__(self, idle: str = IDLE, clock: Callable[[], float] = time.perf_counter) -> None:
        self.idle, self.clock = idle, clock
        self.traces = False  # whether spans are kept
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[int, str]]] = {}  # of each thread that works for it, innermost last
        self._opened = self._told = 0
        self._name = idle
        self._changes = [(clock(), idle)]
        self._counts: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._spans: list[Span] = []
        self._device: list[tuple[str, Any, Any]] = []  # blocks between two events of the device

    def open(self, name: str) -> int:
        """From now on this thread's time is `name`; returns what `close` needs."""
        with self._lock:
            self._opened += 1
            names = self._open.setdefault(threading.get_ident(), [])
            names.append((self._opened, name))
            self._note()
            return len(names) - 1

    def close(self, depth: int) -> None:
        """Ends what this thread opened, and what an error has left open in it."""
        with self._lock:
            me = threading.get_ident()
            del self._open[me][depth:]
            if not depth:
                del self._open[me]
            self._note()

    def _note(self) -> None:
        tops = [names[-1] for names in self._open.values()]
        working = [top for top in tops if not top[1].startswith(WAIT)]
        name = max(working or tops)[1] if tops else self.idle
        if name == self._name:
            return
        self._name = name
        self._changes.append((self.clock(), name))
        if len(self._changes) > MOST_CHANGES:
            del self._changes[: MOST_CHANGES // 2]

    @contextmanager
    def serving(self, method: str, name: str = OTHER, is_call: bool = True) -> Iterator[None]:
        """Inside, this thread works for this ledger; the seconds of a call are counted under its method."""
        outer = getattr(_here, "ledger", None), getattr(_here, "method", "")
        _here.ledger, _here.method = self, method
        depth = self.open(name)
        started = self.clock()
        try:
            yield
        finally:
            _here.ledger, _here.method = outer
            self.close(depth)
            ended = self.clock()
            if is_call:
                self.add(f"seconds/{method}", ended - started)
                self.span("calls", method, started, ended)

    def span(self, track: str, name: str, start: float, end: float) -> None:
        """Keeps a span for the timeline, where one is written."""
        if self.traces:
            with self._lock:
                self._spans.append(Span(track, name, start, end))

    def add(self, name: str, value: float) -> None:
        """Adds to a count."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + value

    def raise_to(self, name: str, value: float) -> None:
        """Keeps the largest of a measure."""
        with self._lock:
            self._peaks[name] = max(value, self._peaks.get(name, value))

    def on_device(self, name: str, start: Any, end: Any) -> None:
        """Keeps a block of the device's time, between two events that may not have happened yet."""
        with self._lock:
            self._device.append((name, start, end))
            if len(self._device) > MOST_CHANGES:
                del self._device[: MOST_CHANGES // 2]

    def take(self) -> Page:
        """What was noted since the last time; the ledger goes on from now."""
        with self._lock:
            now = self.clock()
            page = Page(self._changes[0][0], now, self._changes, self._counts, self._peaks, self._spans)
            page.blocks, self._told = self._opened - self._told, self._opened
            self._changes, self._counts, self._peaks, self._spans = [(now, self._name)], {}, {}, []
            blocks, self._device = self._device, []
        for name, start, end in blocks:
            if end.query():  # else its call still runs: nobody waits for it here
                page.device[name] = page.device.get(name, 0.0) + start.elapsed_time(end) / 1e3
        return page


class booked(ContextDecorator):  # noqa: N801 - reads as a word: `with booked("sync"):`
    """Books the time of a block, or of a decorated function, in the ledger that this thread works for, if any."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ledger: Ledger | None = None
        self._depth = 0
        self._mark: Any = None

    def _recreate_cm(self) -> booked:
        return booked(self.name)

    def __enter__(self) -> booked:
        self._ledger = current_ledger()
        if self._ledger is not None:
            self._depth = self._ledger.open(self.name)
            if _mark_device is not None and self.name.startswith(UPDATE):
                self._mark = _mark_device()
        if _push_range is not None:
            _push_range(self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _pop_range is not None:
            _pop_range()
        if self._ledger is not None:
            if self._mark is not None and _mark_device is not None:
                self._ledger.on_device(self.name, self._mark, _mark_device())
            self._ledger.close(self._depth)


def current_ledger() -> Ledger | None:
    """The ledger that this thread works for."""
    return getattr(_here, "ledger", None)


def served_method() -> str:
    """The call that this thread works on; empty outside of one."""
    return getattr(_here, "method", "")


@contextmanager
def working_for(ledger: Ledger | None, method: str, name: str = OTHER) -> Iterator[None]:
    """For a thread that a call has started: inside, it works for the call's ledger."""
    if ledger is None:
        yield
        return
    with ledger.serving(method, name, is_call=False):
        yield


def seconds_of_a_block(repeats: int = 300) -> float:
    """What booking itself takes here, the best of three."""
    best = float("inf")
    for _ in range(3):
        with Ledger().serving("f"):
            started = time.perf_counter()
            for _ in range(repeats):
                with booked("sync"):
                    pass
            best = min(best, (time.perf_counter() - started) / repeats)
    return best


def watch_cuda() -> None:
    """From now on booked blocks of this process are NVTX ranges, and those of an update are measured by CUDA events.

    Neither waits for the device.
    """
    global _push_range, _pop_range, _mark_device
    import torch

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    _push_range, _pop_range, _mark_device = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop, mark
