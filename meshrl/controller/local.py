"""The local backend: workers as processes of this machine, each behind its own socket."""

import contextlib
import os
import queue
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.controller.calls import CallBook, Collective, ControllerError, Deadlines, Future, GroupBrokenError
from meshrl.controller.dispatch import ClassWithInitArgs, Failure, RankCall, WorkerInfo, place_ranks
from meshrl.controller.forkserver import get_nursery
from meshrl.controller.in_process import LOOPBACK, InProcessBackend, device_indices, loopback_environment
from meshrl.controller.resource_pool import ResourcePool
from meshrl.controller.worker_process import (
    BUILD,
    HELLO,
    MAX_FDS,
    RECORDED,
    RECORDED_NUMBER,
    BuildOrder,
    Parcel,
    Request,
    Script,
    anonymous_file,
    receive_message,
    send_message,
)

_TICK = 0.2  # seconds between two checks of the deadlines
_LAST_WORDS = 4096  # bytes of a rank's stderr tail


@dataclass
class _Rank:
    """The controller's view of one worker process."""

    sock: socket.socket
    stacks: int  # the file that its stack dumps go to
    stderr: int  # the read end of the worker's stderr, which is forwarded to the controller's stderr
    pid: int = 0
    send_lock: threading.Lock = field(default_factory=threading.Lock)
    gone: bool = False
    exitcode: int | None = None
    last_words: bytes = b""
    sending: tuple[str, float] | None = None  # the method that is being sent to it, and the start time
    collectives: list[Collective] | None = None


