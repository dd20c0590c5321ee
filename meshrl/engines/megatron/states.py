"""The optimizer's states as tensors that lie like the model's parameters, whatever shards them inside.

Megatron-Core's distributed optimizer cuts each gradient buffer, not each parameter, over data-parallel ranks: a rank
holds some stretch of the flattened parameter, or nothing of it. Here a parameter's states are put together from the
stretches of all ranks, and cut up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Stretch:
    """What this rank's optimizer holds of a parameter: elements [start, stop) of it, flattened, as `master`.

    `is_only`: no data-parallel rank holds the same.
    """

    owner: Any
    master: Tensor
    start: int
    stop: int
    is_only: bool


def stretches(optimizer: ChainedOptimizer) -> dict[nn.Parameter, Stretch]:
    """The stretch of every parameter that this rank's optimizer holds anything of."""
    found: dict[nn.Parameter, Stretch] = {}
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        if isinstance(part, DistributedOptimizer):
            for param, (group, place) in part.model_param_group_index_map.items():
                held = part._get_model_param_range_map(param)["param"]
                master = part.optimizer.param_groups[group]["params"][place]
                found[param] = Stretch(part, master, held.start, held.end, True)
        else:
            for param, master in _pairs(part):
                found[param] = Stretch(part, master, 0, param.numel(), False)
    return found


def _pairs(part: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters and what the optimizer steps on instead: float32 copies of half-precision ones, or themselves."""
    if hasattr(part, "float16_groups"):
        for models, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, masters, strict=True)
        for models in part.fp32_from_fp32_groups:
            yield from zip(models, models, strict=True)
    else:
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)


def _held(stretch: Stretch, name: str) -> Tensor:
    return stretch.master if name == "param" else stretch.owner.optimizer.state[stretch.master][name]


def whole_state(param: nn.Parameter, stretch: Stretch | None, name: str, group: dist.ProcessGroup) -> Tensor:
    """A parameter's float32 state in its shape, put together over its data-parallel ranks; all of them take part.

    `name`: `param` for the weights the optimizer steps on, or one of `MOMENTS`.
    """
    flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if stretch is not None and (stretch.is_only or dist.get_rank(group) == 0):
        flat[stretch.start : stretch.stop] = _held(stretch, name).detach().flatten()
    dist.all_reduce(flat, group=group)
    return flat.view(param.shape)


@torch.no_grad()
def set_state(stretch: Stretch, name: str, value: Tensor) -> None:
    """Puts a parameter's whole state back where this rank's optimizer holds a stretch of it."""
    held = _held(stretch, name)
    held.copy_(value.flatten()[stretch.start : stretch.stop].view(held.shape))


def steps_of(optimizer: ChainedOptimizer) -> int:
    """How many steps AdamW has taken, as this rank knows it; 0 if it holds nothing."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:
            continue
        for group in inner.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in inner.state.values():
            if "step" in state:
                return int(state["step"])
    return 0


def set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    """Tells AdamW how many steps it has taken."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:
            continue
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        if not isinstance(inner, torch.optim.AdamW):  # fused kinds count by group
            for group in inner.param_groups:
                group["step"] = steps
