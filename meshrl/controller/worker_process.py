"""A worker's process: one thread reads from the controller, the main thread runs the calls, one after the other.

- `Parcel`, `send_message` and `receive_message`: messages over a Unix socket, with tensors in shared memory.
- `run_worker`: the main function of a worker process.

Because reading has its own thread, the process notices the end of the controller and ends itself. It does so even if
the main thread is inside a collective that will never finish.
"""

import faulthandler
import logging
import mmap
import os
import pickle
import queue
import random
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.controller.calls import recorded
from meshrl.controller.dispatch import (
    ClassWithInitArgs,
    Failure,
    WorkerInfo,
    apply_environment,
    call_worker,
    close_worker,
    host_rendezvous,
    limit_threads,
)
from meshrl.data.serialization import dumps, loads

# Messages over a Unix socket, with the memory of tensors passed as file descriptors.
#
# A parcel is one serialised object. Large data lies in one anonymous file (memfd). The sender copies the data there
# once. The receiver maps the file and builds tensors on the mapping without a copy. The file has no name, so nothing is
# left behind whichever process is killed. It is not part of /dev/shm, so no container limit on /dev/shm applies. A
# parcel for several receivers is written once. Each receiver maps it privately and does not see the writes of the other
# receivers.

INLINE_BYTES = 32 * 1024  # parcels up to this size travel through the socket itself
MAX_FDS = 200  # Linux passes at most 253 descriptors in one message
_ALIGN = 64
_PREAMBLE = struct.Struct("<QI")  # bytes of the body, number of descriptors
_MAX_WRITE = 1 << 30


@dataclass(frozen=True)
class Parcel:
    """One serialised object: sent through the socket (`inline`), or in the file `fd` at `extents` (offset, size).

    The first entry of `inline` or `extents` is the pickle, the others are its out-of-band buffers.
    """

    inline: list[bytes]
    extents: list[tuple[int, int]]
    private: bool
    fd: int | None = None

    @staticmethod
    def pack(obj: Any, receivers: int = 1, may_use_fd: bool = True) -> "Parcel":
        """Serialise an object for `receivers` receivers; `may_use_fd` allows an anonymous file for large objects."""
        data, buffers = dumps(obj)
        views: list[Any] = [data, *buffers]
        if not may_use_fd or sum(memoryview(view).nbytes for view in views) <= INLINE_BYTES:
            return Parcel([bytes(view) for view in views], [], False)
        fd = anonymous_file()
        try:
            extents = _write_aligned(fd, [memoryview(view) for view in views])
        except BaseException:
            os.close(fd)
            raise
        return Parcel([], extents, receivers > 1, fd)

    def unpack(self) -> Any:
        """Return the object, whose tensors lie on the mapped file, and close the descriptor."""
        if self.fd is None:
            return loads(self.inline[0], [bytearray(view) for view in self.inline[1:]])
        try:
            # a private mapping cannot be populated in advance, because that would copy every page
            flags = mmap.MAP_PRIVATE if self.private else mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            offset, size = self.extents[-1]
            mapped = memoryview(mmap.mmap(self.fd, offset + size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
        finally:
            self.close()
        views = [mapped[offset : offset + size] for offset, size in self.extents]
        return loads(views[0], views[1:])  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the file descriptor if there is one."""
        if self.fd is not None:
            os.close(self.fd)


def anonymous_file() -> int:
    """Return a descriptor of a file without a name, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshrl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_aligned(fd: int, views: Sequence[memoryview]) -> list[tuple[int, int]]:
    extents: list[tuple[int, int]] = []
    offset = 0
    for view in views:
        extents.append((offset, view.nbytes))
        flat, written = view.cast("B"), 0
        while written < view.nbytes:
            written += os.pwrite(fd, flat[written : written + _MAX_WRITE], offset + written)
        offset = -(-(offset + view.nbytes) // _ALIGN) * _ALIGN
    return extents


def send_message(sock: socket.socket, header: Any, parcels: Sequence[Parcel]) -> None:
    """Send a small picklable header and parcels. The caller closes the parcels, after their last receiver."""
    fds = [parcel.fd for parcel in parcels if parcel.fd is not None]
    body = pickle.dumps(
        (header, [(parcel.inline, parcel.extents, parcel.private, parcel.fd is not None) for parcel in parcels]), 5
    )
    preamble = _PREAMBLE.pack(len(body), len(fds))
    socket.send_fds(sock, [preamble], fds) if fds else sock.sendall(preamble)
    sock.sendall(body)


def receive_message(sock: socket.socket) -> tuple[Any, list[Parcel]] | None:
    """Return the next message, or None at the end of the stream."""
    preamble, fds = b"", []
    while len(preamble) < _PREAMBLE.size:
        part, new_fds, _, _ = socket.recv_fds(
            sock, _PREAMBLE.size - len(preamble), MAX_FDS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        if not part:
            return None
        preamble += part
        fds += new_fds
    size, expected_fds = _PREAMBLE.unpack(preamble)
    body = _receive_exactly(sock, size)
    if body is None or len(fds) != expected_fds:
        for fd in fds:
            os.close(fd)
        return None
    header, described = pickle.loads(body)
    remaining = iter(fds)
    parcels = [
        Parcel(inline, extents, private, next(remaining) if has_fd else None)
        for inline, extents, private, has_fd in described
    ]
    return header, parcels


def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    body = bytearray(size)
    view, filled = memoryview(body), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return body


logger = logging.getLogger(__name__)

HELLO = "start"
# The request for the flight recorder. It may come at any time, concurrently with calls, and is not in the call book.
RECORDED = "flight recorder"
RECORDED_NUMBER = -1
BUILD = "__init__"


@dataclass(frozen=True)
class Request:
    """The header of a message to a worker.

    The parcels that follow are the arguments, then the keyword arguments.
    """

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
    """The data with which a fresh process becomes a worker.

    The `ClassWithInitArgs` is sent as a separate parcel, because unpickling it may need the script first.
    """

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
        """Queue the requests of the controller, and end the process when the controller has ended."""
        watched = select.poll()
        watched.register(self.sock, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            # the socket alone would not show the end of the controller if a child had inherited the other end
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
        """Run one call and send its result."""
        answer: Any
        try:
            answer = Parcel.pack(self.run(request, parcels))
        except BaseException as error:  # the controller waits for a result in any case
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
    """Run a worker process until it is told to end, and return its exit code."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal goes to the controller alone, and child processes end with this process
    hello, stacks, _, _ = socket.recv_fds(sock, 4, 2)
    controller_pid = int.from_bytes(hello, "little")
    stack_file = os.fdopen(stacks[0], "w")
    # Libraries may write to stderr when they crash, so the controller forwards stderr and keeps its tail.
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
    """Kill this process and all processes that it has started, at once."""
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
    # all workers are forked from one process, and would otherwise draw the same numbers
    import numpy as np

    np.random.seed()
