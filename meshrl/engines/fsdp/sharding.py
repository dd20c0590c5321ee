"""How the parameters lie on the ranks: whole on one, by FSDP2, or by FSDP1. The engine asks the same of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshrl.config.engine import FSDPConfig
from meshrl.engines.fsdp.units import units_to_shard
from meshrl.engines.optim import own_parts
from meshrl.models.loading import torch_dtype
from meshrl.parallel.layout import Layout
from meshrl.parallel.mesh import sharding_mesh

CLIP_EPS = 1e-6  # as torch's clip_grad_norm_ has it


class Sharding(ABC):
    """A way to lay out a module's parameters, gradients and optimizer states."""

    module: nn.Module

    @abstractmethod
    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, one at a time; all ranks take part."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales the gradients down to `max_norm`; returns the norm they had over all ranks."""
        return float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, foreach=True))

    def move(self, device: torch.device) -> None:
        """Brings this rank's part of the parameters to another device."""
        self.module.to(device)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets go of all gradients."""
        optimizer.zero_grad(set_to_none=True)

    def reshard(self) -> None:
        """Has the module's parameters be this rank's parts: a forward pass may leave gathered ones in their place."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


class Whole(Sharding):
    """One rank holds everything, as a plain module."""

    def __init__(self, module: nn.Module):
        self.module = module

    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.module.named_parameters():
            yield name, param.detach()


class FSDP2(Sharding):
    """`fully_shard` by a `shard_layout`: units are cut over `fsdp`, gradients are averaged over all ranks."""

    def __init__(self, module: nn.Module, hf_model: nn.Module, shards: Layout, device_type: str, config: FSDPConfig):
        self.module = module
        mesh = sharding_mesh(shards, device_type)
        self.group = mesh.get_group("fsdp")  # the ranks that a parameter is cut over
        offload = CPUOffloadPolicy(pin_memory=device_type == "cuda") if config.offload_policy else OffloadPolicy()
        policy = precision_policy(config) or MixedPrecisionPolicy()
        units = units_to_shard(hf_model, config.wrap_policy)
        for unit in (*units, module):
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=config.reshard_after_forward,
            )
        if config.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> float:
        # On the parts: of DTensors torch would first find out how each result is sharded, which takes longer.
        parts = own_parts(param.grad for param in self.module.parameters() if param.grad is not None)
        if not parts:
            return 0.0
        filled = [part for part in parts if part.numel()]
        norms = torch._foreach_norm(filled, 2, torch.float32) if filled else ()
        square = torch.stack([torch.zeros((), device=parts[0].device), *norms]).square().sum()
        dist.all_reduce(square, group=self.group)
        norm = float(square.sqrt())
        if norm + CLIP_EPS > max_norm:
            torch._foreach_mul_(parts, max_norm / (norm + CLIP_EPS))
        return norm

    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.module.named_parameters():
            value = param.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value


def precision_policy(config: FSDPConfig) -> MixedPrecisionPolicy | None:
    """The compute and reduction types asked for, or None to compute in the parameters' own type."""
    param, reduce = (torch_dtype(n) for n in (config.mixed_precision.param_dtype, config.mixed_precision.reduce_dtype))
    if param == reduce == torch_dtype(config.model_dtype):
        return None
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
