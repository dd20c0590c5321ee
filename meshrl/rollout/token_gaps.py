"""How long an engine with work to do gives no token: what an update of the weights costs those who wait for answers."""

from __future__ import annotations

import time

# How often a wait for the next token looks.
LOOK_EVERY = 0.001


class TokenGaps:
    """The largest time between two steps that gave tokens, since `restart`; pauses without work do not count."""

    def __init__(self) -> None:
        self._count = 0
        self._last: float | None = None  # when the last token came, while there is more to do
        self._longest = 0.0

    def note(self, count: int, *, goes_on: bool) -> None:
        """After every step: how many tokens there are in all, and whether there is more to do."""
        if count != self._count:
            now = time.perf_counter()
            if self._last is not None:
                self._longest = max(self._longest, now - self._last)
            self._count, self._last = count, now
        if not goes_on:
            self._last = None

    def restart(self) -> None:
        """Forgets the gaps so far; one that is open counts from now on."""
        self._longest = 0.0
        if self._last is not None:
            self._last = time.perf_counter()

    def longest(self) -> float:
        """Seconds, an open gap included."""
        last = self._last
        return self._longest if last is None else max(self._longest, time.perf_counter() - last)

    def settle(self, deadline: float) -> float:
        """As `longest`, once the open gap has ended: by a token, the end of all work, or after `deadline` seconds."""
        count, end = self._count, time.perf_counter() + deadline
        while self._last is not None and self._count == count and time.perf_counter() < end:
            time.sleep(LOOK_EVERY)
        return self.longest()
