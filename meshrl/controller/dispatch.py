"""Workers, and the dispatch of a group's call to its ranks.

- `Worker` is the base class of workers, with `WorkerInfo` for a rank's place and `ClassWithInitArgs` to construct it.
- `register` and the dispatch modes split one call on a group into a call on each rank (`RankCall`), and collect the
  ranks' results into one result.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard, TypeVar

from meshrl.environment import number
from meshrl.telemetry.device_stats import ProcessProfiler
from meshrl.telemetry.time_ledger import Ledger, Page

if TYPE_CHECKING:
    from meshrl.data.batch import DataProto


# The code that runs in a worker's process: the base class of workers, and each worker's place in its group.

_current_info: ContextVar[WorkerInfo | None] = ContextVar("meshrl_worker_info", default=None)
_hosted_store: Any = None
# Queries about a worker, whose time is not booked as the worker's work.
_UNBOOKED = frozenset({"take_ledger", "_mesh_entry"})
# The variables that select the GPUs a rank sees. The group sets them from its pool.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES",)


@dataclass(frozen=True)
class WorkerInfo:
    """The place of one worker: its rank in the group, its node, its role, and the address of the group's rendezvous."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    role: str = "worker"
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables that `torch.distributed.init_process_group(init_method="env://")` and others read."""
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
    def from_environment() -> WorkerInfo:
        """Read this process's place from its environment; rank 0 of 1 if nothing is set."""

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
    """The entry of one rank for one mesh: the shard it takes, and whether its result is collected."""

    dp_rank: int
    dp_size: int | None
    is_collect: bool


class Worker:
    """One process of a role. Methods marked with `@register` can be called through the worker group.

    The fields of `info`, such as `rank` and `world_size`, are set as attributes before `__init__` runs.
    """

    info: WorkerInfo
    rank: int
    world_size: int
    local_rank: int  # among the group's workers on this node; also the index of its GPU among the visible GPUs
    local_world_size: int
    node_rank: int
    role: str
    master_addr: str
    master_port: int
    ledger: Ledger  # the accounting of this worker's time
    preload: ClassVar[Sequence[str]] = ()  # modules that its methods import; the fork server imports them once
    _meshes: dict[str, MeshEntry]

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        worker = super().__new__(cls)
        worker.info = _current_info.get() or WorkerInfo.from_environment()
        for place in fields(worker.info):
            setattr(worker, place.name, getattr(worker.info, place.name))
        worker._meshes = {}
        worker.ledger = Ledger()
        return worker

    def register_mesh(self, mesh_name: str, dp_rank: int, dp_size: int | None, is_collect: bool) -> None:
        """Register this rank's data-parallel shard in calls over `mesh_name`, and whether its result is collected."""
        entry = MeshEntry(int(dp_rank), None if dp_size is None else int(dp_size), bool(is_collect))
        known = self._meshes.setdefault(mesh_name, entry)
        if known != entry:
            raise ValueError(f"mesh '{mesh_name}' is registered on rank {self.rank} as {known}, cannot become {entry}")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        self.register_mesh(mesh_name, dp_rank, None, is_collect)

    def _mesh_entry(self, mesh_name: str) -> MeshEntry | None:
        return self._meshes.get(mesh_name)

    def take_ledger(self, traces: bool = False) -> Page:
        """Return this worker's time ledger since the last call. `traces`: keep spans for a timeline from now on."""
        self.ledger.traces = traces
        return self.ledger.take()

    def start_profile(self, tool: str) -> None:
        """Start to profile this process with the profiler `tool`."""
        self._profiler = ProcessProfiler(tool)
        self._profiler.start()

    def stop_profile(self, folder: str, step: int) -> str | None:
        """Stop the profile of `step`, and return the path of its file if the tool writes one."""
        written = self._profiler.stop(Path(folder) / f"step_{step}_{self.role}_rank_{self.rank}")
        return None if written is None else str(written)

    def close(self) -> None:
        """Do nothing; called once when the group shuts down gracefully. Override it to free what outlives a process."""


