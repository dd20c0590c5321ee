"""A pool of processes for reward functions. Each sample has a time limit, and processes that hang or die are replaced.

* `WorkerPool`: the pool, with one thread that assigns samples to processes and receives results.
* `InPool`: the scoring of all samples of a batch by one function in a pool.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshrl.config.keys import count
from meshrl.rewards.results import RewardError
from meshrl.rewards.reward_calls import Failure, RewardFunctionSpec, Sample

PACKAGE_ROOT = str(Path(__file__).parents[2])
WORKER = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from meshrl.rewards.pool_worker import main; main()"
# The time limit of a process's start, which imports the functions' modules, possibly on a busy machine.
START_SECONDS = 300.0
# The time limit of the wait for the end of a killed process or of the pool's thread.
END_SECONDS = 30.0
# After this many failed starts in a row, the pool gives up, because further attempts would fail as well.
MOST_FAILED_STARTS = 3


class _Task:
    def __init__(self, index: int, sample: Sample):
        self.index, self.sample = index, sample
        self.killed = False
        self.future: Future[Any] = Future()


class _Worker:
    """A process of the pool, with its connection, its current task and the deadline of that task."""

    def __init__(self, specs: Sequence[RewardFunctionSpec]):
        self.connection, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        finally:
            theirs.close()
        self.ready = self.sending = False
        self.given_at = 0.0
        self.task: _Task | None = None
        self.deadline: float | None = time.monotonic() + START_SECONDS
        try:
            self.connection.send((list(sys.path), list(specs)))
        except BaseException:
            self.end()
            raise

    def give(self, task: _Task, timeout: float) -> None:
        """Send a sample to the process, which has `timeout` seconds to score it.

        The socket gets the same timeout, so that a process that stops while it reads the sample or writes the result
        cannot block the pool.
        """
        self.given_at = time.monotonic()
        seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6) + 1)
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as its_end:
            for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                its_end.setsockopt(socket.SOL_SOCKET, way, seconds)
        self.sending = True
        try:
            self.connection.send((task.index, dict(task.sample)))
        finally:
            self.sending = False
        self.task, self.deadline = task, time.monotonic() + timeout

    def end(self) -> int:
        """Kill the process and its process group, and return the exit code of the process."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait(END_SECONDS)