class ProcessBackend:
    """A backend with one process per rank, forked from the fork server, each behind its own socket."""

    def __init__(
        self,
        pool: ResourcePool,
        spec: ClassWithInitArgs,
        role: str,
        deadlines: Deadlines,
        env: Mapping[str, str],
    ) -> None:
        self._owner = os.getpid()
        self._role = role
        self._deadlines = deadlines
        self._stopping = False
        self._order = threading.Lock()  # all ranks get the calls of several threads in the same order
        self._ended = threading.Event()
        self._exits: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
        self._book = CallBook(role, deadlines, self._kill_all, self._stacks_of)
        infos = place_ranks(pool.process_on_nodes, role)
        self.world_size = len(infos)
        self._ranks: list[_Rank] = []
        self._pump_thread = threading.Thread(target=self._pump, name=f"meshrl-{role}-pump", daemon=True)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        try:
            packed_spec, script = _pack_spec(spec, self.world_size)
            try:
                self._launch(spec)
                self._build(pool, infos, env, packed_spec, script)
            finally:
                packed_spec.close()
        except BaseException:
            self.stop(GroupBrokenError(f"worker group '{role}' failed to start"), graceful=False)
            raise

    def _launch(self, spec: ClassWithInitArgs) -> None:
        nursery = get_nursery()
        classes = [spec.cls, *spec.roles().values()]
        own = {cls.__module__ for cls in classes if cls.__module__.startswith("meshrl.")}
        preload = sorted(own.union(*(getattr(cls, "preload", ()) for cls in classes)))
        for rank in range(self.world_size):
            ours, theirs = socket.socketpair()
            seconds = max(1, int(self._deadlines.call))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
            stderr, its_stderr = os.pipe()
            os.set_blocking(stderr, False)
            record = _Rank(ours, anonymous_file(), stderr)
            socket.send_fds(ours, [os.getpid().to_bytes(4, "little")], [record.stacks, its_stderr])
            os.close(its_stderr)
            self._ranks.append(record)
            with theirs:

                def report(exitcode: int | None, rank: int = rank) -> None:
                    self._exits.put((rank, exitcode))
                    self._wake()

                record.pid = nursery.fork(theirs, preload, self._deadlines.start, report)
        self._pump_thread.start()

    def _build(
        self,
        pool: ResourcePool,
        infos: list[WorkerInfo],
        env: Mapping[str, str],
        packed_spec: Parcel,
        script: Script | None,
    ) -> None:
        limit = self._deadlines.start
        hello: Future[list[int | None]] = Future()
        calls = [RankCall(info.rank, (LOOPBACK if info.rank == 0 else None,), {}) for info in infos]
        self._send(HELLO, calls, hello, limit=limit)
        port = hello.get()[0]
        assert port is not None
        built: Future[list[None]] = Future()
        number = self._book.open(BUILD, [info.rank for info in infos], built, limit=limit)
        for info in infos:
            own_env = {**loopback_environment(), **_visible_gpus(pool, info.node_rank), **env}
            order = BuildOrder(replace(info, master_port=port), dict(os.environ), own_env, script)
            self._send_parcels(
                info.rank, Request(number, BUILD, 2, []), [Parcel.pack(order, may_use_fd=False), packed_spec]
            )
        built.get()

    def submit(
        self, method: str, calls: Sequence[RankCall], future: Future[Any], *, blocking: bool, direct: bool
    ) -> None:
        """Send each rank its part of the call."""
        self._send(method, calls, future, direct=direct)

    def _send(
        self,
        method: str,
        calls: Sequence[RankCall],
        future: Future[Any],
        *,
        limit: float | None = None,
        direct: bool = False,
    ) -> None:
        self.check()
        receivers = Counter(id(value) for call in calls for value in _values(call))
        parcels: dict[int, Parcel] = {}  # each argument is packed once, however many ranks get it
        number: int | None = None
        with self._order:
            try:
                for call in calls:
                    try:
                        for value in _values(call):
                            if id(value) not in parcels:
                                parcels[id(value)] = Parcel.pack(value, receivers[id(value)], len(parcels) < MAX_FDS)
                    except Exception as error:
                        if number is None:
                            raise
                        self._book.answer(number, call.rank, Failure.of(error))
                        continue
                    if number is None:
                        ranks = [each.rank for each in calls]
                        number = self._book.open(method, ranks, future, limit=limit, direct=direct)
                    request = Request(number, method, len(call.args), list(call.kwargs), direct)
                    self._send_parcels(call.rank, request, [parcels[id(value)] for value in _values(call)])
            finally:
                for parcel in parcels.values():
                    parcel.close()

    def _send_parcels(self, rank: int, request: Request | None, parcels: list[Parcel]) -> None:
        record = self._ranks[rank]
        try:
            with record.send_lock:
                record.sending = (request.method if request else "shutdown", time.monotonic())
                send_message(record.sock, request, parcels)
        except OSError:
            # the process is gone or does not read; the pump notices its end, and the deadline its silence
            self._wake()
        finally:
            record.sending = None

    def _pump(self) -> None:
        """Read results and exits of the workers, forward their stderr and check deadlines.

        Return when all workers are gone.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ, None)
            for rank, record in enumerate(self._ranks):
                selector.register(record.sock, selectors.EVENT_READ, rank)
                selector.register(record.stderr, selectors.EVENT_READ, record)
            while not all(record.gone for record in self._ranks):
                for key, _ in selector.select(_TICK):
                    if key.data is None:
                        self._wake_in.recv(4096)
                    elif isinstance(key.data, _Rank):
                        if not _pass_on(key.data):
                            selector.unregister(key.data.stderr)
                    elif not self._read_answer(key.data):
                        selector.unregister(self._ranks[key.data].sock)
                while not self._exits.empty():
                    self._note_exit(*self._exits.get())
                self._book.tick()
        self._close()

    def _close(self) -> None:
        self._ended.set()
        for record in self._ranks:
            record.sock.close()
            os.close(record.stacks)
            os.close(record.stderr)
        self._wake_in.close()
        self._wake_out.close()

    def _read_answer(self, rank: int) -> bool:
        try:
            message = receive_message(self._ranks[rank].sock)
        except OSError:
            message = None
        if message is None:
            return False  # the fork server reports how the process ended
        number, (parcel,) = message
        try:
            value = parcel.unpack()
        except Exception as error:
            value = Failure.of(error)
        if number == RECORDED_NUMBER:
            self._ranks[rank].collectives = value if isinstance(value, list) else []
        else:
            self._book.answer(number, rank, value)
        return True

    def _note_exit(self, rank: int, exitcode: int | None) -> None:
        record = self._ranks[rank]
        while not record.gone and _readable(record.sock) and self._read_answer(rank):
            pass  # results that were sent before the end still count
        record.gone, record.exitcode = True, exitcode
        _end_children(record.pid, signal.SIGTERM if self._stopping else signal.SIGKILL)
        if not self._stopping:
            while _pass_on(record):
                pass
            words = record.last_words.decode(errors="replace").strip()
            parts = [_how_it_ended(exitcode), self._read_stack(rank), f"Its last words:\n{words}" if words else ""]
            self._book.died(rank, record.pid, exitcode, "\n".join(part for part in parts if part))

    def check(self) -> None:
        """Raise a GroupBrokenError if the group is broken or was shut down."""
        self._book.check()

    def alive(self) -> list[bool]:
        """Return, for each rank, whether its process is alive."""
        return [not record.gone for record in self._ranks]

    def pids(self) -> list[int]:
        """Return the process ids in rank order."""
        return [record.pid for record in self._ranks]

    def waits(self) -> list[str]:
        """Return a text line for every open call, after a line for every rank that takes no more calls."""
        now, full = time.monotonic(), []
        for rank, record in enumerate(self._ranks):
            if (sending := record.sending) is not None and now - sending[1] > _TICK:
                full.append(
                    f"rank {rank} of '{self._role}' does not read and the queue of its calls is full: "
                    f"the controller has been sending it {sending[0]} for {now - sending[1]:.1f} s"
                )
        return full + self._book.waits()

    def stacks(self) -> str:
        """Return the current stacks of the ranks' processes as text."""
        return self._stacks_of(range(len(self._ranks)))

    def last_words(self) -> str:
        """Return the stderr tails of the ranks as text."""
        told = {rank: record.last_words.decode(errors="replace").strip() for rank, record in enumerate(self._ranks)}
        return "\n".join(f"rank {rank}:\n{words}" for rank, words in told.items() if words)

    def collectives(self) -> dict[int, list[Collective]]:
        """Return the newest collectives of the ranks that answer within a second."""
        asked = [record for record in self._ranks if not record.gone and record.sending is None]
        for record in asked:
            record.collectives = None
        for rank, record in enumerate(self._ranks):
            if record in asked:
                self._send_parcels(rank, Request(RECORDED_NUMBER, RECORDED, 0, [], direct=True), [])
        until = time.monotonic() + 1.0
        while time.monotonic() < until and any(record.collectives is None for record in asked):
            time.sleep(0.02)
        return {rank: record.collectives for rank, record in enumerate(self._ranks) if record.collectives}

    def stop(self, error: ControllerError, graceful: bool) -> None:
        """End the workers: after their queued calls if `graceful` and the group is not broken, else at once."""
        if os.getpid() != self._owner or self._stopping:
            return
        whole = self._book.broken is None
        self._stopping = True
        if graceful and whole and self._ranks:
            for rank in range(len(self._ranks)):
                self._send_parcels(rank, None, [])
            self._ended.wait(self._deadlines.shutdown)
        self._book.break_group(error)
        self._kill_all()
        if self._pump_thread.ident is None:
            self._close()  # the start failed half-way
        else:
            self._ended.wait(self._deadlines.shutdown)

    def _kill_all(self) -> None:
        for record in self._ranks:
            if record.pid and not record.gone:
                _kill_group(record.pid)

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"x")
        except OSError:
            return  # the pump is already being woken, or has ended

    def _stacks_of(self, ranks: Sequence[int]) -> str:
        asked = [rank for rank in ranks if not self._ranks[rank].gone]
        for rank in asked:
            os.ftruncate(self._ranks[rank].stacks, 0)
            os.lseek(self._ranks[rank].stacks, 0, os.SEEK_SET)  # the worker's descriptor shares the file offset
            os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        return "\n".join(f"rank {rank}:\n{self._read_stack(rank) or self._no_stack(rank)}" for rank in asked)

    def _no_stack(self, rank: int) -> str:
        """Explain why a process has not written its stack, with its state from /proc if that can be read."""
        try:
            with open(f"/proc/{self._ranks[rank].pid}/status") as status:
                state = next(line.partition(":")[2].strip() for line in status if line.startswith("State"))
        except (OSError, StopIteration):
            return "it has not said where it is"
        return f"it has not said where it is; the system says: {state}"

    def _read_stack(self, rank: int) -> str:
        return os.pread(self._ranks[rank].stacks, 65536, 0).decode(errors="replace").rstrip()


