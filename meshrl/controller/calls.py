"""Calls of a worker group: futures, errors, and the book of open calls.

Both backends report results, failures, deaths and the passing of time to the `CallBook`, which settles the futures. If
the group can no longer be trusted, it is broken: every open call fails, the processes are ended, and later calls raise
an error with the reason.

- `Future` and `SerialThread`: results of non-blocking calls, and background jobs.
- `ControllerError` and its subclasses.
- `CallBook`: the open calls of one group.
- `Collective` and `disagreements`: torch's flight recorder, for ranks that wait in different collectives.
- `Backend`: the interface of the backends.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from meshrl.controller.dispatch import Failure, RankCall
from meshrl.telemetry.time_ledger import booked

# Results of non-blocking calls, and a thread that runs jobs in order.

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Future(Generic[T]):
    """A result of a non-blocking call, which may not be ready yet.

    A future may be passed as an argument to another group's method before it is ready. The collect step (concatenating
    the ranks' results) runs in the first thread that calls `get`, so that an unused result costs nothing.
    """

    def __init__(self, whom: str = "workers") -> None:
        self.whom = whom  # the role whose result is awaited
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._raw: Any = None
        self._error: BaseException | None = None
        self._transform: Callable[[Any], T] | None = None
        self.describe: Callable[[], str] = lambda: "the call has not been sent yet: it waits for its arguments"

    def done(self) -> bool:
        """Return whether `get` would return or raise without waiting for a worker."""
        return self._settled.is_set()

    def get(self, timeout: float | None = None) -> T:
        """Return the result, or raise the call's error.

        After `timeout` seconds raise a TimeoutError, which leaves the call running.
        """
        if not self._settled.is_set():
            with booked(f"wait_{self.whom}"):
                if not self._settled.wait(timeout):
                    raise TimeoutError(f"no result after {timeout:.1f} s: {self.describe()}")
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._transform is not None:
                transform, self._transform = self._transform, None
                try:
                    self._raw = transform(self._raw)
                except BaseException as error:
                    self._raw, self._error = None, error
                    raise
            return self._raw

    def set_transform(self, transform: Callable[[Any], T]) -> None:
        """Set the function that makes the result from the raw results of the ranks. For the maker of the future."""
        self._transform = transform

    def set_result(self, raw: Any) -> None:
        """Settle the future with the raw results of the ranks. For the maker of the future."""
        self._settle(raw, None)

    def set_error(self, error: BaseException) -> None:
        """Settle the future with an error. For the maker of the future."""
        self._settle(None, error)

    def _settle(self, raw: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._settled.is_set():
                return
            self._raw, self._error = raw, error
            self.describe = _answered  # drop the call's `describe`, whose reference cycle would keep results in memory
            self._settled.set()


def _answered() -> str:
    return "the workers have answered"


def has_pending(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether one of the arguments is a future that is not ready."""
    return any(isinstance(value, Future) and not value.done() for value in (*args, *kwargs.values()))


def materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace futures among the arguments by their results, waiting for each of them."""

    def value_of(value: Any) -> Any:
        return value.get() if isinstance(value, Future) else value

    return tuple(value_of(value) for value in args), {key: value_of(value) for key, value in kwargs.items()}


class SerialThread:
    """A daemon thread that runs jobs one after another; it starts with the first job.

    It is not a ThreadPoolExecutor, whose threads are joined when the interpreter exits, which would delay Ctrl-C.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """True if a job is queued or runs."""
        return self._unfinished > 0

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. It should handle its own exceptions, because others are only logged."""
        with self._lock:
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException:
                logger.exception("a job of thread %s failed", self._name)
            finally:
                del job  # frees its arguments, which may be large, while this thread waits for the next job
                with self._lock:
                    self._unfinished -= 1


# The errors of calls on workers.


class ControllerError(RuntimeError):
    """The base of every error that a worker group raises about its workers."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def _rebuild(kind: type[ControllerError], message: str, fields: dict[str, Any]) -> ControllerError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class WorkerError(ControllerError):
    """An error that a worker's method raised; the message ends with the worker's own traceback."""

    def __init__(
        self, message: str, *, rank: int, role: str, method: str, error_type: str, traceback_text: str
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.role = role
        self.method = method
        self.error_type = error_type
        self.traceback_text = traceback_text


class WorkerDied(ControllerError):  # noqa: N818
    """An error because a worker's process ended while the group was in use."""

    def __init__(
        self, message: str, *, rank: int, role: str, method: str | None, pid: int | None, exitcode: int | None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.role = role
        self.method = method
        self.pid = pid
        self.exitcode = exitcode


class DeadlineError(ControllerError, TimeoutError):
    """A call took longer than its deadline. `answered` and `silent` have the ranks with and without a result."""

    def __init__(
        self, message: str, *, role: str, method: str, answered: list[int], silent: list[int], waited: float
    ) -> None:
        super().__init__(message)
        self.role = role
        self.method = method
        self.answered = answered
        self.silent = silent
        self.waited = waited


class GroupBrokenError(ControllerError):
    """The group can no longer be called. The message and `__cause__` have the first error."""


class RayStartError(ControllerError):
    """Ray did not start, or its cluster cannot be reached."""


@dataclass(frozen=True)
class Deadlines:
    """The time limits of the controller's waits, in seconds.

    `start`: for workers to start and to construct themselves. `call`: for one call. `release`: for the other ranks
    after one rank has failed. `shutdown`: for the processes to end at shutdown.
    """

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
    """One call on some ranks of a group, with the results and failures so far."""

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
        """The queue in which the call waits: the queue of its method for direct calls, else the common queue ""."""
        return self.method if self.direct else ""

    @property
    def answered(self) -> list[int]:
        return sorted([*self.answers, *self.failures])

    @property
    def silent(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.answers and rank not in self.failures]


class CallBook:
    """The open calls of one group. Thread-safe.

    `end_workers` kills the worker processes. `stacks_of` returns the stacks of the given ranks as text.
    """

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
        self._turn_began: dict[str, float] = {}  # by line: the time at which its oldest call became the oldest
        self._broken: ControllerError | None = None

    @property
    def broken(self) -> ControllerError | None:
        """The error that broke the group, or None."""
        return self._broken

    def check(self) -> None:
        """Raise a GroupBrokenError if the group is broken."""
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
        """Enter a call and return its number. The future is settled with the results in the order of `ranks`."""
        with self._lock:
            self.check()
            number, self._next_number = self._next_number, self._next_number + 1
            limit = self._deadlines.call if limit is None else limit
            call = OpenCall(number, method, list(ranks), future, limit, direct, time.monotonic())
            future.describe = lambda: self._describe(call)
            self._open[number] = call
            return number

    def answer(self, number: int, rank: int, value: Any) -> None:
        """Record a rank's `value` for a call, a result or a `Failure`, and settle the future after the last rank's."""
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
        """Return a text line for every open call."""
        with self._lock:
            calls = list(self._open.values())
        return [self._describe(call) for call in calls]

    def died(self, rank: int, pid: int | None, exitcode: int | None, why: str) -> None:
        """Break the group because a rank's process ended unexpectedly."""
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
        """Break the group if a call is past its deadline. Must be called a few times a second."""
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
        """Fail every open call and end the workers.

        The call `first` fails with `error` itself, the others with a GroupBrokenError caused by it. Without `first`,
        all calls fail with `error`.
        """
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
                return False  # the silent ranks still run an older call
            return now - max(call.failed_at, self._started(call)) > self._deadlines.release
        if self._queues(call):
            return False  # the older call has its own deadline
        return now - self._started(call) > call.limit

    def _queues(self, call: OpenCall, on: Sequence[int] | None = None) -> bool:
        """Return whether an older call of the same line is open, on any of the ranks `on` if given."""
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


# The newest collectives of each rank from torch's flight recorder, and the disagreements between ranks.
#
# torch keeps the newest collectives of a process in a ring buffer (`TORCH_FR_BUFFER_SIZE`), with NCCL and with gloo.
# Ranks that wait for each other should be in the same collective of the same group. If a rank is in another collective,
# has another shape or has not arrived, that is the reason of the wait.

# The newest collectives of each group are enough, because ranks that wait for each other are never far apart.
NEWEST = 32
# The collectives in which the ranks' shapes may differ.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")
EVEN = ("all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective of a process group as a rank has called it."""

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    done: bool

    @property
    def words(self) -> str:
        """The collective's name, with its shapes if all ranks must have the same shapes."""
        is_even = self.name.startswith(EVEN) or not self.name.startswith(UNEVEN)
        sizes = " of " + ", ".join(str(list(size)) for size in self.sizes) if self.sizes and is_even else ""
        return self.name + sizes


def recorded() -> list[Collective] | None:
    """Return the newest collectives of this process, or None if this torch does not record them."""
    import torch._C._distributed_c10d as c10d

    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dumps = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    if not dumps:
        return None
    entries = [entry for dump in dumps for entry in json.loads(dump() or b"{}").get("entries", [])]
    by_group: dict[str, list[Collective]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        number, description = entry["process_group"]
        group = description if description and description != "undefined" else f"group {number}"
        name = str(entry["profiling_name"]).rpartition(":")[2]
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        sizes = tuple(tuple(size) for size in entry.get("input_sizes", []))
        by_group.setdefault(group, []).append(Collective(group, entry["collective_seq_id"], name, sizes, done))
    return [entry for found in by_group.values() for entry in found[-NEWEST:]]


def disagreements(by_rank: Mapping[int, Iterable[Collective]]) -> list[str]:
    """Return a text line for each group in which a rank waits: the ranks in another collective, or not yet in it."""
    lines = []
    for group in sorted({entry.group for entries in by_rank.values() for entry in entries}):
        members = {
            rank: found
            for rank, entries in by_rank.items()
            if (found := {entry.number: entry for entry in entries if entry.group == group})
        }
        waiting = [entry.number for found in members.values() for entry in found.values() if not entry.done]
        if waiting:
            lines.append(_about(group, min(waiting), members))
    return lines


def _about(group: str, number: int, members: Mapping[int, Mapping[int, Collective]]) -> str:
    there = {rank: found[number] for rank, found in members.items() if number in found}
    absent = {rank: found[max(found)] for rank, found in members.items() if max(found) < number}
    place = f"collective {number} of {group}"
    if len({entry.words for entry in there.values()}) > 1:
        told = [f"rank {rank} {entry.words}{' (done)' if entry.done else ''}" for rank, entry in sorted(there.items())]
        return f"{place}: the ranks do not fit together: {', '.join(told)}"
    words = next(iter(there.values())).words
    inside = [rank for rank, entry in there.items() if not entry.done]
    if absent:
        last = ", ".join(f"rank {rank} ({entry.words})" for rank, entry in sorted(absent.items()))
        return f"{place}: ranks {sorted(inside)} wait in {words}; not there, after their last one: {last}"
    return f"{place}: ranks {sorted(inside)} are in {words}"


# The interface between a worker group and the backend that runs its workers.


class Backend(Protocol):
    """The interface of a backend, which runs the workers of one group."""

    world_size: int

    def submit(
        self, method: str, calls: Sequence[RankCall], future: Future[Any], *, blocking: bool, direct: bool
    ) -> None:
        """Send each rank its part; settle the future with the results in the order of `calls`.

        Calls of a rank run in the order they were submitted. `direct` calls run at once, concurrently with other calls.
        `blocking` means that the caller will wait, so a backend may run the call in the caller's thread.
        """

    def check(self) -> None:
        """Raise a GroupBrokenError if the group can no longer be called."""

    def alive(self) -> list[bool]:
        """Return, for each rank, whether its worker is alive."""

    def pids(self) -> list[int]:
        """Return the ranks' process ids, each on its own machine."""

    def stop(self, error: ControllerError, graceful: bool) -> None:
        """End the workers, letting them finish queued calls if `graceful`. Later calls get `error`."""

    def waits(self) -> list[str]:
        """Return a text line for every open call, with the ranks that have answered and those that have not."""

    def stacks(self) -> str:
        """Return the current stacks of the ranks' processes as text."""

    def last_words(self) -> str:
        """Return the stderr tails of the ranks as far as they are known."""

    def collectives(self) -> dict[int, list[Collective]]:
        """Return the newest collectives of the ranks that answer within a short time and whose torch records them."""
