"""How one call on a group becomes a call on each rank, and how the answers become one result."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

from meshrl.controller.worker import MeshEntry

if TYPE_CHECKING:
    from meshrl.data.proto import DataProto

logger = logging.getLogger(__name__)

# In a dispatched chunk's meta_info: how many of its last rows only fill up the chunk. Absent where there are none.
PADDING_ROWS_KEY = "padding_rows"

F = TypeVar("F", bound=Callable[..., Any])


class Execute(Enum):
    """Which ranks run a call."""

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
    """What a dispatch function may ask of the group it dispatches to."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    def mesh_entries(self, mesh_name: str) -> list[MeshEntry]:
        """What each rank registered for a mesh."""


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank's part of a call."""

    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A call on a group, taken apart: what each rank gets, and how the answers (in the order of `calls`) become one.

    `direct` calls do not queue behind the rank's running call.
    """

    calls: list[RankCall]
    collect: Callable[[list[Any]], Any]
    direct: bool = False


PlanFn = Callable[[Ranks, tuple[Any, ...], dict[str, Any]], Plan]


@dataclass(frozen=True)
class CallSpec:
    """What `@register` says about a method."""

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
    """Let a worker's method be called through its group.

    `dispatch_mode` is a `Dispatch` name, `nd_dispatch(mesh)`, or `{"dispatch_fn": f, "collect_fn": g}` with
    `f(group, *args, **kwargs) -> (lists, dict of lists)`, one entry per rank, and `g(group, answers) -> result`.
    With `blocking=False` the call returns a `Future`. Futures among the arguments are replaced by their results before
    `dispatch_fn` sees them, unless `materialize_futures=False`. An `async def` method runs to its end in the worker, in
    an event loop of that call.
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
    """Refuse what cannot answer a call, or would not be found on the class: a `TypeError` that says why."""
    name = getattr(method, "__qualname__", None) or getattr(method, "__name__", None) or repr(method)
    if isinstance(method, staticmethod | classmethod | property) or not callable(method):
        raise TypeError(f"@register needs a method, and got a {type(method).__name__} ({name}): leave the other out")
    if isinstance(method, type):
        raise TypeError(f"@register is for methods, and {name} is a class: mark its methods")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"@register cannot take {name}, a generator: what it yields stays in the worker; return a list")


def call_spec(method: Any) -> CallSpec | None:
    """What `@register` said about a method, or None."""
    return getattr(method, _SPEC_ATTRIBUTE, None)


def register_dispatch_mode(
    name: str,
    dispatch_fn: Callable[..., Any] | None = None,
    collect_fn: Callable[..., Any] | None = None,
) -> str:
    """Add a mode under `Dispatch.<name>`; its functions can be given now or with `update_dispatch_mode`."""
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
    """Set the functions of a mode; methods registered with it use them from their next call on."""
    if dispatch_mode not in _modes:
        raise ValueError(f"unknown dispatch mode '{dispatch_mode}'; known: {', '.join(sorted(_modes))}")
    _modes[dispatch_mode] = _plan_from_functions(dispatch_fn, collect_fn)


def nd_dispatch(mesh_name: str, pad: bool = True, direct: bool = False) -> PlanFn:
    """Dispatch by what each rank registered for `mesh_name`.

    The dp_rank-th chunk goes to every rank with that dp_rank; the answers of the ranks that collect are concatenated in
    dp order. A batch that does not divide is padded and the result unpadded, or refused with `pad=False` (for updates,
    where padding rows would be trained on). `direct` calls do not queue behind the rank's running call.
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
    """The data-parallel size of a mesh, and the rank that answers for each dp_rank; an error if the ranks disagree."""
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
    """Arguments cut into chunks: of each, one entry per chunk."""

    args: list[list[Any]]
    kwargs: dict[str, list[Any]]
    rows: int | None  # of the batch with its padding; None if no argument is a batch
    padding: int

    def of(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(arg[index] for arg in self.args), {key: value[index] for key, value in self.kwargs.items()}

    def join(self, answers: list[Any]) -> Any:
        if not answers or not all(is_proto(answer) for answer in answers):
            return answers
        from meshrl.data.proto import DataProto, unpad_dataproto

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
    """Whether this is a `DataProto`; does not import what it is made of, which takes seconds."""
    proto = sys.modules.get("meshrl.data.proto")  # whoever has one has imported it
    return proto is not None and isinstance(value, proto.DataProto)


def _is_batch(value: Any) -> bool:
    return is_proto(value) and (value.batch is not None or bool(value.non_tensor_batch))


def _chunk(data: DataProto, count: int) -> list[DataProto]:
    from meshrl.data.proto import pad_dataproto_to_divisor

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