def start_local(
    pool: ResourcePool,
    spec: ClassWithInitArgs,
    role: str,
    deadlines: Deadlines,
    env: Mapping[str, str],
    in_process: bool | None,
) -> InProcessBackend | ProcessBackend:
    """Start the workers of a group on this machine: in the controller's process or as processes of their own."""
    if in_process and pool.world_size != 1:
        raise ValueError(f"in_process=True needs a pool of 1 process, this one has {pool.world_size}")
    if pool.use_gpu and len(pool.process_on_nodes) > 1:
        raise ValueError(
            f"the pool spans {len(pool.process_on_nodes)} nodes and the local backend has one: "
            "set trainer.nnodes=1, or use backend='ray'"
        )
    if in_process or (in_process is None and pool.world_size == 1):
        return InProcessBackend(pool, spec, role, deadlines, env)
    return ProcessBackend(pool, spec, role, deadlines, env)


def _visible_gpus(pool: ResourcePool, node_rank: int) -> dict[str, str]:
    """Return a CUDA_VISIBLE_DEVICES with the pool's GPUs in rank order.

    A rank's local rank is then the index of its own GPU.
    """
    if not pool.use_gpu:
        return {}
    indices = device_indices(pool, node_rank)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(max(indices) + 1)]
    if max(indices) >= len(devices):
        raise ValueError(f"the pool needs GPUs {indices}, but CUDA_VISIBLE_DEVICES={visible} shows {len(devices)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[index] for index in indices)}


def _pack_spec(spec: ClassWithInitArgs, receivers: int) -> tuple[Parcel, Script | None]:
    """Serialise the class and its arguments, and return the user's script if the workers must load it for the class."""
    parcel = Parcel.pack(spec, receivers)
    classes = [spec.cls, *spec.roles().values()]
    in_script = [cls.__name__ for cls in classes if cls.__module__ == "__main__"]
    if not in_script:
        return parcel, None
    main = sys.modules["__main__"]
    module_spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if module_spec is None and (path is None or not os.path.exists(path)):
        parcel.close()
        raise ValueError(
            f"worker class {in_script[0]} is defined in an interactive session, where worker processes cannot find it: "
            "put it in a module and import it, or use a pool of one process"
        )
    return parcel, Script(None if module_spec else path, module_spec.name if module_spec else None)


def _values(call: RankCall) -> tuple[Any, ...]:
    return (*call.args, *call.kwargs.values())


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "its exit code is unknown, because the process it was forked from had ended"
    if exitcode >= 0:
        return f"it exited with code {exitcode}"
    name = signal.Signals(-exitcode).name if -exitcode in signal.valid_signals() else "unknown"
    hint = " (often the kernel's out-of-memory killer: see dmesg)" if -exitcode == signal.SIGKILL else ""
    return f"ended by signal {-exitcode} ({name}){hint}"


def _pass_on(record: _Rank) -> bool:
    """Forward a worker's stderr to the controller's and keep its tail; return False if there was nothing to read."""
    try:
        data = os.read(record.stderr, 65536)
    except BlockingIOError:
        return False
    record.last_words = (record.last_words + data)[-_LAST_WORDS:]
    if data:
        with contextlib.suppress(OSError):  # the controller's stderr may be closed
            os.write(2, data)
    return bool(data)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # before its first line has run, the worker has no process group of its own
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end_children(pid: int, number: signal.Signals) -> None:
    """Send signal `number` to the processes that a worker has left running.

    The caller passes SIGTERM if the group is being stopped, so that they can clean up, else SIGKILL.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
