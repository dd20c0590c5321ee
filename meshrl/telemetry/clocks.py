"""By how much another process's clock is ahead of ours, found by asking it what time it is."""

from __future__ import annotations

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
