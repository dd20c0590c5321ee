"""What runs in a worker's process: the base class of workers, and who each of them is."""

import inspect
import os
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from meshrl.environment import number
from meshrl.telemetry.ledger import Ledger, Page
from meshrl.telemetry.profiler import ProcessProfiler

_current_info: ContextVar["WorkerInfo | None"] = ContextVar("meshrl_worker_info", default=None)
_hosted_store: Any = None
# Questions about a worker are no work of its.
_UNBOOKED = frozenset({"take_ledger", "_mesh_entry"})
# What makes each rank the GPU that its local rank says; the pool decides it.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES",)


@dataclass(frozen=True)
class WorkerInfo:
    """Where one worker stands: its place in the group, its node, its role, and where the group meets."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    role: str = "worker"
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def environment(self) -> dict[str, str]:
        """The variables that `torch.distributed.init_process_group(init_method="env://")` and others read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @staticmethod
    def from_environment() -> "WorkerInfo":
        """The place this process was given by its environment; rank 0 of 1 if nothing is set."""

        return WorkerInfo(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node_rank=number("NODE_RANK", 0),
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number("MASTER_PORT", 0),
        )


@dataclass(frozen=True)
class MeshEntry:
    """What one rank says about itself for one mesh: which shard it takes and whether its answer counts."""

    dp_rank: int
    dp_size: int | None
    is_collect: bool


class Worker:
    """One process of a role. Methods marked with `@register` can be called through the worker group.

    `rank`, `world_size` and the others are there before `__init__` runs.
    """

    info: WorkerInfo
    rank: int
    world_size: int
    local_rank: int  # among the group's workers on this node; also the number of its GPU among the visible ones
    local_world_size: int
    node_rank: int
    role: str
    master_addr: str
    master_port: int
    ledger: Ledger  # where this worker's time goes
    preload: ClassVar[Sequence[str]] = ()  # modules that its methods import: whom it is forked from does so for all
    _meshes: dict[str, MeshEntry]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Worker":
        worker = super().__new__(cls)
        worker.info = _current_info.get() or WorkerInfo.from_environment()
        for place in fields(worker.info):
            setattr(worker, place.name, getattr(worker.info, place.name))
        worker._meshes = {}
        worker.ledger = Ledger()
        return worker

    def register_mesh(self, mesh_name: str, dp_rank: int, dp_size: int | None, is_collect: bool) -> None:
        """Say which data-parallel shard this rank takes in calls over `mesh_name`, and whether its answer counts."""
        entry = MeshEntry(int(dp_rank), None if dp_size is None else int(dp_size), bool(is_collect))
        known = self._meshes.setdefault(mesh_name, entry)
        if known != entry:
            raise ValueError(f"mesh '{mesh_name}' is registered on rank {self.rank} as {known}, cannot become {entry}")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        self.register_mesh(mesh_name, dp_rank, None, is_collect)

    def _mesh_entry(self, mesh_name: str) -> MeshEntry | None:
        return self._meshes.get(mesh_name)

    def take_ledger(self, traces: bool = False) -> Page:
        """What this worker did since it was last asked; `traces`: keep spans for a timeline from now on."""
        self.ledger.traces = traces
        return self.ledger.take()

    def start_profile(self, tool: str) -> None:
        """Begin to profile this process."""
        self._profiler = ProcessProfiler(tool)
        self._profiler.start()

    def stop_profile(self, folder: str, step: int) -> str | None:
        """End the profile that was begun, of this step; the file it is in, if the tool writes one."""
        written = self._profiler.stop(Path(folder) / f"step_{step}_{self.role}_rank_{self.rank}")
        return None if written is None else str(written)

    def close(self) -> None:
        """Called once when the group shuts down in order; override to free what outlives a process."""


