"""FSDP2: which modules of a Hugging Face model become units of sharding, and in what precision they compute."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshrl.config.engine import FSDPConfig
from meshrl.models.loading import torch_dtype


def precision_policy(config: FSDPConfig) -> MixedPrecisionPolicy | None:
    """The compute and reduction types asked for, or None to compute in the parameters' own type."""
    param, reduce = (torch_dtype(n) for n in (config.mixed_precision.param_dtype, config.mixed_precision.reduce_dtype))
    if param == reduce == torch_dtype(config.model_dtype):
        return None
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


def layers_of(module: nn.Module, class_names: set[str]) -> list[nn.Module]:
    """The sub-modules of these classes, in the order of the model."""
    layers = [m for m in module.modules() if type(m).__name__ in class_names]
    if not layers:
        raise ValueError(f"the model has no layer of class {', '.join(sorted(class_names))} to shard by")
    return layers


def shard(module: nn.Module, hf_model: nn.Module, mesh: DeviceMesh, config: FSDPConfig) -> None:
    """Shards every decoder layer as one unit and what is left (embedding, last norm, head) with the root."""
    policy = precision_policy(config) or MixedPrecisionPolicy()
    for layer in layers_of(hf_model, set(hf_model._no_split_modules or ())):  # type: ignore[arg-type]
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
