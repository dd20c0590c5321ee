"""Where the seconds of a step went."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshrl.telemetry.ledger import OTHER, booked

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
