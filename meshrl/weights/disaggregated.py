"""Weight sync between two pools of processes without a common process group: trainers and rollouts.

    trainers  0 .. n-1    ─┐
                           ├─ PoolGroup.join(address, ...) ─> placements exchanged ─> the same plan ─> sync(version)
    rollouts  n .. n+m-1  ─┘

The two pools rendezvous at a TCP store (`MeetingPoint`). Either pool may have its own default process group, or none. A
rollout is a whole copy of the model, or is sharded over neighbouring ranks. Rollout copies can pass messages on to each
other. A whole copy goes on generating while a version arrives in separate memory (`staged`), and stops only to take the
version over. A sharded rollout must not generate during a sync, because its ranks would take the version over at
different steps. An engine without an `hf_model`, such as vLLM, gets whole tensors, a bucket at a time (`session`).

A connection is good until one of its ranks dies. The remaining ranks then rendezvous with the replacement at a new
address. The first sync there may bring the current version: rollouts that already have it are not disturbed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.engines.training_engine import Engine
from meshrl.models.loading import named_weights
from meshrl.models.names import expert_count, head_dim, of_text
from meshrl.models.saving import check_cuttable
from meshrl.rollout.base import Rollout
from meshrl.rollout.in_process_rollout import SteppingRollout
from meshrl.rollout.weight_files import memory_folder
from meshrl.weights.connect import lent, rollout_params, tensor_dtypes
from meshrl.weights.lora_sync import base_dtypes, merged
from meshrl.weights.placement import Placement, RolloutLayout, Shards, replicas, windows
from meshrl.weights.placement import rollout as rollout_placement
from meshrl.weights.planner import MEGABYTE, ReshardPlan, plan_reshard
from meshrl.weights.session import WORD_BYTES, StreamedSync, SyncReport, WeightSync, end_refusal, streamed_sync
from meshrl.weights.sources import FSDP2Source, Source, source_of
from meshrl.weights.transports import (
    Carrier,
    CudaIpcCarrier,
    Deadline,
    ProcessGroupCarrier,
    SharedMemoryCarrier,
    SyncError,
    SyncTimeoutError,
    open_together,
)

CARRIERS = ("auto", "shared_memory", "cuda_ipc", "process_group")
# Longer values are split, because a store takes values of only a few megabytes.
PART_BYTES = 4 * MEGABYTE
LOOK_EVERY = 0.005
# Variables that torch reads when it makes an NCCL group: after an error only clean up, write no dump, wait for no dump.
OUTLIVES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",
}


class MeetingPoint:
    """The rendezvous of a pool group's ranks: a TCP store.

    The controller should hold it until all ranks have connected.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class PoolGroup:
    """One rank in a joint numbering of trainers and rollouts. All ranks must make the same calls in the same order."""

    def __init__(self, store: dist.Store, rank: int, world: int, deadline: float):
        self.store, self.rank, self.world, self.deadline = store, rank, world, deadline
        self._calls = 0
        self.hosts: list[int] = []

    @classmethod
    def join(cls, address: str, rank: int, world: int, deadline: float = 60.0) -> PoolGroup:
        """Join the group at `address` (host:port of a `MeetingPoint`) and return when all ranks have joined.

        `deadline`: seconds for joining, and for every later step until the sync is connected.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not among the {world} ranks of a pool group")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"'{address}' is no address: write host:port")
        try:
            store = dist.TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=deadline), wait_for_workers=False
            )
        except RuntimeError as error:
            raise SyncError(f"weight sync: rank {rank} found nobody at {address} within {deadline:g} s") from error
        group = cls(store, rank, world, deadline)
        names = group.gather(_host_name(), "to join")
        group.hosts = [names.index(name) for name in names]
        return group

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's JSON-serialisable value, in the order of the ranks. `what` is for error messages."""
        self._calls += 1
        data = json.dumps(value)
        parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
        try:
            for number, part in enumerate(parts):
                self.store.set(self._key(self.rank, number), part)
            self.store.set(self._key(self.rank), str(len(parts)))
            self._wait_for_all(what)
            return [self._read(rank) for rank in range(self.world)]
        except dist.DistError as error:
            raise SyncError(f"weight sync: rank {self.rank} lost the meeting point: {error}") from error

    def backend(self, device: torch.device) -> Any:
        """Return a new process group over these ranks, outside the default group: NCCL for GPUs, else gloo."""
        self._calls += 1
        store = dist.PrefixStore(f"group{self._calls}", self.store)
        limit = timedelta(seconds=self.deadline)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with _surviving():
                return dist.ProcessGroupNCCL(store, self.rank, self.world, options)
        return dist.ProcessGroupGloo(store, self.rank, self.world, limit)

    def _key(self, rank: int, part: int | None = None) -> str:
        return f"{self._calls}/{rank}" if part is None else f"{self._calls}/{rank}/{part}"

    def _read(self, rank: int) -> Any:
        count = int(self.store.get(self._key(rank)))
        return json.loads(b"".join(self.store.get(self._key(rank, part)) for part in range(count)))

    def _wait_for_all(self, what: str) -> None:
        end = time.monotonic() + self.deadline
        missing = list(range(self.world))
        while missing := [rank for rank in missing if not self.store.check([self._key(rank)])]:
            if time.monotonic() > end:
                raise SyncTimeoutError(
                    f"weight sync: rank {self.rank} of {self.world} waited for ranks {missing} {what} until the "
                    f"deadline of {self.deadline:g} s"
                )
            time.sleep(LOOK_EVERY)