class ClassWithInitArgs:
    """A worker class and the arguments to make one with, to be made in every rank's process."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise ValueError(f"ClassWithInitArgs needs a class, got {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def build(self, info: WorkerInfo) -> Any:
        """Make the worker, as the rank that `info` says."""
        token = _current_info.set(info)
        try:
            return self.cls(*self.args, **self.kwargs)
        finally:
            _current_info.reset(token)

    def roles(self) -> dict[str, type]:
        """The classes of the colocated roles; empty for an ordinary worker."""
        return getattr(self.cls, "role_classes", lambda spec: {})(self)


@dataclass(frozen=True)
class Failure:
    """An exception as it travels from a worker to the controller."""

    error_type: str
    message: str
    traceback_text: str
    at: float  # wall clock, to find out which rank failed first

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Describe an exception that is being handled."""
        return Failure(type(error).__name__, str(error), traceback.format_exc(), time.time())


def call_worker(worker: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `method`, or `role/method` of a colocated worker."""
    role, _, method = path.rpartition("/")
    target = worker.workers[role] if role else worker
    ledger = getattr(target, "ledger", None)
    if ledger is None or method in _UNBOOKED:
        return _awaited(method, getattr(target, method)(*args, **kwargs))
    with ledger.serving(method):
        return _awaited(method, getattr(target, method)(*args, **kwargs))


def close_worker(worker: Any) -> None:
    """Call the worker's own `close`, if it has one."""
    if hasattr(worker, "close"):
        _awaited("close", worker.close())


def _awaited(method: str, answer: Any) -> Any:
    """A method's answer; a coroutine is run to its end, in an event loop of its own. A `TypeError` for a generator."""
    if inspect.iscoroutine(answer):
        import asyncio  # few workers need it

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(answer)
        answer.close()
        raise RuntimeError(
            f"{method} is async, and its worker lives in this process, whose thread runs an event loop already: "
            "start its group with in_process=False, or call it from another thread"
        )
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        raise TypeError(f"{method} is a generator, which cannot leave the worker's process: return a list")
    return answer


def host_rendezvous(address: str) -> int:
    """Open this process's rendezvous store and return its port.

    The store listens from now on, so the port cannot be taken by anyone else; `init_process_group("env://")` on rank 0
    finds the running store of its own process (torch shares it per port) instead of opening a second one.
    """
    global _hosted_store
    import torch.distributed as dist

    if _hosted_store is None:
        _hosted_store = dist.TCPStore(
            address, 0, world_size=None, is_master=True, wait_for_workers=False, multi_tenant=True
        )
    return int(_hosted_store.port)


def check_environment(env: Mapping[str, str], use_gpu: bool) -> None:
    """Refuse variables that the group itself sets on each rank: with others the ranks would not find each other."""
    owned = {*WorkerInfo().environment(), *(GPU_VARIABLES if use_gpu else ())}
    if taken := sorted(owned & set(env)):
        hint = ""
        if set(taken) & set(GPU_VARIABLES):
            hint = "; to choose GPUs, set CUDA_VISIBLE_DEVICES of the controller"
        raise ValueError(
            f"env of a worker group must not have {', '.join(taken)}: the group sets them on each rank from its pool "
            f"({', '.join(sorted(owned))}){hint}"
        )


def apply_environment(info: WorkerInfo, env: Mapping[str, str]) -> None:
    """Set the variables of this rank and those of `env`, which `check_environment` has seen."""
    os.environ.update(info.environment())
    os.environ.update(env)


def limit_threads(local_world_size: int) -> None:
    """Let torch use OMP_NUM_THREADS threads or, if that is not set, this worker's share of the cores."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(number("OMP_NUM_THREADS", 0) or max(1, cores // local_world_size))


def loopback_interface() -> str | None:
    """The name of the loopback interface, for process groups that stay on one machine."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def place_ranks(process_on_nodes: list[int], role: str) -> list[WorkerInfo]:
    """The places of all ranks of a group, node by node, without the rendezvous address."""
    total = sum(process_on_nodes)
    infos: list[WorkerInfo] = []
    for node_rank, count in enumerate(process_on_nodes):
        for local_rank in range(count):
            infos.append(WorkerInfo(len(infos), total, local_rank, count, node_rank, role))
    return infos


def at_role(info: WorkerInfo, role: str) -> WorkerInfo:
    """The same place, in another role."""
    return replace(info, role=role)
