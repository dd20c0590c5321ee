"""FSDP1, for those who need it: flattened parameters instead of DTensors, otherwise the same promises as FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from meshrl.config.engine import FSDPConfig
from meshrl.engines.fsdp.sharding import Sharding
from meshrl.engines.fsdp.units import units_to_shard
from meshrl.models.loading import torch_dtype
from meshrl.parallel.layout import Layout
from meshrl.parallel.mesh import sharding_mesh

WRAPPER_NAME = "_fsdp_wrapped_module."


class FSDP1(Sharding):
    """`FullyShardedDataParallel` around every unit and the root; hybrid where there are copies of the weights."""

    def __init__(
        self, module: nn.Module, hf_model: nn.Module, shards: Layout, device: torch.device, config: FSDPConfig
    ):
        units = {id(unit) for unit in units_to_shard(hf_model, config.wrap_policy)}
        mixed = config.mixed_precision
        mesh = sharding_mesh(shards, device.type)
        self.module = FullyShardedDataParallel(
            module,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=CustomPolicy(lambda m: id(m) in units),
            mixed_precision=MixedPrecision(
                param_dtype=torch_dtype(mixed.param_dtype),
                reduce_dtype=torch_dtype(mixed.reduce_dtype),
                buffer_dtype=torch_dtype(mixed.buffer_dtype),
            ),
            cpu_offload=CPUOffload(offload_params=True) if config.offload_policy else None,
            device_id=device,
            forward_prefetch=config.forward_prefetch,
            # Adapters and frozen weights may share a unit only this way.
            use_orig_params=config.use_orig_params or len({p.requires_grad for p in module.parameters()}) == 2,
        )

    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Gathers one unit at a time."""
        for prefix, unit in self.module.named_modules():
            if not isinstance(unit, FullyShardedDataParallel):
                continue
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                units = [m for m in unit.modules() if isinstance(m, FullyShardedDataParallel) and m is not unit]
                inner = {id(p) for m in units for p in m.parameters()}
                for name, param in unit.named_parameters(remove_duplicate=True):
                    if id(param) not in inner:
                        yield f"{prefix}.{name}".replace(WRAPPER_NAME, "").lstrip("."), param.detach().clone()

    def _handles(self) -> list[Any]:
        """What holds the flattened parameters of each unit that has some."""
        units = FullyShardedDataParallel.fsdp_modules(self.module)
        return [unit._handle for unit in units if unit._handle is not None]

    def move(self, device: torch.device) -> None:
        self.reshard()
        super().move(device)
        for handle in self._handles():  # where it finds its part after a forward: else the old memory would come back
            handle.flat_param._local_shard = handle.flat_param.data

    def reshard(self) -> None:
        # After a forward without a backward the root is still gathered; before the first there is nothing to gather in.
        for handle in self._handles():
            if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
                handle.reshard(True)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        super().zero_grad(optimizer)
        # Of original parameters the optimizer lets go, and the flat one that they were views of stays.
        for handle in self._handles():
            handle.flat_param.grad = None

    def clip_grad_norm(self, max_norm: float) -> float:
        return float(self.module.clip_grad_norm_(max_norm))  # type: ignore[operator]