@contextmanager
def _surviving() -> Iterator[None]:
    """Create NCCL groups that survive the death of a rank, so that a restarted process of the other pool can reconnect.

    By default torch ends the whole process after such a loss, at once or minutes later. Every wait for a message has a
    deadline in any case.
    """
    before = {name: os.environ.get(name) for name in OUTLIVES}
    os.environ.update(OUTLIVES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class PoolSync:
    """One rank's end of a connection between the pools. All ranks call `sync(rollout, version)` together."""

    def __init__(self, sync: WeightSync | StreamedSync, group: PoolGroup, source: Source | None = None):
        self.sync, self.group, self.source = sync, group, source
        if source is not None and sync.source is not None:
            sync.source = sync.source.with_tensors({})  # until a sync runs

    def __call__(self, rollout: Rollout | None, version: int) -> SyncReport:
        """Sync the trainers' weights to all rollouts as `version`. Trainers pass None as `rollout`.

        A rollout may generate in other threads during the sync. A failure on any rank raises on all ranks. The rollouts
        then keep their old version, or refuse to generate (`session`).
        """
        if self.source is None:
            return self.sync.run(version, rollout)
        with lent(self.source.tensors(), self.sync):  # offloading and optimizers may have moved them
            return self.sync.run(version, rollout)

    def close(self) -> None:
        """Close the transport, which frees its message memory and its connections."""
        if self.sync.carrier is not None:
            self.sync.carrier.close()

    def leave(self) -> None:
        """Close a connection whose other side may be dead, without waiting for any rank."""
        if self.sync.carrier is not None:
            self.sync.carrier.abort("it was left for a new one")
        self.close()


def connect_trainer(
    engine: Engine,
    group: PoolGroup,
    num_rollouts: int,
    *,
    bucket_megabytes: int = 512,
    verify: bool = True,
    delta: bool = False,
    deadline: float = 600.0,
    carrier: str = "auto",
    feed: str = "auto",
    adapters: str = "alone",
) -> PoolSync:
    """Connect a trainer rank. Rank r of the engine must be rank r of the group.

    The settings of rank 0 apply to all ranks. `deadline`: seconds for one sync. `verify`, `delta`, `feed`: see
    `connect`. `adapters`: a model with LoRA sends its base when it connects and then adapters `alone`, or all weights
    `merged` in every sync.
    """
    trainers = _checked_split(group, group.world - num_rollouts)
    if carrier not in CARRIERS:
        raise ValueError(f"unknown carrier '{carrier}': use one of {', '.join(CARRIERS)}")
    rollouts = group.gather(None, "to describe their weights")[trainers:]
    is_float32 = {entry[1] for entry in rollouts[0]["params"].values() if "float" in entry[1]} == {"float32"}
    # Engines that store weights in their own form cannot merge adapters into them.
    alone = engine.has_adapters and adapters == "alone" and not rollouts[0]["streams"]
    source = source_of(engine, adapters="base" if alone else "merged", master=is_float32)
    if source.placement.world_size > trainers:
        raise ValueError(f"'{source.placement.title}' has more ranks than the group's {trainers} trainers")
    # Ranks beyond the source's placement hold only copies of other ranks' weights.
    has_part = group.rank < source.placement.world_size
    only = source_of(engine, adapters="only", master=is_float32) if alone else None
    settings = {
        "bucket_megabytes": bucket_megabytes,
        "verify": verify,
        "delta": delta,
        "deadline": deadline,
        "carrier": carrier,
        "feed": feed,
        "model_type": source.model_type,
        "placement": source.placement.to_json(),
        "adapters": _described_adapters(engine, source, only) if only is not None else None,
    }
    device = next(engine.module.parameters()).device
    told = group.gather({"device": device.type, "settings": settings if group.rank == 0 else None}, "to plan")
    plans = _Plans(group, trainers, told, device, rollouts[0]["cut"], rollouts[0]["ranks"])
    described = _same_everywhere(rollouts, trainers)

    def shards(side: Source) -> Shards | None:
        return Shards(side.placement, group.rank, side.tensors()) if has_part else None

    if rollouts[0]["streams"]:
        return PoolSync(plans.stream(described, source.placement, shards(source)), group, source)
    if only is None:
        return PoolSync(plans.sync(described, source.placement, shards(source)), group, source)
    plans.bring_base(described, source.placement, shards(source))
    return PoolSync(plans.sync(_adapters(only.placement), only.placement, shards(only)), group, only)


def connect_rollout(
    rollout: Any,
    group: PoolGroup,
    num_trainers: int,
    *,
    staged: bool = True,
    model: nn.Module | None = None,
    device: torch.device | None = None,
) -> PoolSync:
    """Connect a rollout rank that generates with a Hugging Face module (`rollout.hf_model`), whole or sharded.

    `staged` needs a second copy of the weights while a sync runs. Without `staged`, generation stops for the whole
    sync. An engine without such a module gets whole tensors by the names of `model` on `device`. `model` only provides
    names, shapes and dtypes, so it may lie on the meta device.
    """
    trainers = _checked_split(group, num_trainers)
    if getattr(rollout, "shares_weights", False):
        raise ValueError("a rollout of another pool must have weights of its own")
    streams = getattr(rollout, "hf_model", None) is None
    if streams:
        if model is None:
            raise ValueError(f"{type(rollout).__name__} has no Hugging Face module: give the `model` it generates with")
        if getattr(rollout, "parallel", None) is not None:
            check_cuttable(model)
        params = named_weights(model)
        # An engine in another process takes its weights from host memory.
        device = device if device is not None and isinstance(rollout, SteppingRollout) else torch.device("cpu")
    else:
        end_refusal(rollout)
        params = rollout_params(rollout.hf_model)
        device = next(iter(params.values())).device
    parallel = getattr(rollout, "parallel", None)
    shapes = {name: p.shape for name, p in params.items()} if streams or parallel is None else parallel.shapes
    described = {name: [list(shapes[name]), str(p.dtype).removeprefix("torch.")] for name, p in params.items()}
    cut = None
    if parallel is not None:
        config = model.config if streams and model is not None else rollout.hf_model.config
        cut = {"tp": parallel.tp, "ep": parallel.ep} | _sizes_to_cut(config)
    if parallel is not None and (group.rank - trainers) % parallel.size != parallel.rank:
        raise ValueError(
            f"rank {group.rank - trainers} of the rollouts has part {parallel.rank} of {parallel.size}: the ranks of a "
            "rollout must be neighbours, in order"
        )
    ranks: int = getattr(rollout, "replica_ranks", 1)
    own = {"params": described, "cut": cut, "streams": streams, "ranks": ranks}
    rollouts = group.gather(own, "to describe their weights")[trainers:]
    told = group.gather({"device": device.type}, "to plan")
    plans = _Plans(group, trainers, told, device, cut, ranks)
    settings, described = plans.settings, _same_everywhere(rollouts, trainers)
    placement = Placement.from_json(settings["placement"])
    if streams:
        return PoolSync(plans.stream(described, placement), group)
    if settings["adapters"] is None:
        return PoolSync(plans.sync(described, placement, params=params, staged=staged), group)
    if cut is not None:
        raise ValueError("a rollout that is cut over ranks takes no adapters alone: send them merged")
    base = plans.bring_base(described, placement)
    placement = Placement.from_json(settings["adapters"]["placement"])
    wanted = _adapters(placement)
    tensors = {name: torch.empty(shape, device=device) for name, (shape, _) in wanted.items()}
    sync = plans.sync(wanted, placement, params=tensors)
    return MergingPoolSync(sync, group, params, base, settings["adapters"]["scaling"], staged)


class MergingPoolSync(PoolSync):
    """A rollout's end if adapters are sent alone: it merges them with the base, which is kept in host memory."""

    sync: WeightSync

    def __init__(
        self,
        sync: WeightSync,
        group: PoolGroup,
        params: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        scaling: Mapping[str, float],
        staged: bool,
    ):
        super().__init__(sync, group)
        self.params, self.base, self.scaling, self.staged = params, base, scaling, staged
        self._is_there = False

    def __call__(self, rollout: Rollout | None, version: int) -> SyncReport:
        assert rollout is not None
        assert self.sync.destination is not None
        if isinstance(rollout, SteppingRollout):
            rollout.gaps.restart()
        report = self.sync.run(version)
        if rollout.version != version:
            adapters = self.sync.destination.tensors
            made = merged(self.params, self.base, adapters, self.scaling, is_there=self._is_there)
            rollout.update_weights(list(made) if self.staged else made, version)
            self._is_there = True
        stall = rollout.longest_gap() if isinstance(rollout, SteppingRollout) else 0.0
        return replace(report, stall_seconds=stall)


def _described_adapters(engine: Any, base: Source, only: Source) -> dict[str, Any]:
    """Return what rollouts need to merge adapters: their placement, the scaling by layer and the dtypes of the base."""
    assert isinstance(base, FSDP2Source)
    dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in base_dtypes(base).items()}
    return {"placement": only.placement.to_json(), "scaling": engine.adapter_scaling, "dtypes": dtypes}


