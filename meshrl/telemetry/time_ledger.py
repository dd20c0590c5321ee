"""What a process does with its time: every second is booked to exactly one name.

    with booked("sync"):        # or @booked("sync") above a function
        ...

An inner block takes its seconds from the outer one. Nothing is added up here: the ledger keeps the changes of the name
with their times, and whoever reads its pages (see below) adds them up between any two moments, or draws them.
Threads that work for the same ledger share its time: what was opened last counts, and work counts before waiting.
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


# From the ledgers of all processes to one account of a step: who did what, and who waited for whom.
#
# Every process's pages are moved to the controller's clock first, so that a step begins and ends at the same moment
# everywhere. A rank that has nothing to do says `wait_controller`; here that becomes whom it really waits for:
#
#     wait_peers    another rank of its group still works on the call
#     wait_GROUP    the controller itself waits for that group
#     wait_reward   the controller scores samples

# (start, end, name)
Segment = tuple[float, float, str]
# (whose, rank)
Key = tuple[str, int]
PEERS, REWARD = "wait_peers", "reward"


@dataclass
class Track:
    """What is known of one process (or one role in it): whose it is, and its time so far, on the controller's clock."""

    who: str
    rank: int = 0
    segments: list[Segment] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)
    blocks: int = 0
    _ended: tuple[float, float] | None = None  # the last page, on its own clock and on the controller's

    def add(self, page: Page, shift: float) -> None:
        """Adds a page; `shift` seconds make its clock the controller's."""
        # The clocks may be known better by now: what goes on there without a gap must do so here.
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
        """Its segments, cut at two moments."""
        return [(max(a, begin), min(b, end), name) for a, b, name in self.segments if a < end and b > begin]

    def forget(self, until: float) -> None:
        """Lets go of what is over, and of counts and peaks."""
        self.segments = [segment for segment in self.segments if segment[1] > until]
        self.spans, self.counts, self.peaks, self.device, self.blocks = [], {}, {}, {}, 0


def account(controller: Track, ranks: Sequence[Track], begin: float, end: float) -> dict[Key, list[Segment]]:
    """The segments of a step for every track, with waits named after whom they are for."""
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
    """What a group without work waits for while the controller does this."""
    if controller_does == REWARD:
        return WAIT + REWARD
    return controller_does if controller_does.startswith(WAIT) and controller_does != WAIT + who else IDLE


def _explained(segment: Segment, busy: Sequence[Segment], reasons: Sequence[Segment]) -> list[Segment]:
    """A segment, cut into its reasons where it is a wait that has several."""
    if segment[2] != IDLE:
        return [segment]
    pieces: list[Segment] = []
    for piece in overlay(segment, busy):
        pieces += overlay(piece, reasons) if piece[2] == IDLE else [piece]
    return pieces


def union(segments: Iterable[Segment]) -> list[Segment]:
    """Where any of the segments is, as `wait_peers` without overlaps."""
    merged: list[Segment] = []
    for start, end, _ in sorted(segments):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end), PEERS)
        else:
            merged.append((start, end, PEERS))
    return merged


def overlay(under: Segment, over: Sequence[Segment]) -> list[Segment]:
    """`under`, with the names of `over` (sorted, without overlaps) where they are."""
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
    """Adds up. Where the device measured the blocks of an update itself, their sum is shared out as it says."""
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
    """`ledger_s/<who>/<what>`, means over the ranks, and `ledger/<who>/booked`, the share of the step in their sum."""
    ranks: dict[str, list[dict[str, float]]] = {}
    for key, segments in accounts.items():
        ranks.setdefault(key[0], []).append(seconds_by_name(segments, devices.get(key)))
    metrics: dict[str, float] = {}
    for who, sums in ranks.items():
        for name in sorted({name for one in sums for name in one}):
            metrics[f"ledger_s/{who}/{name}"] = sum(one.get(name, 0.0) for one in sums) / len(sums)
        metrics[f"ledger/{who}/booked"] = sum(sum(one.values()) for one in sums) / (len(sums) * seconds)
    return metrics


# By how much another process's clock is ahead of ours, found by asking it what time it is.

# Two machines' clocks may drift apart by so much; a measure becomes worse by it as it ages.
DRIFT = 50e-6


class ClockOffset:
    """The best measure so far. Until the first one, clocks are taken to be the same."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._uncertainty, self._at = float("inf"), 0.0

    def note(self, asked: float, theirs: float, answered: float) -> None:
        """We asked and had the answer at these times of ours; it was made at `theirs`, somewhere in between."""
        uncertainty = (answered - asked) / 2
        if uncertainty <= self.uncertainty(answered):
            self.seconds = theirs - (asked + answered) / 2
            self._uncertainty, self._at = uncertainty, answered

    def uncertainty(self, now: float) -> float:
        """How far off the measure may be, in seconds."""
        return self._uncertainty + DRIFT * (now - self._at)

    @property
    def shift(self) -> float:
        """What to add to their times to have ours."""
        return -self.seconds


# Where the seconds of a step went.

STEP = "step"
# What the controller's own time in these phases is booked to; in all others it is `other`.
BOOKED = {"reward": "reward", "save_checkpoint": "checkpoint"}


class PhaseTimer:
    """Splits the wall time since its start (or `reset`) into named phases that add up to the step.

    A phase inside another takes its seconds away from the outer one; seconds in no phase are `other`.
    `on_change` hears the name of the phase that runs now, "" between phases.
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
        """Charges the seconds of the `with` block to `timing_s/<name>`; the same name may come again and adds up."""
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
        """`timing_s/<phase>` for each phase, `timing_s/other` and their sum `timing_s/step`, up to now."""
        self._charge()
        timing = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        timing[f"timing_s/{STEP}"] = sum(self._seconds.values())
        return timing

    def reset(self) -> None:
        """Starts the next step; phases still open go on in it."""
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
