"""The placement of parameters on the ranks: whole on one rank, by FSDP2, or by FSDP1, behind one interface.

- `Whole`, `FSDP2`, `FSDP1`: the placements.
- `units_to_shard`: the modules of a model that are gathered, used and freed as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from meshrl.config.engine import FSDPConfig, WrapPolicyConfig
from meshrl.engines.optim import own_parts
from meshrl.models.loading import torch_dtype
from meshrl.parallel.mesh import Layout, sharding_mesh

CLIP_EPS = 1e-6  # the epsilon of torch's clip_grad_norm_


class Sharding(ABC):
    """A way to lay out a module's parameters, gradients and optimizer states."""

    module: nn.Module

    @abstractmethod
    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole, one at a time; all ranks must take part."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients down to `max_norm` and return their norm over all ranks before that."""
        return float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, foreach=True))

    def move(self, device: torch.device) -> None:
        """Move this rank's part of the parameters to another device."""
        self.module.to(device)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients of all parameters that the optimizer trains."""
        optimizer.zero_grad(set_to_none=True)

    def reshard(self) -> None:
        """Free gathered parameters, which a forward pass may leave, so that the module holds this rank's shards."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


class Whole(Sharding):
    """A placement without sharding: one rank holds everything, as a plain module."""

    def __init__(self, module: nn.Module):
        self.module = module

    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.module.named_parameters():
            yield name, param.detach()


class FSDP2(Sharding):
    """`fully_shard` by a `shard_layout`: units are sharded over `fsdp`, gradients are averaged over all ranks."""

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
        # On local shards: for DTensors torch would first derive the sharding of each result, which takes longer.
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
    """Return the configured compute and reduction types, or None to compute in the parameters' own type."""
    param, reduce = (torch_dtype(n) for n in (config.mixed_precision.param_dtype, config.mixed_precision.reduce_dtype))
    if param == reduce == torch_dtype(config.model_dtype):
        return None
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


# FSDP1, for users who need it: flattened parameters instead of DTensors, otherwise the same interface as FSDP2.

WRAPPER_NAME = "_fsdp_wrapped_module."


class FSDP1(Sharding):
    """`FullyShardedDataParallel` around every unit and the root; hybrid sharding if there are copies of the weights."""

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
            # Adapters and frozen weights may share a unit only with original parameters.
            use_orig_params=config.use_orig_params or len({p.requires_grad for p in module.parameters()}) == 2,
        )

    def full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole, gathering one unit at a time; all ranks must take part."""
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
        """Return the handles that hold the flattened parameters of each unit that has parameters."""
        units = FullyShardedDataParallel.fsdp_modules(self.module)
        return [unit._handle for unit in units if unit._handle is not None]

    def move(self, device: torch.device) -> None:
        self.reshard()
        super().move(device)
        for handle in self._handles():  # after a forward FSDP1 takes its shard from here
            handle.flat_param._local_shard = handle.flat_param.data

    def reshard(self) -> None:
        # After a forward without a backward the root is still gathered. Before the first forward no buffer exists.
        for handle in self._handles():
            if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
                handle.reshard(True)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        super().zero_grad(optimizer)
        # The optimizer frees the gradients of original parameters, but not the flat gradient that they are views of.
        for handle in self._handles():
            handle.flat_param.grad = None

    def clip_grad_norm(self, max_norm: float) -> float:
        return float(self.module.clip_grad_norm_(max_norm))  # type: ignore[operator]


# The modules of a model that become units of sharding: each is gathered, used and freed as one.


def units_to_shard(hf_model: nn.Module, policy: WrapPolicyConfig) -> list[nn.Module]:
    """Return the modules to shard as units, inner units first; parameters in no unit stay with the root.

    The policy selects units by class (`_no_split_modules` unless named), by size, or none at all. An embedding that is
    not tied to the output projection is a unit of its own. The projection stays with the root, which computes log-probs
    with its weight.
    """
    if policy.disable:
        return []
    if policy.min_num_params > 0:
        return _units_by_size(hf_model, policy.min_num_params)
    classes = set(policy.transformer_layer_cls_to_wrap or getattr(hf_model, "_no_split_modules", None) or ())
    units = [module for module in hf_model.modules() if type(module).__name__ in classes]
    if not units:
        names = ", ".join(sorted(classes)) or "(the model names none)"
        raise ValueError(f"the model has no layer of class {names}: set fsdp_config.wrap_policy")
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and embedding.weight is not head.weight:
        units.append(embedding)
    return units


def _units_by_size(hf_model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return units from the leaves up: a module with this many parameters outside inner units becomes a unit."""
    head = hf_model.get_output_embeddings()  # type: ignore[operator]
    taken = set() if head is None else {id(p) for p in head.parameters()}
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        # Lists of modules are never called, so nothing would gather their weights.
        is_called = module is not hf_model and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_called and sum(own.values()) >= min_num_params:
            units.append(module)
            taken.update(own)

    visit(hf_model)
    return units