def _sizes_to_cut(hf_config: Any) -> dict[str, int]:
    """Return the config sizes that determine how a model is sharded, for ranks that do not have the config."""
    hf_config = of_text(hf_config)
    heads = hf_config.num_attention_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(hf_config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim(hf_config),
        "num_experts": expert_count(hf_config),
    }


def _adapters(placement: Placement) -> dict[str, Any]:
    """Return the shape and dtype of every adapter tensor: float32, so that adapters are sent exactly."""
    return {name: [list(shape), "float32"] for name, shape in placement.tensors.items()}


@dataclass(frozen=True)
class _Plans:
    """A factory of reshard plans, which are equal on all ranks, and of this rank's end of each plan.

    `told` has the device type of every rank, and the settings in the entry of rank 0. `cut` is None for whole rollouts.
    For sharded rollouts it has `tp`, `ep` (the ranks over which whole experts are spread, 0: experts are sharded like
    the rest) and the sizes from `_sizes_to_cut`. Of `replica_ranks` neighbouring ranks only the first has an engine.
    """

    group: PoolGroup
    trainers: int
    told: Sequence[Mapping[str, Any]]
    device: torch.device
    cut: Mapping[str, int] | None = None
    replica_ranks: int = 1

    @property
    def engines(self) -> range:
        """The ranks of the group that have a rollout engine, which receives weights."""
        return range(self.trainers, self.group.world, self.replica_ranks)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.told[0]["settings"]

    def bring_base(
        self, described: Mapping[str, Any], placement: Placement, source: Shards | None = None
    ) -> dict[str, Tensor]:
        """Send the base model, in the trainer's dtypes, into the host memory of the rollouts, and return it there."""
        dtypes = self.settings["adapters"]["dtypes"]
        wanted = {name: [shape, dtypes.get(name, dtype)] for name, (shape, dtype) in described.items()}
        kept: dict[str, Tensor] = {}
        if self.group.rank >= self.trainers:
            kept = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in wanted.items()}
        sync = PoolSync(self.sync(wanted, placement, source, kept), self.group)
        sync(None, 0)
        sync.close()
        return kept

    def sync(
        self,
        described: Mapping[str, Any],
        placement: Placement,
        source: Shards | None = None,
        params: Mapping[str, Tensor] | None = None,
        staged: bool = False,
    ) -> WeightSync:
        """Return this rank's end of a single plan.

        `described` has the shape and dtype of every parameter of the rollouts. `params` are the parameters of this
        rollout.
        """
        target, dtypes = self._target(described)
        plan = self._plan(placement, target, dtypes, self._bucket_bytes)
        place = self.group.rank - self.trainers
        own = {name: params[name] for name in described} if params is not None and place >= 0 else None
        return WeightSync(
            plan,
            self.group.rank,
            source=source,
            destination=Shards(target, place, own) if own is not None else None,
            dtypes=dtypes,
            carrier=self._carrier([plan]),
            verify=self.settings["verify"],
            staged=staged,
            delta=self.settings["delta"],
            deadline=self.settings["deadline"],
            may_repeat=True,
        )

    def stream(self, described: Mapping[str, Any], placement: Placement, source: Shards | None = None) -> StreamedSync:
        """Return a sync with one plan for every bucket of whole parameters, in the order of the parameters."""
        if self.settings["delta"]:
            raise ValueError(
                "changes alone need the last version in place, which whole tensors are not: set delta=False"
            )
        target, dtypes = self._target(described, streams=True)
        return streamed_sync(
            placement,
            target,
            {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in described.items()},
            rank=self.group.rank,
            place=self.engines.index(self.group.rank) if self.group.rank in self.engines else -1,
            source=source,
            dtypes=dtypes,
            plan=lambda ours, theirs, bucket: self._plan(ours, theirs, dtypes, bucket),
            carrier=self._carrier,
            bucket_bytes=self._bucket_bytes,
            verify=self.settings["verify"],
            deadline=self.settings["deadline"],
            device=self.device,
        )

    def _target(
        self, described: Mapping[str, Any], *, streams: bool = False
    ) -> tuple[Placement, dict[str, torch.dtype]]:
        """Return the placement of the tensors on the rollouts, and the dtype of each tensor there."""
        rollouts = len(self.engines)
        shapes = {name: tuple(shape) for name, (shape, _) in described.items()}
        if self.cut is None:
            target = replicas(shapes, rollouts, self.settings["model_type"], f"{rollouts} rollouts")
        else:
            sizes, family, tp = SimpleNamespace(**self.cut), self.settings["model_type"], self.cut["tp"]
            layout = RolloutLayout(tp, rollouts // tp, self.cut["ep"], "packed" if streams else "separate")
            if streams:
                target = windows(shapes, sizes, layout, family)
            else:
                target = rollout_placement(replicas(shapes, 1, family).tensors, sizes, layout)
        kinds = {name: torch.empty(0, dtype=getattr(torch, dtype)) for name, (_, dtype) in described.items()}
        return target, tensor_dtypes(target, 0, kinds, asks=False)

    @property
    def _bucket_bytes(self) -> int:
        return self.settings["bucket_megabytes"] * MEGABYTE

    def _plan(
        self, placement: Placement, target: Placement, dtypes: Mapping[str, torch.dtype], bucket_bytes: int
    ) -> ReshardPlan:
        return plan_reshard(
            placement,
            target,
            itemsize={name: dtype.itemsize for name, dtype in dtypes.items()},
            bucket_bytes=bucket_bytes,
            source_ranks=range(placement.world_size),
            destination_ranks=self.engines,
            hosts=self.group.hosts,
            feed=self.settings["feed"],
        )

    def _carrier(self, plans: Sequence[ReshardPlan]) -> Carrier:
        slot = max(WORD_BYTES, *(int(plan.message_bytes.max(initial=0)) for plan in plans))
        devices = [told["device"] for told in self.told]
        return carrier_between(self.group, slot, self.device, devices, self.settings["carrier"])


def carrier_between(
    group: PoolGroup, slot: int, device: torch.device, devices: Sequence[str], kind: str = "auto"
) -> Carrier:
    """Return the transport that fits the hosts of the ranks, for messages of up to `slot` bytes.

    `devices` are the device types of all ranks. `auto` uses a process group between hosts, CUDA IPC between GPUs of one
    host, and else shared memory.
    """
    on_gpus = set(devices) == {"cuda"}
    if kind == "auto":
        kind = "process_group" if len(set(group.hosts)) > 1 else "cuda_ipc" if on_gpus else "shared_memory"
    if kind == "process_group":
        where = device if on_gpus else torch.device("cpu")
        return ProcessGroupCarrier(slot, where, group.backend(where), owns=True)
    folder = group.gather(memory_folder() if group.rank == 0 else None, "to share memory")[0]
    made = (
        CudaIpcCarrier(folder, group.rank, slot, device)
        if kind == "cuda_ipc"
        else SharedMemoryCarrier(folder, group.rank, slot)
    )
    made.deadline = Deadline(group.deadline)
    open_together(made, group.world, lambda: group.gather(None, "to open shared memory"))
    return made


def _checked_split(group: PoolGroup, trainers: int) -> int:
    """Return the number of trainers after checking that all ranks pass the same number."""
    if not 0 < trainers < group.world:
        raise ValueError(f"{trainers} trainers of {group.world} ranks leave no trainer or no rollout")
    told = group.gather(trainers, "to say how many trainers there are")
    if len(set(told)) > 1:
        raise ValueError(f"the ranks differ about the number of trainers: {told}")
    return trainers


def _same_everywhere(rollouts: Sequence[Mapping[str, Any]], trainers: int) -> dict[str, Any]:
    """Return the parameters of the rollouts, and raise a ValueError if the rollouts are not copies of each other."""
    first = dict(rollouts[0]["params"])
    for number, other in enumerate(rollouts[1:], trainers + 1):
        if any(other.get(field) != rollouts[0].get(field) for field in ("cut", "ranks")):
            raise ValueError(f"rollouts must be cut alike: ranks {trainers} and {number} differ")
        if other["streams"] != rollouts[0]["streams"]:
            raise ValueError(f"rollouts must be of one kind: ranks {trainers} and {number} differ")
        wrong = [name for name in first.keys() | other["params"].keys() if first.get(name) != other["params"].get(name)]
        if wrong:
            name = min(wrong)
            raise ValueError(
                f"rollouts must hold the same model: '{name}' is {first.get(name)} on rank {trainers} and "
                f"{other['params'].get(name)} on rank {number}"
            )
    return first


def _host_name() -> str:
    """Return a name that is equal for processes that can share memory and check whether the other process is alive.

    The name includes the PID namespace, so two containers on one host have different names.
    """
    own = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(own) if own.is_symlink() else ''}"
