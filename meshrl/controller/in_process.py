"""The in-process backend: the worker of a single-rank group as an object in the controller's own process."""

import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshrl.controller.calls import (
    Collective,
    ControllerError,
    Deadlines,
    Future,
    GroupBrokenError,
    SerialThread,
    WorkerError,
)
from meshrl.controller.dispatch import (
    ClassWithInitArgs,
    Failure,
    RankCall,
    apply_environment,
    call_worker,
    close_worker,
    host_rendezvous,
    is_proto,
    loopback_interface,
    place_ranks,
)
from meshrl.controller.resource_pool import ResourcePool
from meshrl.telemetry.time_ledger import booked

LOOPBACK = "127.0.0.1"


class InProcessBackend:
    """A backend that holds the single rank of a group as a plain object.

    Blocking calls run in the caller's thread. So debuggers work and Ctrl-C interrupts the calls, but no deadline bounds
    them. Other calls run one by one in a background thread.
    """

    world_size = 1

    def __init__(
        self, pool: ResourcePool, spec: ClassWithInitArgs, role: str, deadlines: Deadlines, env: Mapping[str, str]
    ) -> None:
        self._role = role
        self._deadlines = deadlines
        self._stopped: ControllerError | None = None
        self._turn = threading.RLock()
        self._background = SerialThread(f"meshrl-{role}")
        info = replace(place_ranks([1], role)[0], master_port=host_rendezvous(LOOPBACK))
        if pool.use_gpu:
            # the controller's own CUDA_VISIBLE_DEVICES stays unchanged, so the rank's device is not always number 0
            info = replace(info, local_rank=device_indices(pool, 0)[0])
        apply_environment(info, {**loopback_environment(), **env})
        self._worker = self._run("__init__", spec.build, (info,))

    def submit(
        self, method: str, calls: Sequence[RankCall], future: Future[Any], *, blocking: bool, direct: bool
    ) -> None:
        """Run the call in this thread (`blocking`) or in the background; `direct` calls do not wait for other calls."""
        # copies, so that a worker's changes to a batch do not appear in the caller's batch, as with worker processes
        args = tuple(_own(value) for value in calls[0].args)
        kwargs = {key: _own(value) for key, value in calls[0].kwargs.items()}

        def run() -> None:
            with booked(f"wait_{future.whom}"), threading.Lock() if direct else self._turn:
                try:
                    worker = self._worker
                    if worker is None:
                        self.check()
                    answer = self._run(method, call_worker, (worker, method, args, kwargs))
                except ControllerError as error:
                    future.set_error(error)
                else:
                    future.set_result([answer])

        self.check()
        future.describe = lambda: f"{method} on '{self._role}' runs or is queued in the controller's own process"
        if blocking and not self._background.busy:
            run()
        elif direct:
            threading.Thread(target=run, daemon=True).start()
        else:
            self._background.submit(run)

    def check(self) -> None:
        """Raise a GroupBrokenError if the group was shut down."""
        if self._stopped is not None:
            raise GroupBrokenError(f"worker group '{self._role}' can no longer be called: {self._stopped}")

    def alive(self) -> list[bool]:
        """Return, for the single rank, whether the group has not been shut down."""
        return [self._stopped is None]

    def pids(self) -> list[int]:
        """Return the process id of the controller, in which the worker lives."""
        return [os.getpid()]

    def waits(self) -> list[str]:
        """Return an empty list: a running call is part of the controller's own stack."""
        return []

    def stacks(self) -> str:
        """Return a note that the controller's own stack shows the worker's."""
        return f"'{self._role}' lives in the controller's process"

    def last_words(self) -> str:
        """Return "": the worker writes to the controller's own standard error."""
        return ""

    def collectives(self) -> dict[int, list[Collective]]:
        """Return no collectives, because a single rank never waits for another rank."""
        return {}

    def stop(self, error: ControllerError, graceful: bool) -> None:
        """Close the worker if `graceful`, after the queued calls, and drop it.

        A call that outlasts the shutdown deadline keeps running.
        """
        if self._stopped is None:
            self._stopped = error
            if graceful:
                self._close_worker()
            self._worker = None

    def _close_worker(self) -> None:
        queued_ones_done = threading.Event()
        if self._background.busy:
            self._background.submit(queued_ones_done.set)
        else:
            queued_ones_done.set()
        limit = self._deadlines.shutdown
        # the lock is needed as well, because another thread may be running a call
        if queued_ones_done.wait(limit) and self._turn.acquire(timeout=limit):
            try:
                if self._worker is not None:
                    close_worker(self._worker)
            finally:
                self._turn.release()

    def _run(self, method: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            in_main_thread = threading.current_thread() is threading.main_thread()
            if in_main_thread and not isinstance(error, (Exception, SystemExit)):
                raise  # Ctrl-C or the end of the run, which concern the caller
            failure = Failure.of(error)
            raise WorkerError(
                f"{method} failed on rank 0 of '{self._role}': {failure.error_type}: {failure.message}\n"
                f"The worker's traceback:\n{failure.traceback_text}",
                rank=0,
                role=self._role,
                method=method,
                error_type=failure.error_type,
                traceback_text=failure.traceback_text,
            ) from error


def loopback_environment() -> dict[str, str]:
    """Return the variables with which process groups on this machine find each other whatever its host name is."""
    loopback = loopback_interface()
    return {} if loopback is None or "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": loopback}


def device_indices(pool: ResourcePool, node_rank: int) -> list[int]:
    """Return the GPUs of this machine that belong to the pool's slots, in rank order."""
    part = pool.parts[node_rank]
    return [part.origin.first_device + slot for slot in part.slots]


def _own(value: Any) -> Any:
    return copy.copy(value) if is_proto(value) else value
