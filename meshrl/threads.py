"""Threads that never keep a process from exiting, unlike the threads of `concurrent.futures`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Up to `count` daemon threads, started when first needed, that begin calls in the order given."""

    def __init__(self, count: int, name: str):
        self.count, self.name = count, name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Schedule a call and return a future of its result."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        with self._lock:
            if self._started < self.count:
                self._started += 1
                threading.Thread(target=self._run, daemon=True, name=self.name).start()
        return future

    def close(self) -> None:
        """End the threads after the calls submitted so far.

        Without this the threads wait for calls as long as the process lives.
        """
        for _ in range(self.count):
            self._calls.put(None)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, future = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del asked, call, future  # otherwise the last call's data stay in memory until the next call
