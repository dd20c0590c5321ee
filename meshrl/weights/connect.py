"""Weight sync between a training engine and a rollout on the same ranks: plan, transport and sync are made once."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.engines.training_engine import Engine
from meshrl.models.loading import named_weights, persistent_buffers
from meshrl.models.saving import check_cuttable
from meshrl.rollout.base import Rollout
from meshrl.rollout.weight_files import memory_folder
from meshrl.weights.placement import Placement, RolloutLayout, Shards, replicas, windows
from meshrl.weights.placement import rollout as rollout_placement
from meshrl.weights.planner import MEGABYTE, ReshardPlan, plan_reshard
from meshrl.weights.session import WORD_BYTES, StreamedSync, SyncReport, WeightSync, streamed_sync
from meshrl.weights.sources import Source, source_of
from meshrl.weights.transports import Carrier, Deadline, ProcessGroupCarrier, SharedMemoryCarrier, open_together

CARRIERS = ("auto", "shared_memory", "process_group")


@contextmanager
def lent(tensors: Mapping[str, Tensor], sync: WeightSync | StreamedSync) -> Iterator[None]:
    """Give a sync the engine's tensors inside the context.

    A sync that kept the tensors longer would hold memory that offloading is meant to free.
    """
    if sync.source is not None:
        sync.source = sync.source.with_tensors(tensors)
    try:
        yield
    finally:
        if sync.source is not None:
            sync.source = sync.source.with_tensors({})


class EngineSync:
    """A repeatable sync of an engine's weights to the rollout of the same process.

    Every sync asks the engine for its tensors again, because offloading and optimizers may have moved them.
    """

    def __init__(self, source: Source, sync: WeightSync | StreamedSync):
        self.source, self.sync = source, sync

    @property
    def plan(self) -> ReshardPlan:
        """The reshard plan of a sync that has a single plan."""
        assert isinstance(self.sync, WeightSync)
        return self.sync.plan

    def __call__(self, rollout: Rollout | None, version: int) -> SyncReport:
        """Sync `version` to the rollout. All ranks call it together; see `WeightSync.run`."""
        with lent(self.source.tensors(), self.sync):
            return self.sync.run(version, rollout)

    def forget(self) -> None:
        """Record that the rollout has released its weights; see `WeightSync.forget`."""
        self.sync.forget()

    def close(self) -> None:
        """Close the transport, which frees its message memory and its connections."""
        if self.sync.carrier is not None:
            self.sync.carrier.close()


def connect(
    engine: Engine,
    params: Mapping[str, Tensor],
    *,
    layout: RolloutLayout | None = None,
    hf_config: Any = None,
    bucket_megabytes: int = 512,
    verify: bool = True,
    staged: bool = False,
    delta: bool = False,
    deadline: float = 600.0,
    carrier: str = "auto",
    feed: str = "auto",
    adapters: str = "merged",
) -> EngineSync:
    """Return the sync from an engine to rollouts in the same processes. All ranks must call it alike.

    `params` are the rollout's parameters on this rank (`rollout_params`). Without `layout` every rank has a whole
    Hugging Face module. With a `layout` (and the model's `hf_config`) the first ranks of the world form that rollout.
    """
    rank, world = rank_and_world()
    has_part = layout is None or rank < layout.world_size
    source = source_of(engine, adapters=adapters, master=all_float32(params))
    if layout is None:
        target = replicas({name: tuple(p.shape) for name, p in params.items()}, world, source.model_type)
    elif layout.world_size > world:
        raise ValueError(f"{layout} needs {layout.world_size} ranks, but there are {world}")
    else:
        target = rollout_placement(source.placement.tensors, hf_config, layout)
    dtypes = tensor_dtypes(target, rank, params if has_part else {})
    plan = plan_reshard(
        source.placement, target, itemsize={name: dtype.itemsize for name, dtype in dtypes.items()},
        bucket_bytes=bucket_megabytes * MEGABYTE, hosts=hosts_of_ranks(), feed=feed,
    )  # fmt: skip
    sync = WeightSync(
        plan,
        rank,
        source=_own_shards(source, rank),
        destination=Shards(target, rank, params) if has_part else None,
        dtypes=dtypes,
        carrier=carrier_for([plan], _device(engine, params), carrier, deadline),
        verify=verify,
        staged=staged,
        delta=delta,
        deadline=deadline,
    )
    return EngineSync(source, sync)


def connect_stream(
    engine: Engine,
    model: nn.Module,
    *,
    layout: RolloutLayout | None = None,
    bucket_megabytes: int = 512,
    verify: bool = True,
    deadline: float = 600.0,
    carrier: str = "auto",
    replica_ranks: int = 1,
    adapters: str = "merged",
) -> EngineSync:
    """Return the sync to rollout engines that take whole tensors by the names of `model`; see `session`.

    `model` only provides names, shapes and dtypes, so it may lie on the meta device. Without `layout` every rank's
    engine takes all of every tensor. With a `layout` the engine cuts its shard out of whole tensors itself, as vLLM
    does. Of `replica_ranks` neighbouring ranks only the first has an engine and receives weights.
    """
    if layout is not None:
        check_cuttable(model)
    rank, world = rank_and_world()
    weights = named_weights(model)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    source = source_of(engine, adapters=adapters, master=all_float32(weights))
    engines = range(0, world, replica_ranks)
    if layout is None:
        target = replicas(shapes, len(engines), source.model_type)
    else:
        target = windows(shapes, model.config, layout, source.model_type)
    dtypes = tensor_dtypes(target, 0, weights, asks=False)  # the first rank holds a tensor of every kind
    device, hosts = _device(engine, {}), hosts_of_ranks()

    def plan(ours: Placement, theirs: Placement, bucket_bytes: int) -> ReshardPlan:
        sizes = {name: dtypes[name].itemsize for name in theirs.tensors}
        return plan_reshard(
            ours, theirs, itemsize=sizes, bucket_bytes=bucket_bytes, destination_ranks=engines, hosts=hosts
        )

    sync = streamed_sync(
        source.placement, target, {name: (shapes[name], weight.dtype) for name, weight in weights.items()},
        rank=rank, place=engines.index(rank) if rank in engines else -1, source=_own_shards(source, rank),
        dtypes=dtypes, plan=plan,
        carrier=lambda plans: carrier_for(plans, device, carrier, deadline),
        bucket_bytes=bucket_megabytes * MEGABYTE, verify=verify, deadline=deadline, device=device,
    )  # fmt: skip
    return EngineSync(source, sync)


def _own_shards(source: Source, rank: int) -> Shards | None:
    """Return this rank's shards of the engine's weights, or None for a rank outside the source's placement.

    Ranks outside the placement hold only copies of weights that other ranks hold as well.
    """
    if rank >= source.placement.world_size:
        return None
    return Shards(source.placement, rank, source.tensors()).with_tensors({})


def rollout_params(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a rollout's Hugging Face module and the buffers that are weights.

    The mapping holds the parameters themselves. A rollout that frees its memory and takes it again keeps its
    parameters, but not their data.
    """
    return dict(hf_model.named_parameters()) | persistent_buffers(hf_model)


def all_float32(params: Mapping[str, Tensor]) -> bool:
    """Return whether a rollout can take more than bfloat16 precision: all its floating-point parameters are float32.

    Buffers that are weights are float32 in every rollout.
    """
    return {param.dtype for param in params.values() if param.is_floating_point()} == {torch.float32}


def tensor_dtypes(
    target: Placement, rank: int, params: Mapping[str, Tensor], *, asks: bool = True
) -> dict[str, torch.dtype]:
    """Return the dtype of each destination tensor, taken from a held parameter of the same kind.

    Tensors are of one kind if their names differ only in layer and expert numbers (`_kind`). With `asks` the dtypes of
    all ranks are gathered, else only this rank's `params` are used.
    """
    names = list(target.tensors)
    held = target.of_rank(rank) if params else target.slices[:0]
    kinds = {
        _kind(names[tensor]): params[target.parameters[parameter]].dtype
        for tensor, parameter in zip(held["tensor"].tolist(), held["parameter"].tolist(), strict=True)
    }
    if asks and rank_and_world()[1] > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, kinds)
        for found in everyone:
            kinds = found | kinds
    return {name: kinds[_kind(name)] for name in names}


