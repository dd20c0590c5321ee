"""A worker's process: one thread reads from the controller, the main thread runs the calls, one after the other.

Because reading has its own thread, the end of the controller is noticed, and ends this process, also while the main
thread is inside a collective that will never finish.
"""

import faulthandler
import logging
import os
import queue
import random
import runpy
import select
import signal
import socket
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from meshrl.controller.channel import Parcel, receive_message, send_message
from meshrl.controller.flight_recorder import recorded
from meshrl.controller.worker import (
    ClassWithInitArgs,
    Failure,
    WorkerInfo,
    apply_environment,
    call_worker,
    close_worker,
    host_rendezvous,
    limit_threads,
)

logger = logging.getLogger(__name__)

HELLO = "start"
# Asked at any time, beside all calls; the answer has no number in the book of calls.
RECORDED = "flight recorder"
RECORDED_NUMBER = -1
BUILD = "__init__"


@dataclass(frozen=True)
class Request:
    """The header of a message to a worker: the parcels that follow are the arguments, then the keyword arguments."""

    number: int
    method: str
    n_args: int
    keywords: list[str]
    direct: bool = False


@dataclass(frozen=True)
class Script:
    """The user's script, for worker classes that are defined in it."""

    path: str | None
    module: str | None


@dataclass(frozen=True)
class BuildOrder:
    """Everything a fresh process needs to become a worker. `spec` is packed apart: it may need the script first."""

    info: WorkerInfo
    environment: dict[str, str]
    env: dict[str, str]
    script: Script | None


class _Process:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.send_lock = threading.Lock()
        self.requests: queue.SimpleQueue[tuple[Request, list[Parcel]] | None] = queue.SimpleQueue()
        self.worker: Any = None

    def read(self, controller_pid: int) -> None:
        """Queue what comes from the controller; end the process when the controller has ended."""
        watched = select.poll()
        watched.register(self.sock, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            # the socket alone would not tell if a child of the controller had inherited its end
            try:
                watched.register(os.pidfd_open(controller_pid), select.POLLIN)
            except ProcessLookupError:
                end_process_group()
            except OSError as error:
                logger.debug("this kernel has no pidfd (%s): the socket must do", error)
        while True:
            ready = [fd for fd, _ in watched.poll()]
            if self.sock.fileno() not in ready:
                end_process_group()
            try:
                message = receive_message(self.sock)
            except OSError:
                message = None
            if message is None:
                end_process_group()
                return
            request, parcels = message
            if request is None:
                self.requests.put(None)
            elif request.direct:
                threading.Thread(target=self.serve, args=(request, parcels), daemon=True).start()
            else:
                self.requests.put((request, parcels))

    def serve(self, request: Request, parcels: list[Parcel]) -> None:
        """Run one call and send its answer."""
        answer: Any
        try:
            answer = Parcel.pack(self.run(request, parcels))
        except BaseException as error:  # whatever it was, the controller waits for an answer
            answer = Parcel.pack(Failure.of(error))
        with self.send_lock:
            send_message(self.sock, request.number, [answer])
        answer.close()

    def run(self, request: Request, parcels: list[Parcel]) -> Any:
        if request.method == BUILD:
            return self.build(parcels)
        if request.method == RECORDED:
            return recorded()
        values = [_unpack(parcel) for parcel in parcels]
        args = tuple(values[: request.n_args])
        kwargs = dict(zip(request.keywords, values[request.n_args :], strict=True))
        if request.method == HELLO:
            (address,) = args
            return host_rendezvous(address) if address else None
        del values
        return call_worker(self.worker, request.method, args, kwargs)

    def build(self, parcels: list[Parcel]) -> None:
        order: BuildOrder = parcels[0].unpack()
        os.environ.clear()
        os.environ.update(order.environment)
        apply_environment(order.info, order.env)
        limit_threads(order.info.local_world_size)
        if order.script is not None:
            load_script(order.script)
        spec: ClassWithInitArgs = _unpack(parcels[1])
        self.worker = spec.build(order.info)


def run_worker(sock: socket.socket) -> int:
    """The life of a worker's process; returns its exit code."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal goes to the controller alone, and our children end with us
    hello, stacks, _, _ = socket.recv_fds(sock, 4, 2)
    controller_pid = int.from_bytes(hello, "little")
    stack_file = os.fdopen(stacks[0], "w")
    # What libraries say on their way out is for the controller to pass on and to remember.
    os.dup2(stacks[1], 2)
    os.close(stacks[1])
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    random.seed()
    _reseed_numpy()
    process = _Process(sock)
    threading.Thread(target=process.read, args=(controller_pid,), name="meshrl-reader", daemon=True).start()
    while (item := process.requests.get()) is not None:
        process.serve(*item)
        del item  # its arguments must not live until the next call
    if process.worker is not None:
        close_worker(process.worker)
    return 0


def end_process_group() -> None:
    """End this process and all that it has started, now."""
    os.killpg(0, signal.SIGKILL)


def load_script(script: Script) -> None:
    """Run the user's script as `__mp_main__` (not `__main__`), so that the classes it defines can be found."""
    module = types.ModuleType("__mp_main__")
    if script.module is not None:
        content = runpy.run_module(script.module, run_name="__mp_main__", alter_sys=True)
    else:
        assert script.path is not None
        content = runpy.run_path(script.path, run_name="__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _unpack(parcel: Parcel) -> Any:
    try:
        return parcel.unpack()
    except AttributeError as error:
        if "__main__" not in str(error):
            raise
        raise AttributeError(
            f"{error}. A worker process does not run your script: move what you send to workers into a module"
        ) from error


def _reseed_numpy() -> None:
    # all workers are forked from one process and would else draw the same numbers
    import numpy as np

    np.random.seed()
