"""SIGTERM, as a scheduler sends it before it takes the machine away: the step is finished, saved, and the run ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class RunStoppedError(BaseException):
    """The run was asked to end before its last step; nothing that handles errors may take it for one of its own."""

    exit_code = EXIT_CODE


class StopRequest:
    """Hears SIGTERM. `deadline` seconds after it the run ends where it is, saved or not."""

    def __init__(self, deadline: float):
        self.deadline, self.requested, self._is_late = deadline, False, False
        self._timer: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM asks for an end instead of killing the process; only the main thread can hear it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            signal.signal(signal.SIGTERM, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_late:
            self._is_late = False
            raise RunStoppedError(
                f"stopped by SIGTERM: the step was not finished and saved within trainer.deadlines.stop "
                f"({self.deadline} s); the same command goes on from the checkpoint before"
            )
        if not self.requested:
            self.requested = True
            # A thread and the same signal: reward functions use the process's alarm for their own limits.
            self._timer = threading.Timer(self.deadline, self._remind)
            self._timer.daemon = True
            self._timer.start()

    def _remind(self) -> None:
        self._is_late = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
