"""The fork server: the process from which workers are forked.

Importing torch takes seconds, so it happens once. The controller starts one fork server (`Nursery`), which imports the
modules that workers need. It then forks a worker on request, in milliseconds. The fork server never runs the user's
script, holds no threads and touches no GPU. It reports how each worker ended, and ends when the controller ends.
"""

import contextlib
import importlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from meshrl.imports import importing

_SIZE_BYTES = 8


class NurseryError(RuntimeError):
    """The fork server ended or did not answer in time."""


class Nursery:
    """The controller's end of the fork server: requests workers and receives their exit codes."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair()
        code = f"from meshrl.controller.forkserver import serve; serve({theirs.fileno()}, {list(preload)})"
        paths = [path for path in sys.path if path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env
            )
        self._fork_lock = threading.Lock()  # one request at a time, so that each caller gets its own worker's pid
        self._lock = threading.Lock()
        self._pids: list[int] = []
        self._asked = 0
        self._awaited: int | None = None  # the number of the request that `fork` currently waits for
        self._arrived = threading.Condition(self._lock)
        self._listeners: dict[int, Callable[[int | None], None]] = {}
        self._ended: dict[int, int | None] = {}
        self.alive = True
        self._listener = threading.Thread(target=self._listen, name="meshrl-nursery", daemon=True)
        self._listener.start()

    def fork(
        self, sock: socket.socket, preload: Sequence[str], timeout: float, on_exit: Callable[[int | None], None]
    ) -> int:
        """Fork a worker that communicates over `sock`, and return its pid.

        `timeout` is in seconds. `on_exit` is called with the worker's exit code (-N: ended by signal N; None: unknown).
        """
        options = {"preload": list(preload), "sys_path": sys.path, "cwd": os.getcwd()}
        with self._fork_lock, self._lock:
            if not self.alive:
                raise NurseryError("the nursery process has ended")
            self._asked += 1
            self._awaited = self._asked
            request = pickle.dumps({**options, "number": self._asked})
            socket.send_fds(self._control, [len(request).to_bytes(_SIZE_BYTES, "little") + request], [sock.fileno()])
            answered = self._arrived.wait_for(lambda: self._pids or not self.alive, timeout)
            self._awaited = None
            if not answered:
                raise NurseryError(f"the nursery did not fork a worker within {timeout:g} s")
            if not self._pids:
                raise NurseryError("the nursery process ended before it could fork a worker")
            pid = self._pids.pop()
            self._listeners[pid] = on_exit
            early = pid in self._ended
        if early:
            self._tell(pid, self._ended[pid])
        return pid

    def _listen(self) -> None:
        # a fork server that was killed with a request unread resets the connection
        with contextlib.suppress(ConnectionError), self._control.makefile("rb") as stream:
            for line in stream:
                kind, pid, value = line.split()
                if kind == b"forked":
                    self._note_forked(int(pid), number=int(value))
                else:
                    self._tell(int(pid), exitcode=int(value))
        with self._lock:
            self.alive = False
            self._arrived.notify_all()
            orphans = list(self._listeners)
        for orphan in orphans:
            self._tell(orphan, None)
        self._process.wait()

    def _note_forked(self, pid: int, number: int) -> None:
        with self._lock:
            if number == self._awaited:
                self._pids.append(pid)
                self._arrived.notify_all()
            else:
                # it came too late: the caller has closed the worker's socket, which ends it; its exit is not reported
                self._listeners[pid] = lambda exitcode: None

    def _tell(self, pid: int, exitcode: int | None) -> None:
        with self._lock:
            listener = self._listeners.pop(pid, None)
            if listener is None:
                self._ended[pid] = exitcode
                return
            self._ended.pop(pid, None)
        listener(exitcode)


_nursery: Nursery | None = None
_nursery_lock = threading.Lock()


def get_nursery(preload: Sequence[str] = ()) -> Nursery:
    """Return the controller's fork server, started at the first call, or again if it was killed."""
    global _nursery
    with _nursery_lock:
        if _nursery is None or not _nursery.alive:
            _nursery = Nursery(preload)
        return _nursery


def warm_up(*modules: str) -> None:
    """Start the fork server without waiting for it, so that the first group starts sooner.

    The fork server begins by importing `modules`, such as those of the workers' classes. If it is already running,
    nothing happens.
    """
    get_nursery(modules)


def _forget_nursery() -> None:
    # a forked child (a data loader's worker) has no listening thread and must not use the fork server
    global _nursery
    _nursery = None


os.register_at_fork(after_in_child=_forget_nursery)


def serve(control_fd: int, preload: Sequence[str] = ()) -> None:
    """Run the fork server: fork on request, report ended workers, and exit when the controller ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    # Many modules ask torch for a GPU when they are imported. Unless torch asks NVML, workers forked later get no GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    control = socket.socket(fileno=control_fd)
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    _preload(["meshrl.controller.worker_process", "meshrl.data.batch", *preload])
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _report_ended(control)
                    continue
                request = _next_request(control)
                if request is None:
                    os._exit(0)
                options, worker_fd = request
                _preload(options["preload"])
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    signal.set_wakeup_fd(-1)
                    for end in (control, woken, waker):
                        end.close()
                    _become_worker(worker_fd, options)
                os.close(worker_fd)
                control.sendall(f"forked {pid} {options['number']}\n".encode())


def _next_request(control: socket.socket) -> tuple[dict[str, Any], int] | None:
    try:
        size_bytes, fds, _, _ = socket.recv_fds(control, _SIZE_BYTES, 1)
    except ConnectionError:
        return None
    if len(size_bytes) < _SIZE_BYTES or not fds:
        return None
    body = b""
    size = int.from_bytes(size_bytes, "little")
    while len(body) < size:
        part = control.recv(size - len(body))
        if not part:
            return None
        body += part
    return pickle.loads(body), fds[0]


def _report_ended(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.sendall(f"ended {pid} {os.waitstatus_to_exitcode(status)}\n".encode())


def _preload(modules: Sequence[str]) -> None:
    with importing():
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception:
                continue  # the worker meets the same error and reports it with its traceback


def _become_worker(worker_fd: int, options: dict[str, Any]) -> None:
    exitcode = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.path[:] = options["sys_path"]
        os.chdir(options["cwd"])
        from meshrl.controller.worker_process import run_worker

        exitcode = run_worker(socket.socket(fileno=worker_fd))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exitcode)
