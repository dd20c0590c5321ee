"""From the ledgers of all processes to one account of a step: who did what, and who waited for whom.

Every process's pages are moved to the controller's clock first, so that a step begins and ends at the same moment
everywhere. A rank that has nothing to do says `wait_controller`; here that becomes whom it really waits for:

    wait_peers    another rank of its group still works on the call
    wait_GROUP    the controller itself waits for that group
    wait_reward   the controller scores samples
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.telemetry.ledger import IDLE, UPDATE, WAIT, Page, Span

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
