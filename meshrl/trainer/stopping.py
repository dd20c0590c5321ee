"""SIGTERM, as a scheduler sends it before it takes the machine away: the step is finished, saved, and the run ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class RunStoppedError(RuntimeError):
    """The run was asked to end before its last step."""

    exit_code = EXIT_CODE


class StopRequest:
    """Hears SIGTERM. `deadline` seconds after it the run ends where it is, saved or not."""

    def __init__(self, deadline: float):
        self.deadline, self.requested = deadline, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM asks for an end instead of killing the process; only the main thread can hear it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGALRM)]
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGALRM, self._end)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before:
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.setitimer(signal.ITIMER_REAL, self.deadline)

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise RunStoppedError(
            f"stopped by SIGTERM: the step was not finished and saved within trainer.deadlines.stop ({self.deadline} s)"
            "; the same command goes on from the checkpoint before"
        )
