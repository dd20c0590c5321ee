"""LoRA weight sync: the base model once, then the adapters alone.

- `AdapterSync` is for rollouts that take adapters (`update_adapter`).
- `MergingSync` is for rollouts that do not: it merges the adapters where they arrive.

The alternative is to send merged weights in every sync: `connect(engine, ..., adapters="merged")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.models.loading import persistent_buffers
from meshrl.rollout.base import Rollout
from meshrl.weights.connect import (
    all_float32,
    carrier_for,
    connect,
    hosts_of_ranks,
    lent,
    rank_and_world,
    rollout_params,
)
from meshrl.weights.executor import Traffic
from meshrl.weights.placement import Shards, replicas
from meshrl.weights.planner import MEGABYTE, plan_reshard
from meshrl.weights.session import SyncReport, WeightSync
from meshrl.weights.sources import BASE, DOWN, UP, FSDP2Source

PEFT_PREFIX = "base_model.model."


class AdapterSync:
    """A sync of adapters to a rollout that keeps the base model. `base_sync_done`: whether the rollout has the base.

    `scaling` is the factor of each layer's adapter product. The second matrix is sent with the scaling applied.
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
        """Record that the rollout has released its weights except the base, so that a version may be synced again."""
        self.sync.version = -1

    def __call__(self, rollout: Any, version: int) -> SyncReport:
        """Sync `version` to the rollout, with the base if the rollout lacks it. All ranks call it together."""
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
    """Return the sync of whole adapters to the rollout of every rank. All ranks must call it alike.

    `send_base` sends the base model, by default as a stream of whole tensors. See `source_of` for `master`.
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
    """Return the engine's adapters as a source, and the sync that brings all adapters whole to every rank.

    See `source_of` for `master`.
    """
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
    """Yield every parameter of the model without its adapters, whole, one at a time.

    All ranks must iterate together.
    """
    for name, param in engine.module.named_parameters():
        if DOWN in name or UP in name:
            continue
        value = param.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield name.removeprefix(engine.prefix).replace(BASE, "."), whole
    yield from persistent_buffers(engine.hf_model).items()


def peft_config(adapters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a peft config for adapters whose second matrices already include the scaling."""
    rank = max(len(tensor) for name, tensor in adapters.items() if DOWN in name)
    modules = sorted({name.split(DOWN)[0].rpartition(".")[2] for name in adapters if DOWN in name})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}


def peft_name(name: str) -> str:
    """Return the name of an adapter's matrix in peft's files."""
    return PEFT_PREFIX + name.replace(".default.", ".")


# LoRA for rollouts that take no adapters: the base model once, then the adapters alone, merged where they arrive.
#
# Merging every version needs the original base, so each rollout keeps it in host memory. In return the trainer sends a
# few megabytes a step instead of the model. A rollout that released its weights restores them without a transfer.


@torch.no_grad()
def merged(
    params: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    scaling: Mapping[str, float],
    *,
    is_there: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a rollout, merged with its adapter if it has one.

    A parameter without an adapter is taken from the base, or yielded as it is if the rollout already has it
    (`is_there`).
    """
    for name, param in params.items():
        layer, _, kind = name.rpartition(".")
        down, up = (f"{layer}{part}default.weight" for part in (DOWN, UP))
        if kind == "weight" and down in adapters:
            own = base[name].to(param.device)
            change = adapters[up].to(param.device).float() @ adapters[down].to(param.device).float()
            yield name, (own.float() + change * scaling[layer]).to(own.dtype)
        else:
            yield name, param if is_there else base[name]


def base_dtypes(source: FSDP2Source) -> dict[str, torch.dtype]:
    """Return the dtypes in which the trainer holds its base model: copies to merge from must not be rounded."""
    return {name: tensor.dtype for name, tensor in source.tensors().items()}


class MergingSync:
    """A sync of base and adapters to the rollout of the same process. After `base_sync_done` only adapters are sent.

    `delta`: send only what changed in the adapters.
    """

    def __init__(self, engine: FSDPEngine, hf_model: Any, *, delta: bool = False, **options: Any):
        self.engine, self.options = engine, options
        self.params = rollout_params(hf_model)
        master = all_float32(self.params)
        self.source, self.sync = adapter_exchange(engine, master=master, delta=delta, **options)
        self.base: dict[str, Tensor] = {}
        self._is_there = False  # whether the rollout has the weights that no adapter changes

    @property
    def base_sync_done(self) -> bool:
        return bool(self.base)

    def forget(self) -> None:
        """Record that the rollout has released its weights; the base stays in host memory."""
        self._is_there, self.sync.version = False, -1

    def __call__(self, rollout: Rollout, version: int) -> SyncReport:
        """Sync `version` to the rollout, with the base if it is missing. All ranks call it together."""
        traffic, seconds = Traffic(), 0.0
        if not self.base_sync_done:
            report = self._bring_base()
            traffic, seconds = report.traffic, report.seconds
        assert self.sync.destination is not None
        with lent(self.source.tensors(), self.sync):
            report = self.sync.run(version)
        adapters = self.sync.destination.tensors
        made = merged(self.params, self.base, adapters, self.engine.adapter_scaling, is_there=self._is_there)
        rollout.update_weights(made, version)
        self._is_there = True
        traffic.add(report.traffic)
        return SyncReport(version, seconds + report.seconds, traffic, report.buffer_bytes)

    def _bring_base(self) -> SyncReport:
        dtypes = base_dtypes(FSDP2Source(self.engine, "base"))
        blank = {name: torch.empty(p.shape, dtype=dtypes.get(name, p.dtype)) for name, p in self.params.items()}
        sync = connect(self.engine, blank, adapters="base", **self.options)
        report = sync(None, 0)
        sync.close()
        self.base = blank
        return report
