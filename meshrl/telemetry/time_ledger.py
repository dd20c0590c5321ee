"""Time attribution: every second of a process is booked to exactly one name.

    with booked("sync"):        # or @booked("sync") above a function
        ...

Ledger, booked:   record the time of one process
Track, account:   combine the ledgers of all processes into one account per step
ClockOffset:      the difference between the clocks of two processes
PhaseTimer:       the phases of a step, measured by the controller

The seconds of an inner block do not count for the outer block. The ledger only records changes of the name with their
times. Readers of its pages (`Page`) sum the times between any two moments, or draw them. Threads that work for the same
ledger share its time: the block opened last counts, and work takes precedence over waiting.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

OTHER = "other"
WAIT = "wait_"
IDLE = "wait_controller"
UPDATE = "update_"
# The most changes kept between two calls of `Ledger.take`. Beyond this limit, the oldest half is dropped.
MOST_CHANGES = 1 << 16

_here = threading.local()
_push_range: Callable[[str], Any] | None = None
_pop_range: Callable[[], Any] | None = None
_mark_device: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Span:
    """A named time span on a track of a process other than its ledger, such as a call or a micro-batch."""

    track: str
    name: str
    start: float
    end: float


@dataclass
class Page:
    """The records of a ledger since the previous page, in seconds of its own process's clock.

    `changes` are (time, name) pairs: the name holds from that time to the next change, and the last name holds to
    `until`. Over several pages, `counts` are summed and `peaks` are combined by their maximum.
    """

    begin: float
    until: float
    changes: list[tuple[float, str]]
    counts: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    blocks: int = 0  # number of blocks opened
    # Seconds of update blocks on the device, by the device's own clock; empty on a CPU.
    device: dict[str, float] = field(default_factory=dict)

    def segments(self, shift: float = 0.0) -> Iterator[tuple[float, float, str]]:
        """Yield contiguous (start, end, name) segments, moved by `shift` seconds; empty segments are left out."""
        ends = [at for at, _ in self.changes[1:]] + [self.until]
        for (start, name), end in zip(self.changes, ends, strict=True):
            if end > start:
                yield start + shift, end + shift, name


class Ledger:
    """The recorded time of one process, or of one role in a process.

    `idle` is the name for time in which no thread works for the ledger.
    """

    def __init__(self, idle: str = IDLE, clock: Callable[[], float] = time.perf_counter) -> None:
        self.idle, self.clock = idle, clock
        self.traces = False  # whether spans are kept
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[int, str]]] = {}  # open blocks of each thread, innermost last
        self._opened = self._told = 0
        self._name = idle
        self._changes = [(clock(), idle)]
        self._counts: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._spans: list[Span] = []
        self._device: list[tuple[str, Any, Any]] = []  # blocks as (name, start event, end event) of the device

    def open(self, name: str) -> int:
        """Book this thread's time to `name` from now on; return the depth to pass to `close`."""
        with self._lock:
            self._opened += 1
            names = self._open.setdefault(threading.get_ident(), [])
            names.append((self._opened, name))
            self._note()
            return len(names) - 1

    def close(self, depth: int) -> None:
        """End this thread's block at `depth`, and all blocks that an error has left open inside it."""
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
        """Let this thread work for this ledger during the `with` block, with its time booked to `name`.

        If `is_call`, the seconds are also counted as `seconds/<method>` and kept as a span.
        """
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
        """Keep a span for the timeline, if spans are kept (`traces`)."""
        if self.traces:
            with self._lock:
                self._spans.append(Span(track, name, start, end))

    def add(self, name: str, value: float) -> None:
        """Add a value to the count of this name."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + value

    def raise_to(self, name: str, value: float) -> None:
        """Raise the peak of this name to `value` if it is larger."""
        with self._lock:
            self._peaks[name] = max(value, self._peaks.get(name, value))

    def on_device(self, name: str, start: Any, end: Any) -> None:
        """Keep a block of device time between two events that the device may not have reached yet."""
        with self._lock:
            self._device.append((name, start, end))
            if len(self._device) > MOST_CHANGES:
                del self._device[: MOST_CHANGES // 2]

    def take(self) -> Page:
        """Return the records since the last call as a page, and start the next page."""
        with self._lock:
            now = self.clock()
            page = Page(self._changes[0][0], now, self._changes, self._counts, self._peaks, self._spans)
            page.blocks, self._told = self._opened - self._told, self._opened
            self._changes, self._counts, self._peaks, self._spans = [(now, self._name)], {}, {}, []
            blocks, self._device = self._device, []
        for name, start, end in blocks:
            if end.query():  # otherwise the call still runs on the device, and this thread does not wait for it
                page.device[name] = page.device.get(name, 0.0) + start.elapsed_time(end) / 1e3
        return page


class booked(ContextDecorator):  # noqa: N801 - reads as a word: `with booked("sync"):`
    """A context manager or decorator that books the time of a block in the ledger of this thread, if there is one."""

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
    """Return the ledger that this thread works for, or None."""
    return getattr(_here, "ledger", None)


def served_method() -> str:
    """Return the name of the worker method that this thread serves, or "" outside of a call."""
    return getattr(_here, "method", "")


@contextmanager
def working_for(ledger: Ledger | None, method: str, name: str = OTHER) -> Iterator[None]:
    """Let a thread started by a call work for the call's ledger during the `with` block; None does nothing."""
    if ledger is None:
        yield
        return
    with ledger.serving(method, name, is_call=False):
        yield