class ClassWithInitArgs:
    """A worker class and its constructor arguments, with which every rank's process constructs its worker."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise ValueError(f"ClassWithInitArgs needs a class, got {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def build(self, info: WorkerInfo) -> Any:
        """Construct the worker as the rank given by `info`."""
        token = _current_info.set(info)
        try:
            return self.cls(*self.args, **self.kwargs)
        finally:
            _current_info.reset(token)

    def roles(self) -> dict[str, type]:
        """Return the classes of the colocated roles; empty for an ordinary worker."""
        return getattr(self.cls, "role_classes", lambda spec: {})(self)


@dataclass(frozen=True)
class Failure:
    """An exception in the form in which a worker sends it to the controller."""

    error_type: str
    message: str
    traceback_text: str
    at: float  # wall clock, to find out which rank failed first

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe an exception that is being handled, with its traceback and the current time."""
        return Failure(type(error).__name__, str(error), traceback.format_exc(), time.time())


def call_worker(worker: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `method` of a worker, or `role/method` of a colocated worker, and book its time in the worker's ledger."""
    role, _, method = path.rpartition("/")
    target = worker.workers[role] if role else worker
    ledger = getattr(target, "ledger", None)
    if ledger is None or method in _UNBOOKED:
        return _awaited(method, getattr(target, method)(*args, **kwargs))
    with ledger.serving(method):
        return _awaited(method, getattr(target, method)(*args, **kwargs))


def close_worker(worker: Any) -> None:
    """Call the worker's own `close` if it has one."""
    if hasattr(worker, "close"):
        _awaited("close", worker.close())


def _awaited(method: str, answer: Any) -> Any:
    """Return a method's result. A coroutine is run to its end in its own event loop; a generator is a TypeError."""
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

    The store listens from now on, so no other process can take the port. `init_process_group("env://")` on rank 0 finds
    the running store of its own process (torch shares it per port) instead of opening a second one.
    """
    global _hosted_store
    import torch.distributed as dist

    if _hosted_store is None:
        _hosted_store = dist.TCPStore(
            address, 0, world_size=None, is_master=True, wait_for_workers=False, multi_tenant=True
        )
    return int(_hosted_store.port)


def check_environment(env: Mapping[str, str], use_gpu: bool) -> None:
    """Raise a ValueError for variables that the group itself sets on each rank.

    With other values the ranks would not find each other.
    """
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
    """Set this rank's variables, and those of `env`, which must have passed `check_environment`."""
    os.environ.update(info.environment())
    os.environ.update(env)


def limit_threads(local_world_size: int) -> None:
    """Limit torch to OMP_NUM_THREADS threads or, if that is not set, to this worker's share of the cores."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(number("OMP_NUM_THREADS", 0) or max(1, cores // local_world_size))


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, for process groups that stay on one machine, or None."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def place_ranks(process_on_nodes: list[int], role: str) -> list[WorkerInfo]:
    """Return the places of all ranks of a group, node by node, without the rendezvous address."""
    total = sum(process_on_nodes)
    infos: list[WorkerInfo] = []
    for node_rank, count in enumerate(process_on_nodes):
        for local_rank in range(count):
            infos.append(WorkerInfo(len(infos), total, local_rank, count, node_rank, role))
    return infos


def at_role(info: WorkerInfo, role: str) -> WorkerInfo:
    """Return the same place with another role."""
    return replace(info, role=role)


logger = logging.getLogger(__name__)

# The key in a dispatched chunk's meta_info for the number of padding rows at its end. Absent if there are none.
PADDING_ROWS_KEY = "padding_rows"

F = TypeVar("F", bound=Callable[..., Any])


class Execute(Enum):
    """The ranks that run a call: all, or only rank 0."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


class Dispatch:
    """The names of the dispatch modes; `register_dispatch_mode` adds more."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    DIRECT_ROLLOUT_METHOD = "DIRECT_ROLLOUT_METHOD"


DispatchMode = Dispatch


class Ranks(Protocol):
    """The interface of a worker group that dispatch functions may use."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""

    def mesh_entries(self, mesh_name: str) -> list[MeshEntry]:
        """Return the entry that each rank registered for a mesh."""


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank's part of a call."""

    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A call on a group, split into a call on each rank.

    `collect` makes one result of the ranks' results (in the order of `calls`). `direct` calls do not queue behind the
    rank's running call.
    """

    calls: list[RankCall]
    collect: Callable[[list[Any]], Any]
    direct: bool = False


PlanFn = Callable[[Ranks, tuple[Any, ...], dict[str, Any]], Plan]


@dataclass(frozen=True)
class CallSpec:
    """The settings that `@register` attaches to a method."""

    plan: PlanFn
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool


_modes: dict[str, PlanFn | None] = {}
_SPEC_ATTRIBUTE = "__meshrl_call__"
_MESH_ATTRIBUTE = "__meshrl_mesh__"  # of the plans that nd_dispatch makes


def register(
    dispatch_mode: str | dict[str, Callable[..., Any]] | PlanFn = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Mark a worker's method as callable through its group.

    `dispatch_mode` is a `Dispatch` name, `nd_dispatch(mesh)`, or `{"dispatch_fn": f, "collect_fn": g}` with `f(group,
    *args, **kwargs) -> (lists, dict of lists)`, one entry per rank, and `g(group, results) -> result`. With
    `blocking=False` the call returns a `Future`. Futures among the arguments are replaced by their results before the
    call reaches `dispatch_fn`, unless `materialize_futures=False`. An `async def` method runs to its end in the worker,
    in an event loop of that call.
    """
    plan = _plan_of(dispatch_mode)
    mesh = getattr(dispatch_mode, _MESH_ATTRIBUTE, None)
    if execute_mode is Execute.RANK_ZERO and (mesh is not None or dispatch_mode in _SHARDING_MODES):
        name = dispatch_mode if mesh is None else f"nd_dispatch('{mesh}')"
        raise ValueError(f"{name} shards its data over the ranks: with Execute.RANK_ZERO the rest would be lost")

    def mark(method: F) -> F:
        _check_method(method)
        setattr(method, _SPEC_ATTRIBUTE, CallSpec(plan, execute_mode, blocking, materialize_futures))
        return method

    return mark


def _check_method(method: Any) -> None:
    """Raise a TypeError for objects that `@register` cannot mark: static methods, properties, classes, generators."""
    name = getattr(method, "__qualname__", None) or getattr(method, "__name__", None) or repr(method)
    if isinstance(method, staticmethod | classmethod | property) or not callable(method):
        raise TypeError(f"@register needs a method, and got a {type(method).__name__} ({name}): leave the other out")
    if isinstance(method, type):
        raise TypeError(f"@register is for methods, and {name} is a class: mark its methods")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"@register cannot take {name}, a generator: what it yields stays in the worker; return a list")


