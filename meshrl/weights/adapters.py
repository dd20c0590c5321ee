"""LoRA: the base model once, then the adapters alone, to rollouts that take adapters (`update_adapter`).

Rollouts that take none merge them where they arrive (`merging.MergingSync`), or get the weights that the adapters
amount to: `connect(engine, ..., adapters="merged")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrl.engines.fsdp.engine import FSDPEngine
from meshrl.models.buffers import persistent_buffers
from meshrl.rollout.base import Rollout
from meshrl.weights.connect import carrier_for, hosts_of_ranks, lent, rank_and_world
from meshrl.weights.placement import replicas
from meshrl.weights.plan import MEGABYTE, plan_reshard
from meshrl.weights.shards import Shards
from meshrl.weights.sources import BASE, DOWN, UP, FSDP2Source
from meshrl.weights.sync import SyncReport, WeightSync

PEFT_PREFIX = "base_model.model."


class AdapterSync:
    """`base_sync_done` says whether the rollout has the base model; after that only adapters travel.

    Call `forget_base` when the rollout has given its weights up.
    """

    def __init__(
        self,
        source: FSDP2Source,
        sync: WeightSync,
        config: Mapping[str, Any],
        send_base: Callable[[Rollout, int], object],
    ):
        self.source, self.sync, self.config, self.send_base = source, sync, config, send_base
        self.base_sync_done = False

    def forget_base(self) -> None:
        self.base_sync_done = False

    def __call__(self, rollout: Any, version: int) -> SyncReport:
        """All ranks together."""
        if not self.base_sync_done:
            self.send_base(rollout, version)
            self.base_sync_done = True
        assert self.sync.destination is not None
        with lent(self.source.tensors(), self.sync):
            report = self.sync.run(version)
        tensors = {peft_name(name): tensor for name, tensor in self.sync.destination.tensors.items()}
        rollout.update_adapter(self.config, tensors)
        rollout.version = version
        return report


def connect_adapters(
    engine: FSDPEngine,
    config: Mapping[str, Any],
    *,
    send_base: Callable[[Rollout, int], object] | None = None,
    dtype: torch.dtype = torch.float32,
    bucket_megabytes: int = 512,
    verify: bool = True,
    deadline: float = 600.0,
    carrier: str = "auto",
) -> AdapterSync:
    """Adapters, whole, to the rollout of every rank; all ranks call it alike.

    `config` is peft's of the adapter. `send_base` brings the base model; by default as a stream of whole tensors.
    """
    source, sync = adapter_exchange(
        engine, dtype=dtype, bucket_megabytes=bucket_megabytes, verify=verify, deadline=deadline, carrier=carrier
    )

    def stream(rollout: Rollout, version: int) -> None:
        rollout.update_weights(base_params(engine), version)

    return AdapterSync(source, sync, config, send_base or stream)


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


def peft_name(name: str) -> str:
    """What peft's files call an adapter's matrix."""
    return PEFT_PREFIX + name.replace(".default.", ".")