def seconds_of_a_block(repeats: int = 300) -> float:
    """Measure the seconds that booking one block takes in this process, the best of three measurements."""
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
    """Mark booked blocks of this process as NVTX ranges, and measure blocks of an update by CUDA events.

    Both apply from now on, and neither waits for the device.
    """
    global _push_range, _pop_range, _mark_device
    import torch

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    _push_range, _pop_range, _mark_device = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop, mark


# The account of a step: the ledgers of all processes combined, with the reason for each wait.
#
# The pages of every process are first moved to the controller's clock, so that a step begins and ends at the same
# moment everywhere. A rank without work books `wait_controller`. Here this name is replaced by the real reason, if
# there is one:
#
#     wait_peers    another rank of its group still works on the call
#     wait_GROUP    the controller itself waits for that group
#     wait_reward   the controller scores samples

# (start, end, name)
Segment = tuple[float, float, str]
# (worker group, rank)
Key = tuple[str, int]
PEERS, REWARD = "wait_peers", "reward"


@dataclass
class Track:
    """The collected records of one process, or of one role in a process, on the controller's clock.

    `who` is its worker group.
    """

    who: str
    rank: int = 0
    segments: list[Segment] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)
    blocks: int = 0
    _ended: tuple[float, float] | None = None  # end of the last page, on its own and the controller's clock

    def add(self, page: Page, shift: float) -> None:
        """Add a page; `shift` is the number of seconds from the page's clock to the controller's clock."""
        # `shift` may be more exact than for the last page. Pages that follow each other without a gap on their own
        # clock must do so on the controller's clock as well.
        goes_on = self._ended is not None and self._ended[0] == page.begin
        floor = self._ended[1] if goes_on and self._ended is not None else -math.inf
        for number, (start, end, name) in enumerate(page.segments(shift)):
            start = floor if goes_on and not number else max(start, floor)
            if end > start:
                self.segments.append((start, end, name))
        self._ended = page.until, max(page.until + shift, floor)
        self.blocks += page.blocks
        self.spans += [Span(s.track, s.name, s.start + shift, s.end + shift) for s in page.spans]
        for name, value in page.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value
        for name, value in page.peaks.items():
            self.peaks[name] = max(value, self.peaks.get(name, value))
        for name, value in page.device.items():
            self.device[name] = self.device.get(name, 0.0) + value

    def between(self, begin: float, end: float) -> list[Segment]:
        """Return the segments between two moments, cut at both of them."""
        return [(max(a, begin), min(b, end), name) for a, b, name in self.segments if a < end and b > begin]

    def forget(self, until: float) -> None:
        """Delete segments that ended by `until`, and all spans, counts and peaks."""
        self.segments = [segment for segment in self.segments if segment[1] > until]
        self.spans, self.counts, self.peaks, self.device, self.blocks = [], {}, {}, {}, 0