def call_spec(method: Any) -> CallSpec | None:
    """Return the settings that `@register` attached to a method, or None."""
    return getattr(method, _SPEC_ATTRIBUTE, None)


def register_dispatch_mode(
    name: str,
    dispatch_fn: Callable[..., Any] | None = None,
    collect_fn: Callable[..., Any] | None = None,
) -> str:
    """Add a mode under `Dispatch.<name>`; set its functions now or later with `update_dispatch_mode`."""
    if name in _modes:
        raise ValueError(f"dispatch mode '{name}' exists already; change it with update_dispatch_mode")
    if not name.isidentifier():
        raise ValueError(f"a dispatch mode's name must be an identifier, got {name!r}")
    _modes[name] = None
    setattr(Dispatch, name, name)
    if dispatch_fn is not None and collect_fn is not None:
        update_dispatch_mode(name, dispatch_fn, collect_fn)
    elif dispatch_fn is not None or collect_fn is not None:
        raise ValueError(f"dispatch mode '{name}' needs both dispatch_fn and collect_fn, or neither yet")
    return name


def update_dispatch_mode(dispatch_mode: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> None:
    """Set the functions of a mode; methods registered with it use the new functions from their next call on."""
    if dispatch_mode not in _modes:
        raise ValueError(f"unknown dispatch mode '{dispatch_mode}'; known: {', '.join(sorted(_modes))}")
    _modes[dispatch_mode] = _plan_from_functions(dispatch_fn, collect_fn)


def nd_dispatch(mesh_name: str, pad: bool = True, direct: bool = False) -> PlanFn:
    """Return a dispatch mode that follows the shards each rank registered for `mesh_name`.

    The dp_rank-th chunk goes to every rank with that dp_rank. The results of the collecting ranks are concatenated in
    dp order. A batch that does not divide is padded and the result is unpadded. With `pad=False` such a batch is an
    error (for updates, where padding rows would be trained on). `direct` calls do not queue behind the rank's running
    call.
    """

    def plan(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        entries = group.mesh_entries(mesh_name)
        dp_size, collectors = check_mesh(mesh_name, entries)
        shards = _shard(args, kwargs, dp_size, pad)
        calls = [RankCall(rank, *shards.of(entry.dp_rank)) for rank, entry in enumerate(entries)]
        return Plan(calls, lambda answers: shards.join([answers[rank] for rank in collectors]), direct)

    setattr(plan, _MESH_ATTRIBUTE, mesh_name)
    return plan


make_nd_compute_dataproto_dispatch_fn = nd_dispatch


def check_mesh(mesh_name: str, entries: Sequence[MeshEntry]) -> tuple[int, list[int]]:
    """Return the data-parallel size of a mesh, and the collecting rank of each dp_rank.

    Raise a ValueError if the ranks disagree.
    """
    stated = {entry.dp_size for entry in entries if entry.dp_size is not None}
    dp_size = max(entry.dp_rank for entry in entries) + 1 if not stated else max(stated)
    if len(stated) > 1:
        raise ValueError(f"the ranks disagree about the data-parallel size of mesh '{mesh_name}': {sorted(stated)}")
    collectors: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(dp_size)}
    for rank, entry in enumerate(entries):
        if not 0 <= entry.dp_rank < dp_size:
            raise ValueError(f"rank {rank} has dp_rank {entry.dp_rank} in mesh '{mesh_name}' of size {dp_size}")
        if entry.is_collect:
            collectors[entry.dp_rank].append(rank)
    for dp_rank, ranks in collectors.items():
        if len(ranks) != 1:
            raise ValueError(
                f"dp_rank {dp_rank} of mesh '{mesh_name}' must have exactly one rank with is_collect, has {ranks}"
            )
    return dp_size, [collectors[dp_rank][0] for dp_rank in range(dp_size)]


@dataclass(frozen=True)
class _Shards:
    """The arguments of a call cut into chunks: each argument has one entry per chunk."""

    args: list[list[Any]]
    kwargs: dict[str, list[Any]]
    rows: int | None  # the rows of the batch with its padding; None if no argument is a batch
    padding: int

    def of(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(arg[index] for arg in self.args), {key: value[index] for key, value in self.kwargs.items()}

    def join(self, answers: list[Any]) -> Any:
        if not answers or not all(is_proto(answer) for answer in answers):
            return answers
        from meshrl.data.batch import DataProto, unpad_dataproto

        for answer in answers:
            answer.meta_info.pop(PADDING_ROWS_KEY, None)
        joined = answers[0] if len(answers) == 1 else DataProto.concat(answers)
        if not self.padding or len(joined) == 0:
            return joined
        assert self.rows is not None
        if len(joined) % self.rows:
            raise ValueError(
                f"a batch of {self.rows - self.padding} rows was padded to {self.rows} for {len(answers)} shards, and "
                f"{len(joined)} rows came back: which of them are padding cannot be told. Make the batch divisible by "
                f"{len(answers)}, or have the method return a whole number of rows for each row it gets"
            )
        return unpad_dataproto(joined, self.padding * (len(joined) // self.rows))


def _shard(args: tuple[Any, ...], kwargs: dict[str, Any], count: int, pad: bool) -> _Shards:
    named = [(f"argument {index}", value) for index, value in enumerate(args)] + list(kwargs.items())
    batches = [(name, len(value)) for name, value in named if _is_batch(value)]
    if len({rows for _, rows in batches}) > 1:
        sizes = ", ".join(f"{name}: {rows}" for name, rows in batches)
        raise ValueError(f"the batches of one call must have the same number of rows, got {sizes}")
    rows = batches[0][1] if batches else None
    padding = -rows % count if rows else 0
    if padding and not pad:
        raise ValueError(f"a batch of {rows} rows cannot be divided over {count} data-parallel ranks")

    def cut(value: Any) -> list[Any]:
        return _chunk(value, count) if _is_batch(value) else [value] * count

    return _Shards(
        [cut(value) for value in args],
        {key: cut(value) for key, value in kwargs.items()},
        None if rows is None else rows + padding,
        padding,
    )


def is_proto(value: Any) -> TypeGuard[DataProto]:
    """Return whether `value` is a `DataProto`, without importing that class's module, which takes seconds."""
    proto = sys.modules.get("meshrl.data.batch")  # a process with a DataProto has imported the module
    return proto is not None and isinstance(value, proto.DataProto)


def _is_batch(value: Any) -> bool:
    return is_proto(value) and (value.batch is not None or bool(value.non_tensor_batch))


def _chunk(data: DataProto, count: int) -> list[DataProto]:
    from meshrl.data.batch import pad_dataproto_to_divisor

    if len(data) == 0:
        return [data] * count
    padded, padding = pad_dataproto_to_divisor(data, count)
    chunks = list(padded.chunk(count))
    size = len(padded) // count
    for index, chunk in enumerate(chunks):
        filled = min(size, max(0, padding - (count - 1 - index) * size))
        chunk.meta_info = {**data.meta_info, **({PADDING_ROWS_KEY: filled} if filled else {})}
    return chunks


def _rank_zero(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return Plan([RankCall(0, args, kwargs)], lambda answers: answers[0])


def _one_to_all(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return Plan([RankCall(rank, args, kwargs) for rank in range(group.world_size)], list)


def _per_rank(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    named = [(f"argument {index}", value) for index, value in enumerate(args)] + list(kwargs.items())
    for name, value in named:
        if not isinstance(value, list | tuple) or len(value) != group.world_size:
            got = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise ValueError(
                f"{name} must be a list with one entry for each of the {group.world_size} ranks, got {got}"
            )
    calls = [
        RankCall(rank, tuple(arg[rank] for arg in args), {key: value[rank] for key, value in kwargs.items()})
        for rank in range(group.world_size)
    ]
    return Plan(calls, list)


def _dp_compute_proto(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    shards = _shard(args, kwargs, group.world_size, pad=True)
    return Plan([RankCall(rank, *shards.of(rank)) for rank in range(group.world_size)], shards.join)


def _dp_compute_metric(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return Plan(_dp_compute_proto(group, args, kwargs).calls, list)


def _direct(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    kwargs = dict(kwargs)
    rank = kwargs.pop("rank", None)
    if rank is None:
        return Plan([RankCall(each, args, kwargs) for each in range(group.world_size)], list, direct=True)
    if not 0 <= rank < group.world_size:
        raise ValueError(f"rank {rank} is not one of the group's {group.world_size} ranks")
    return Plan([RankCall(rank, args, kwargs)], lambda answers: answers[0], direct=True)


_modes.update(
    {
        Dispatch.RANK_ZERO: _rank_zero,
        Dispatch.ONE_TO_ALL: _one_to_all,
        Dispatch.ALL_TO_ALL: _per_rank,
        Dispatch.DP_COMPUTE: _per_rank,
        Dispatch.DP_COMPUTE_PROTO: _dp_compute_proto,
        Dispatch.DP_COMPUTE_METRIC: _dp_compute_metric,
        Dispatch.DIRECT_ROLLOUT_METHOD: _direct,
    }
)
_SHARDING_MODES = (Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC)


def _plan_of(dispatch_mode: str | dict[str, Callable[..., Any]] | PlanFn) -> PlanFn:
    if isinstance(dispatch_mode, dict):
        if set(dispatch_mode) != {"dispatch_fn", "collect_fn"}:
            raise ValueError(f"a dispatch mode needs the keys dispatch_fn and collect_fn, got {sorted(dispatch_mode)}")
        return _plan_from_functions(dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    if callable(dispatch_mode):
        if next(iter(inspect.signature(dispatch_mode).parameters), None) == "self":
            raise TypeError(f"write @register(...) above {dispatch_mode.__qualname__}, if only as @register()")
        return dispatch_mode
    if dispatch_mode not in _modes:
        raise ValueError(f"unknown dispatch mode {dispatch_mode!r}; known: {', '.join(sorted(_modes))}")
    name = dispatch_mode

    def plan(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        found = _modes[name]  # looked up at the call, so that update_dispatch_mode reaches registered methods
        if found is None:
            raise ValueError(f"dispatch mode '{name}' has no functions yet: give them with update_dispatch_mode")
        return found(group, args, kwargs)

    return plan


def _plan_from_functions(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> PlanFn:
    def plan(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        rank_args, rank_kwargs = dispatch_fn(group, *args, **kwargs)
        calls = _per_rank(group, tuple(rank_args), dict(rank_kwargs)).calls
        return Plan(calls, lambda answers: collect_fn(group, answers))

    return plan