class WorkerPool:
    """A pool of up to `size` processes that run reward functions on single samples. Processes start when needed."""

    def __init__(self, specs: Sequence[RewardFunctionSpec], size: int, timeout: float):
        if size < 1 or not timeout > 0:
            raise ValueError(f"a pool needs at least 1 process and a timeout above 0, got {size} and {timeout}")
        self.specs, self.size, self.timeout = specs, size, timeout
        self.replaced = 0
        self._tasks: deque[_Task] = deque()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._broken: RewardError | None = None
        self._closing = False
        self._awake, self._wake = Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def submit(self, index: int, sample: Sample) -> Future[Any]:
        """Run function `index` on a sample, and return a future of its result or of a `Failure`.

        `RewardError` is raised only if the pool is closed or broken, for example because no process can start.
        """
        task = _Task(index, sample)
        with self._lock:
            if self._broken or self._closing:
                raise self._broken or RewardError("the pool of reward processes is closed")
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="reward-pool")
                self._thread.start()
        self._wake.send_bytes(b"x")
        return task.future

    def waits(self) -> list[str]:
        """Return one line for each process that is busy with a sample, and one for samples in the queue."""
        now, lines = time.monotonic(), []
        for worker in list(self._workers):
            name, seconds = f"reward process {worker.process.pid}", f"{now - worker.given_at:.1f} of {self.timeout:g} s"
            if worker.sending:
                lines.append(f"{name} does not read its sample, its queue is full: {seconds}")
            elif worker.task is not None:
                lines.append(f"{name} has not returned from a sample: {seconds}")
        if lines and self._tasks:
            lines.append(f"{count(len(self._tasks), 'sample')} in line for one of {count(self.size, 'reward process')}")
        return lines

    def close(self) -> None:
        """End all processes. Futures of unfinished samples raise `RewardError`."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is not None and thread.is_alive():
            self._wake.send_bytes(b"x")
            thread.join(END_SECONDS)
        self._finalizer()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._start_workers()
                if self._give_tasks():
                    self._wait()
        except BaseException as error:
            self._broken = RewardError(f"the pool of reward processes failed: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._closing = True
                self._broken = self._broken or RewardError("the pool of reward processes was closed")
            self._fail_all()
            _end_all(self._workers)

    def _start_workers(self) -> None:
        if self._broken:
            self._fail_all()
            return
        busy = sum(worker.task is not None for worker in self._workers)
        while not self._broken and len(self._workers) < min(self.size, busy + len(self._tasks)):
            try:
                self._workers.append(_Worker(self.specs))
            except ConnectionError:  # the process died before it received the function specs
                self._count_failed_start("before they are told what to do")

    def _give_tasks(self) -> bool:
        """Give a sample to every free process. Return False if a process was lost and must be replaced first."""
        nobody_lost = True
        for worker in list(self._workers):
            if not worker.ready or worker.task is not None:
                continue
            with self._lock:
                task = self._tasks.popleft() if self._tasks else None
            if task is None:
                break
            try:
                worker.give(task, self.timeout)
            except OSError:
                with self._lock:
                    self._tasks.appendleft(task)
                self._lost(worker)
                nobody_lost = False
            except Exception as error:  # a sample that cannot be pickled
                task.future.set_result(Failure("invalid", f"cannot send the sample to a process: {error}", error))
        return nobody_lost

    def _wait(self) -> None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        by_connection = {worker.connection: worker for worker in self._workers}
        for ready in wait([self._awake, *by_connection], seconds):
            if ready is self._awake:
                while self._awake.poll():
                    self._awake.recv_bytes()
            else:
                assert isinstance(ready, Connection)
                self._hear(by_connection[ready])
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline is not None and worker.deadline < now:
                self._late(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            data = worker.connection.recv_bytes()
        except BlockingIOError:  # the process stopped while writing its result
            self._late(worker)
            return
        except (EOFError, OSError):
            self._lost(worker)
            return
        try:
            kind, value = pickle.loads(data)
        except Exception as error:
            kind, value = "answer", Failure("raised", f"an answer that cannot be read: {type(error).__name__}: {error}")
        task, worker.task, worker.deadline = worker.task, None, None
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "broken":
            self._broken = RewardError(f"a process cannot load the reward functions: {value}")
        elif task is not None:
            task.future.set_result(value)

    def _late(self, worker: _Worker) -> None:
        task = worker.task
        self._remove(worker)
        if task is None:
            self._broken = RewardError(f"a reward process did not start within {START_SECONDS:g} s")
        else:
            task.future.set_result(Failure("timeout", f"no answer within {self.timeout:g} s"))

    def _lost(self, worker: _Worker) -> None:
        task, ready = worker.task, worker.ready
        code = self._remove(worker)
        if task is not None and code == -signal.SIGKILL and not task.killed:
            # Killed from outside, perhaps because another process used too much memory. The sample gets one retry.
            task.killed = True
            with self._lock:
                self._tasks.appendleft(task)
        elif task is not None:
            task.future.set_result(Failure("died", f"its process ended with exit code {code}"))
        elif not ready:
            self._count_failed_start(f"with exit code {code}")

    def _count_failed_start(self, how: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == MOST_FAILED_STARTS:
            self._broken = RewardError(f"reward processes end as they start, {how}")

    def _remove(self, worker: _Worker) -> int:
        self._workers.remove(worker)
        self.replaced += 1
        # A process that closed its connection is about to end. Wait, because its own exit code is more informative
        # than that of SIGKILL.
        with suppress(subprocess.TimeoutExpired):
            if worker.task is None or worker.deadline is None or worker.deadline > time.monotonic():
                worker.process.wait(1.0)
        return worker.end()

    def _fail_all(self) -> None:
        with self._lock:
            waiting = [*self._tasks, *(worker.task for worker in self._workers if worker.task)]
            self._tasks.clear()
        for task in waiting:
            if not task.future.done():
                task.future.set_exception(self._broken)


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


class InPool:
    """A caller that scores all samples by one function in a pool, and returns results in the order of the samples."""

    def __init__(self, pool: WorkerPool, index: int):
        self.pool, self.index = pool, index

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        futures = [self.pool.submit(self.index, sample) for sample in samples]
        return [future.result() for future in futures]