def account(controller: Track, ranks: Sequence[Track], begin: float, end: float) -> dict[Key, list[Segment]]:
    """Return the segments of a step for every track, with `wait_controller` replaced by its reason, if it has one.

    The step lasts from `begin` to `end` on the controller's clock.
    """
    own = controller.between(begin, end)
    found = {(controller.who, controller.rank): own}
    groups: dict[str, list[Track]] = {}
    for track in ranks:
        groups.setdefault(track.who, []).append(track)
    for who, tracks in groups.items():
        cut = {track.rank: track.between(begin, end) for track in tracks}
        busy = union(segment for segments in cut.values() for segment in segments if segment[2] != IDLE)
        reasons = [(a, b, _reason(name, who)) for a, b, name in own]
        for rank, segments in cut.items():
            found[who, rank] = [piece for segment in segments for piece in _explained(segment, busy, reasons)]
    return found


def _reason(controller_does: str, who: str) -> str:
    """Return the name of the wait of a group without work while the controller is in `controller_does`."""
    if controller_does == REWARD:
        return WAIT + REWARD
    return controller_does if controller_does.startswith(WAIT) and controller_does != WAIT + who else IDLE


def _explained(segment: Segment, busy: Sequence[Segment], reasons: Sequence[Segment]) -> list[Segment]:
    """Cut a `wait_controller` segment by its reasons: busy peers first, then the controller's activity.

    Other segments are returned unchanged.
    """
    if segment[2] != IDLE:
        return [segment]
    pieces: list[Segment] = []
    for piece in overlay(segment, busy):
        pieces += overlay(piece, reasons) if piece[2] == IDLE else [piece]
    return pieces


def union(segments: Iterable[Segment]) -> list[Segment]:
    """Merge segments into non-overlapping ones, all named `wait_peers`."""
    merged: list[Segment] = []
    for start, end, _ in sorted(segments):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end), PEERS)
        else:
            merged.append((start, end, PEERS))
    return merged


def overlay(under: Segment, over: Sequence[Segment]) -> list[Segment]:
    """Cut the segment `under` and rename the parts covered by segments of `over` to their names.

    `over` is sorted and without overlaps.
    """
    start, end, name = under
    pieces: list[Segment] = []
    first = max(0, bisect.bisect_right(over, start, key=lambda segment: segment[0]) - 1)
    for a, b, other in over[first:]:
        if a >= end:
            break
        a, b = max(a, start), min(b, end)
        if b <= a:
            continue
        if a > start:
            pieces.append((start, a, name))
        pieces.append((a, b, other))
        start = b
    if end > start:
        pieces.append((start, end, name))
    return pieces


def seconds_by_name(segments: Iterable[Segment], device: Mapping[str, float] | None = None) -> dict[str, float]:
    """Sum the seconds of segments by name.

    If the device measured the blocks of an update (names with `update_`), their total is redistributed in proportion
    to the device's measurements in `device`.
    """
    sums: dict[str, float] = {}
    for start, end, name in segments:
        sums[name] = sums.get(name, 0.0) + end - start
    measured = {name: seconds for name, seconds in (device or {}).items() if seconds > 0}
    if measured:
        whole = sum(sums.pop(name) for name in list(sums) if name.startswith(UPDATE))
        for name, seconds in measured.items():
            sums[name] = whole * seconds / sum(measured.values())
    return sums