def _kind(name: str) -> str:
    """Return a tensor's name without the numbers of layer and expert."""
    return re.sub(r"\.\d+\.", ".*.", name)


def carrier_for(
    plans: Sequence[ReshardPlan], device: torch.device, kind: str = "auto", deadline: float = 600.0
) -> Carrier | None:
    """Return the transport that fits the hosts of the ranks, or None if there is only one rank.

    All ranks must call it alike. `auto` uses shared memory for CPU tensors on a single host, else a process group.
    """
    if kind not in CARRIERS:
        raise ValueError(f"unknown carrier '{kind}': use one of {', '.join(CARRIERS)}")
    _, world = rank_and_world()
    if world == 1:
        return None
    slot = max(WORD_BYTES, *(int(plan.message_bytes.max(initial=0)) for plan in plans))
    if kind == "auto":
        kind = "shared_memory" if device.type == "cpu" and len(set(hosts_of_ranks() or [0])) == 1 else "process_group"
    if kind == "shared_memory":
        made = SharedMemoryCarrier(shared_folder(), dist.get_rank(), slot)
        made.deadline = Deadline(deadline)
        open_together(made, world, dist.barrier)
        return made
    group = dist.new_group(timeout=timedelta(seconds=deadline))
    return ProcessGroupCarrier(slot, device, group)


def shared_folder() -> Path:
    """Return a folder in the host's memory that rank 0 has made and broadcast to all ranks."""
    found: list[Any] = [memory_folder() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return Path(found[0])


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the world size; `(0, 1)` without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def hosts_of_ranks() -> Sequence[int] | None:
    """Return the host of each rank as a number, or None for a single rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, socket.gethostname())
    return [found.index(name) for name in found]


def _device(engine: Engine, params: Mapping[str, Tensor]) -> torch.device:
    held = next(iter(params.values()), None)
    return held.device if held is not None else next(engine.module.parameters()).device
