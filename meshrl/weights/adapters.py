"""LoRA: the base model once, then the adapters alone, to rollouts that take adapters (`update_adapter`).

Rollouts that take none merge them where they arrive (`merging.MergingSync`), or get the weights that the adapters
amount to: `connect(engine, ..., adapters="merged")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrl.engines.fsdp.engine import FSDPEngine
from meshrl.models.buffers import persistent_buffers
from meshrl.rollout.base import Rollout
from meshrl.weights.connect import carrier_for, hosts_of_ranks, lent, rank_and_world
from meshrl.weights.exchange import Traffic
from meshrl.weights.placement import replicas
from meshrl.weights.plan import MEGABYTE, plan_reshard
from meshrl.weights.shards import Shards
from meshrl.weights.sources import BASE, DOWN, UP, FSDP2Source
from meshrl.weights.sync import SyncReport, WeightSync

PEFT_PREFIX = "base_model.model."


class AdapterSync:
    """`base_sync_done` says whether the rollout has the base model, which it then keeps: only adapters travel.

    `scaling` is by how much each layer multiplies its adapter's product; the second matrix travels with it.
    """

    def __init__(
        self,
        source: FSDP2Source,
        sync: WeightSync,
        scaling: Mapping[str, float],
        send_base: Callable[[Rollout, int], SyncReport],
    ):
        self.source, self.sync, self.scaling, self.send_base = source, sync, scaling, send_base
        self.base_sync_done = False

    def forget(self) -> None:
        """The rollout has given its weights up, but for the base: a version may come once more."""
        self.sync.version = -1

    def __call__(self, rollout: Any, version: int) -> SyncReport:
        """All ranks together."""
        traffic, seconds = Traffic(), 0.0
        if not self.base_sync_done:
            report = self.send_base(rollout, version)
            traffic, seconds = report.traffic, report.seconds
            self.base_sync_done = True
        assert self.sync.destination is not None
        with lent(self.source.tensors(), self.sync):
            report = self.sync.run(version)
        tensors = dict(self.sync.destination.tensors)
        for name in [name for name in tensors if UP in name]:
            tensors[name] = tensors[name] * self.scaling[name.split(UP)[0]]
        rollout.update_adapter(
            peft_config(tensors), {peft_name(name): tensor for name, tensor in tensors.items()}, version=version
        )
        traffic.add(report.traffic)
        return SyncReport(version, seconds + report.seconds, traffic, report.buffer_bytes)


def connect_adapters(
    engine: FSDPEngine,
    *,
    send_base: Callable[[Rollout, int], SyncReport] | None = None,
    dtype: torch.dtype = torch.float32,
    bucket_megabytes: int = 512,
    verify: bool = True,
    deadline: float = 600.0,
    carrier: str = "auto",
    master: bool = False,
) -> AdapterSync:
    """Adapters, whole, to the rollout of every rank; all ranks call it alike.

    `send_base` brings the base model; by default as a stream of whole tensors. See `source_of` for `master`.
    """
    source, sync = adapter_exchange(
        engine, dtype=dtype, bucket_megabytes=bucket_megabytes, verify=verify, deadline=deadline, carrier=carrier,
        master=master,
    )  # fmt: skip

    def stream(rollout: Rollout, version: int) -> SyncReport:
        started = time.perf_counter()
        rollout.update_weights(base_params(engine), version)
        return SyncReport(version, time.perf_counter() - started, Traffic(), 0)

    return AdapterSync(source, sync, engine.adapter_scaling, send_base or stream)


def adapter_exchange(
    engine: FSDPEngine,
    *,
    master: bool = False,
    dtype: torch.dtype = torch.float32,
    bucket_megabytes: int = 512,
    verify: bool = True,
    delta: bool = False,
    deadline: float = 600.0,
    carrier: str = "auto",
) -> tuple[FSDP2Source, WeightSync]:
    """The engine's adapters, and the sync that brings them, whole, to every rank; see `source_of` for `master`."""
    source = FSDP2Source(engine, "only", master)
    rank, world = rank_and_world()
    shapes = source.placement.tensors
    target = replicas(shapes, world, title=f"{world} copies of the adapters")
    plan = plan_reshard(
        source.placement, target, itemsize=dtype.itemsize, bucket_bytes=bucket_megabytes * MEGABYTE,
        hosts=hosts_of_ranks(),
    )  # fmt: skip
    device = next(engine.module.parameters()).device
    held = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    sync = WeightSync(
        plan,
        rank,
        source=Shards(source.placement, rank, source.tensors()),
        destination=Shards(target, rank, held),
        dtypes=dict.fromkeys(shapes, dtype),
        carrier=carrier_for([plan], device, carrier, deadline),
        verify=verify,
        delta=delta,
        deadline=deadline,
    )
    return source, sync


def base_params(engine: FSDPEngine) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model without its adapters, whole, one at a time; all ranks take part."""
    for name, param in engine.module.named_parameters():
        if DOWN in name or UP in name:
            continue
        value = param.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield name.removeprefix(engine.prefix).replace(BASE, "."), whole
    yield from persistent_buffers(engine.hf_model).items()


def peft_config(adapters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What peft's files say of adapters whose second matrices have the scaling in them already."""
    rank = max(len(tensor) for name, tensor in adapters.items() if DOWN in name)
    modules = sorted({name.split(DOWN)[0].rpartition(".")[2] for name in adapters if DOWN in name})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}


def peft_name(name: str) -> str:
    """What peft's files call an adapter's matrix."""
    return PEFT_PREFIX + name.replace(".default.", ".")