def ledger_metrics(
    accounts: Mapping[Key, Sequence[Segment]], devices: Mapping[Key, Mapping[str, float]], seconds: float
) -> dict[str, float]:
    """Return `ledger_s/<who>/<what>`, seconds as means over the ranks, and `ledger/<who>/booked`.

    The latter is the share of the step's `seconds` that the sum of a group's bookings covers.
    """
    ranks: dict[str, list[dict[str, float]]] = {}
    for key, segments in accounts.items():
        ranks.setdefault(key[0], []).append(seconds_by_name(segments, devices.get(key)))
    metrics: dict[str, float] = {}
    for who, sums in ranks.items():
        for name in sorted({name for one in sums for name in one}):
            metrics[f"ledger_s/{who}/{name}"] = sum(one.get(name, 0.0) for one in sums) / len(sums)
        metrics[f"ledger/{who}/booked"] = sum(sum(one.values()) for one in sums) / (len(sums) * seconds)
    return metrics


# The offset between another process's clock and this process's clock, measured by asking that process for its time.

# Two machines' clocks may drift apart by this many seconds per second, so a measurement loses accuracy as it ages.
DRIFT = 50e-6


class ClockOffset:
    """The best measurement so far of how many seconds another clock is ahead; 0 before the first measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._uncertainty, self._at = float("inf"), 0.0

    def note(self, asked: float, theirs: float, answered: float) -> None:
        """Take a measurement if it is more certain than the best one so far.

        The other process was asked at `asked` and its answer arrived at `answered`, on this process's clock. Its own
        clock showed `theirs` at an unknown moment in between.
        """
        uncertainty = (answered - asked) / 2
        if uncertainty <= self.uncertainty(answered):
            self.seconds = theirs - (asked + answered) / 2
            self._uncertainty, self._at = uncertainty, answered

    def uncertainty(self, now: float) -> float:
        """Return the largest possible error of the offset in seconds, which grows with its age at `now`."""
        return self._uncertainty + DRIFT * (now - self._at)

    @property
    def shift(self) -> float:
        """Seconds to add to the other clock's times to get times of this process's clock."""
        return -self.seconds


# The phases of a step, measured by the controller.

STEP = "step"
# Phase -> the name that the controller's own time is booked to; in all other phases the name is `other`.
BOOKED = {"reward": "reward", "save_checkpoint": "checkpoint"}


class PhaseTimer:
    """A split of the wall time since construction (or `reset`) into named phases that add up to the step.

    The seconds of an inner phase do not count for the outer phase. Seconds outside of all phases count as `other`.
    `on_change` is called with the name of the current phase at every change, and with "" between phases.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_change: Callable[[str], None] | None = None
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._open: list[str] = []
        self._seconds: dict[str, float] = {OTHER: 0.0}
        self._mark = self.began = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the seconds of the `with` block to `timing_s/<name>`; repeated phases of one name add up."""
        if name in (OTHER, STEP):
            raise ValueError(f"a phase cannot be called {name!r}: the timer itself reports timing_s/{name}")
        self._charge()
        self._open.append(name)
        self._announce()
        try:
            with booked(BOOKED.get(name, OTHER)):
                yield
        finally:
            self._charge()
            self._open.pop()
            self._announce()

    def metrics(self) -> dict[str, float]:
        """Return `timing_s/<phase>` for each phase, `timing_s/other` and their sum `timing_s/step`, up to now."""
        self._charge()
        timing = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        timing[f"timing_s/{STEP}"] = sum(self._seconds.values())
        return timing

    def reset(self) -> None:
        """Start the next step; phases that are still open continue in the new step."""
        self._seconds = {OTHER: 0.0}
        self._mark = self.began = self._clock()

    def _charge(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else OTHER
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now

    def _announce(self) -> None:
        if self._on_change is not None:
            self._on_change(self._open[-1] if self._open else "")
