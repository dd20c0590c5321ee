"""A reentrant lock that serves its callers in turn.

A thread that steps an engine in a loop lets go of the lock and takes it again at once; with a plain lock it nearly
always wins, and whoever wants to pause, abort or update waits until all requests have ended.
"""

from __future__ import annotations

import threading


class FairLock:
    """Like `threading.RLock`, and fit for `threading.Condition`; no caller gets it twice while another waits."""

    def __init__(self) -> None:
        self._turnstile, self._inside = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> bool:
        """Waits for its turn."""
        if not self._is_owned():
            # Whoever waits for the lock holds the turnstile, which the last owner must pass again.
            with self._turnstile:
                self._inside.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Lets the next one in, once for each time it was acquired."""
        if not self._is_owned():
            raise RuntimeError("a lock can only be released by the thread that holds it")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._inside.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What a condition asks of a reentrant lock.

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth
