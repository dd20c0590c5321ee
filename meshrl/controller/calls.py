"""The book of calls that are under way on a group: who has answered, who failed, whose time is up.

Both backends feed it (an answer, a failure, a death, the passing of time) and it settles the futures. When the group
can no longer be trusted it is broken: every open call fails, the processes are ended, later calls are told why.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.controller.errors import ControllerError, DeadlineError, GroupBrokenError, WorkerDied, WorkerError
from meshrl.controller.futures import Future
from meshrl.controller.worker import Failure


@dataclass(frozen=True)
class Deadlines:
    """How long the controller waits, in seconds: for workers to start and to build themselves; for a call; for the
    other ranks after one has failed; for the processes to end at shutdown."""

    start: float = 300.0
    call: float = 3600.0
    release: float = 5.0
    shutdown: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"deadline '{name}' must be positive, got {value}")


@dataclass
class OpenCall:
    """One call on some ranks of a group."""

    number: int
    method: str
    ranks: list[int]
    future: Future[Any]
    limit: float
    direct: bool
    opened_at: float
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    failed_at: float | None = None

    @property
    def line(self) -> str:
        """Where it queues: direct calls behind those of the same method alone, with which they share the worker."""
        return self.method if self.direct else ""

    @property
    def answered(self) -> list[int]:
        return sorted([*self.answers, *self.failures])

    @property
    def silent(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.answers and rank not in self.failures]


class CallBook:
    """The open calls of one group. Thread-safe."""

    def __init__(
        self,
        role: str,
        deadlines: Deadlines,
        end_workers: Callable[[], None],
        stacks_of: Callable[[Sequence[int]], str],
    ) -> None:
        self._role = role
        self._deadlines = deadlines
        self._end_workers = end_workers
        self._stacks_of = stacks_of
        self._lock = threading.RLock()
        self._open: dict[int, OpenCall] = {}
        self._next_number = 0
        self._turn_began: dict[str, float] = {}  # by line: when the oldest call of it became the oldest
        self._broken: ControllerError | None = None

    @property
    def broken(self) -> ControllerError | None:
        """What broke the group, if anything did."""
        return self._broken

    def check(self) -> None:
        """Raise if the group is broken."""
        if self._broken is not None:
            raise GroupBrokenError(
                f"worker group '{self._role}' can no longer be called: {self._broken}"
            ) from self._broken

    def open(
        self,
        method: str,
        ranks: Sequence[int],
        future: Future[Any],
        *,
        limit: float | None = None,
        direct: bool = False,
    ) -> int:
        """Enter a call; returns its number. The future is settled with the answers in the order of `ranks`."""
        with self._lock:
            self.check()
            number, self._next_number = self._next_number, self._next_number + 1
            limit = self._deadlines.call if limit is None else limit
            call = OpenCall(number, method, list(ranks), future, limit, direct, time.monotonic())
            future.describe = lambda: self._describe(call)
            self._open[number] = call
            return number

    def answer(self, number: int, rank: int, value: Any) -> None:
        """A rank's part of a call is done: `value` is its result, or a `Failure`."""
        with self._lock:
            call = self._open.get(number)
            if call is None:
                return
            if isinstance(value, Failure):
                call.failures[rank] = value
                call.failed_at = call.failed_at or time.monotonic()
            else:
                call.answers[rank] = value
            if call.silent:
                return
            del self._open[number]
            if not self._queues(call):
                self._turn_began[call.line] = time.monotonic()
        if call.failures:
            call.future.set_error(self._worker_error(call))
        else:
            call.future.set_result([call.answers[rank] for rank in call.ranks])

    def waits(self) -> list[str]:
        """What is under way, in words."""
        with self._lock:
            calls = list(self._open.values())
        return [self._describe(call) for call in calls]

    def died(self, rank: int, pid: int | None, exitcode: int | None, why: str) -> None:
        """A rank's process has ended although nobody asked it to."""
        with self._lock:
            if self._broken is not None:
                return
            call = next((call for call in self._open.values() if rank in call.silent), None)
            method = call.method if call else None
            during = f"while it ran {method}" if method else "between calls"
            message = f"rank {rank} of '{self._role}' (pid {pid}) died {during}: {why}"
            if call and call.failures:
                message += "\nBefore that, other ranks had failed:" + self._failures_text(call)
        self.break_group(
            WorkerDied(message, rank=rank, role=self._role, method=method, pid=pid, exitcode=exitcode), first=call
        )

    def tick(self) -> None:
        """Look at the clock: break the group if a call is past its deadline. To be called a few times a second."""
        now = time.monotonic()
        with self._lock:
            late = next((call for call in self._open.values() if self._is_late(call, now)), None)
            if late is None or self._broken is not None:
                return
        if late.failures:
            error: ControllerError = self._worker_error(late)
        else:
            error = self._deadline_error(late, now)
        self.break_group(error, first=late)

    def break_group(self, error: ControllerError, first: OpenCall | None = None) -> None:
        """Fail every open call (`first` with the error itself, the others with a pointer to it) and end the workers."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            calls, self._open = list(self._open.values()), {}
        self._end_workers()
        for call in calls:
            if first is None or call is first:
                call.future.set_error(error)
            else:
                lost = GroupBrokenError(f"{call.method} on '{self._role}' was lost: {error}")
                lost.__cause__ = error
                call.future.set_error(lost)

    def _is_late(self, call: OpenCall, now: float) -> bool:
        if call.failed_at is not None:
            if self._queues(call, call.silent):
                return False  # the others have not come to it yet
            return now - max(call.failed_at, self._started(call)) > self._deadlines.release
        if self._queues(call):
            return False  # the older call has its own deadline
        return now - self._started(call) > call.limit

    def _queues(self, call: OpenCall, on: Sequence[int] | None = None) -> bool:
        """Whether an older call of its line is under way, on some of the ranks `on` if they are given."""
        older = [each for each in self._open.values() if each.number < call.number and each.line == call.line]
        return any(on is None or not set(on).isdisjoint(each.silent) for each in older)

    def _started(self, call: OpenCall) -> float:
        return max(call.opened_at, self._turn_began.get(call.line, 0.0))

    def _describe(self, call: OpenCall) -> str:
        with self._lock:
            waited = time.monotonic() - call.opened_at
            return (
                f"{call.method} on '{self._role}' has run for {waited:.1f} s; "
                f"ranks that have answered: {call.answered}, ranks that have not: {call.silent}"
            )

    def _deadline_error(self, call: OpenCall, now: float) -> DeadlineError:
        waited = now - self._started(call)
        message = (
            f"{call.method} on '{self._role}' has not finished after {waited:.1f} s (deadline: {call.limit:g} s); "
            f"ranks that have answered: {call.answered}, ranks that have not: {call.silent}"
        )
        stacks = self._stacks_of(call.silent)
        if stacks:
            message += f"\nWhere the silent ranks are:\n{stacks}"
        return DeadlineError(
            message, role=self._role, method=call.method, answered=call.answered, silent=call.silent, waited=waited
        )

    def _worker_error(self, call: OpenCall) -> WorkerError:
        rank, failure = min(call.failures.items(), key=lambda item: item[1].at)
        message = f"{call.method} failed on rank {rank} of '{self._role}': {failure.error_type}: {failure.message}"
        if len(call.failures) > 1:
            others = ", ".join(str(other) for other in sorted(call.failures) if other != rank)
            message += f"\n(ranks {others} failed too, later)"
        if call.silent:
            message += (
                f"\n(ranks {call.silent} had not returned {self._deadlines.release:g} s later; the group was ended)"
            )
        return WorkerError(
            f"{message}\nThe worker's traceback:\n{failure.traceback_text}",
            rank=rank,
            role=self._role,
            method=call.method,
            error_type=failure.error_type,
            traceback_text=failure.traceback_text,
        )

    @staticmethod
    def _failures_text(call: OpenCall) -> str:
        return "".join(f"\nrank {rank}:\n{failure.traceback_text}" for rank, failure in sorted(call.failures.items()))
