"""Optimizers, learning-rate schedule, and the offload of optimizer states to host memory.

- `LocalAdamW`, `build_optimizer`: fused AdamW on this rank's shards.
- `MasterAdamW`, `build_master_optimizer`: AdamW over bfloat16 parameters with exact float32 master weights.
- `LearningRate`, `lr_factor`: warm-up and decay.
- `HostMemory`, `move_optimizer`: page-locked host memory for offloaded tensors.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshrl.config.engine import OptimConfig


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each tensor; a plain tensor is returned as it is."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class LocalAdamW(torch.optim.AdamW):
    """Fused AdamW on this rank's shards of the parameters.

    AdamW works element by element, so shards can be updated independently. For DTensors, torch would first derive the
    sharding of each result, which takes longer than the update.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            states = [self._state(param) for param in params]
            averages, squares, steps = (
                own_parts(state[name] for state in states) for name in ("exp_avg", "exp_avg_sq", "step")
            )
            beta1, beta2 = group["betas"]
            adamw(
                own_parts(params),
                own_parts(param.grad for param in params),
                averages,
                squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def make_states(self) -> None:
        """Create the optimizer states before the first step.

        If states are missing, torch's functions that return optimizer states would take a step to create them.
        """
        for group in self.param_groups:
            for param in group["params"]:
                self._state(param)

    def _state(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in ("exp_avg", "exp_avg_sq"):
                # Not `zeros_like`: torch derived the sharding of `empty_like` already, when it read the weights.
                state[name] = torch.empty_like(param)
                torch._foreach_zero_(own_parts([state[name]]))
        return state


def build_optimizer(params: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Build fused AdamW over the parameters that require gradients."""
    trained = [p for p in params if p.requires_grad]
    beta1, beta2 = config.betas
    return LocalAdamW(
        trained, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def build_master_optimizer(
    params: Iterable[nn.Parameter], config: OptimConfig, accumulate_in_float32: bool
) -> MasterAdamW:
    """Build AdamW with float32 master weights over the bfloat16 parameters that require gradients."""
    beta1, beta2 = config.betas
    return MasterAdamW(
        [p for p in params if p.requires_grad],
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        accumulate_in_float32=accumulate_in_float32,
    )


def lr_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return a function from the optimizer step (from 0) to the learning rate as a fraction of `lr`."""
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    low, decays_from = config.min_lr_ratio, warmup
    if config.lr_scheduler_type == "wsd":
        decays_from = max(warmup, total_steps - round(config.lr_decay_steps_ratio * total_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - decays_from) / max(1, total_steps - decays_from))
        if config.lr_scheduler_type == "wsd":
            return 1.0 - (1.0 - low) * max(0.0, progress)
        if config.lr_scheduler_type == "linear":
            return 1.0 - (1.0 - low) * progress
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


class LearningRate:
    """A schedule: warm-up, then a constant rate or a linear, cosine or late (wsd) decay to `min_lr_ratio`.

    Its state is the number of steps so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int):
        self.optimizer, self.peak = optimizer, config.lr
        self.factor = lr_factor(config, total_steps)
        self.steps = 0
        self._apply()

    def step(self) -> float:
        """Advance by one step and return the learning rate of the step just taken."""
        used = self.peak * self.factor(self.steps)
        self.steps += 1
        self._apply()
        return used

    def set_steps(self, steps: int) -> None:
        """Set the number of steps so far, as stored in a checkpoint."""
        self.steps = steps
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * self.factor(self.steps)


# AdamW for parameters kept in bfloat16 with exact float32 master weights, at four bytes a weight instead of six.
#
# A float32 number is its nearest bfloat16 (the parameter that the model computes with) and a 16-bit remainder:
#
#     bits(master) = (bits(parameter) << 16) + remainder        with  -32768 <= remainder < 32768
#
# So the master weights need no second copy of the parameter. All parameters are views of one flat buffer, and so are
# their states: an update is a handful of fused kernels that join the two halves, apply AdamW in float32 and split the
# result again.


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master weights from bfloat16 parameters and their remainders."""
    return ((high.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 of each weight (ties round up) and the remainder that `join` needs."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def _update(
    param: Tensor,
    remainder: Tensor,
    grad: Tensor,
    average: Tensor,
    square: Tensor,
    scalars: Tensor,
) -> None:
    """Take one AdamW step, in place, on flat tensors.

    `scalars` are lr, beta1, beta2, eps, decay, the two bias corrections and the gradient scale.
    """
    lr, beta1, beta2, eps, decay, correction1, correction2, scale = scalars.unbind()
    grad = grad.float() * scale
    master = join(param, remainder) * (1 - lr * decay)
    average.lerp_(grad, 1 - beta1)
    square.mul_(beta2).add_((1 - beta2) * grad * grad)
    master = master - lr / correction1 * average / (square.sqrt() / correction2.sqrt() + eps)
    high, low = split(master)
    param.copy_(high)
    remainder.copy_(low)


@cache
def _fused_update() -> Callable[..., None]:
    return torch.compile(_update, dynamic=True)


# Parameters start at multiples of `ALIGNMENT` elements, as fast matrix kernels need. One kernel call updates at most
# `SLICE` elements.
ALIGNMENT = 128
SLICE = 1 << 28


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over bfloat16 parameters with float32 master weights.

    With `accumulate_in_float32`, gradients of micro-batches are accumulated in float32. A parameter without a gradient
    is treated as if its gradient were zero.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        accumulate_in_float32: bool = True,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.steps, self.scale = 0, 1.0
        self._host = HostMemory()
        self._is_spent = True  # True once the gradients have been applied
        (group,) = self.param_groups
        self.trained: list[nn.Parameter] = group["params"]
        self.offsets: list[int] = []
        size = 0
        for param in self.trained:
            if param.dtype != torch.bfloat16:
                raise ValueError(f"MasterAdamW trains bfloat16 parameters, got {param.dtype}")
            self.offsets.append(size)
            size += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        device = self._home = self.trained[0].device

        def flat(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.flat = {"param": flat(torch.bfloat16), "remainder": flat(torch.int16)}
        self.flat |= {"exp_avg": flat(torch.float32), "exp_avg_sq": flat(torch.float32)}
        self.flat["grad"] = flat(torch.float32 if accumulate_in_float32 else torch.bfloat16)
        self.accumulates = accumulate_in_float32
        for param, view in zip(self.trained, self._views("param"), strict=True):
            view.copy_(param.detach())
        self._point()
        # Weak, because the autograd graph owns the hooks, and a reference cycle through it would never be collected.
        accumulate = weakref.WeakMethod(self._accumulate)
        for number, param in enumerate(self.trained if accumulate_in_float32 else ()):
            param.register_post_accumulate_grad_hook(_hook(accumulate, number))

    def _views(self, name: str) -> list[Tensor]:
        """Return each parameter's part of a flat buffer, in the parameter's shape."""
        buffer = self.flat[name]
        ends = zip(self.offsets, self.trained, strict=True)
        return [buffer[start : start + p.numel()].view(p.shape) for start, p in ends]

    def _point(self) -> None:
        """Make parameters, states and gradients views of the flat buffers."""
        for name in ("remainder", "exp_avg", "exp_avg_sq"):
            for param, view in zip(self.trained, self._views(name), strict=True):
                self.state[param][name] = view
        self.grads = self._views("grad")
        for param, view, grad in zip(self.trained, self._views("param"), self.grads, strict=True):
            param.data = view
            param.grad = grad if not self.accumulates and grad.device == view.device else None

    def move(self, device: torch.device, *, params: bool, states: bool) -> None:
        """Move the parameters, the states, or both to a device."""
        for name in ["param"] * params + ["remainder", "exp_avg", "exp_avg_sq"] * states:
            self.flat[name] = self._host.move(name, self.flat[name], device)
        if states and self._is_spent:
            # Applied gradients are not needed again: while the states are offloaded, the gradients take no memory.
            self.flat["grad"] = torch.zeros_like(self.flat["grad"], device=device if device == self._home else "meta")
        elif states:
            self.flat["grad"] = self._host.move("grad", self.flat["grad"], device)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._point()

    def master(self, param: nn.Parameter) -> Tensor:
        """Return the float32 master weights of a parameter, in its shape."""
        return join(param.detach(), self.state[param]["remainder"].to(param.device))

    @torch.no_grad()
    def set_master(self, param: nn.Parameter, master: Tensor) -> None:
        """Set a parameter and its remainder from float32 weights."""
        high, low = split(master.to(param.device, torch.float32))
        param.copy_(high)
        self.state[param]["remainder"].copy_(low)

    @torch.no_grad()
    def _accumulate(self, number: int) -> None:
        param = self.trained[number]
        assert param.grad is not None
        self.grads[number].add_(param.grad)
        param.grad = None
        self._is_spent = False

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> float:
        """Return the norm of all gradients; the next step scales the gradients down to `max_norm`."""
        parts = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in self.flat["grad"].split(SLICE)]
        norm = float(torch.linalg.vector_norm(torch.stack(parts)))
        self.scale = min(1.0, max_norm / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the accumulated gradients to parameters and states."""
        self.steps += 1
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        numbers = [group["lr"], beta1, beta2, group["eps"], group["weight_decay"]]
        numbers += [1 - beta1**self.steps, 1 - beta2**self.steps, self.scale]
        scalars = torch.tensor(numbers, device=self.flat["param"].device)
        update = _fused_update() if scalars.is_cuda else _update
        names = ("param", "remainder", "grad", "exp_avg", "exp_avg_sq")
        for parts in zip(*(self.flat[name].split(SLICE) for name in names), strict=True):
            update(*parts, scalars)  # type: ignore[call-arg]
        self.scale = 1.0
        self._is_spent = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients; the buffer in which they accumulate is kept."""
        self.flat["grad"].zero_()
        self._is_spent = self.accumulates  # otherwise autograd accumulates without `_accumulate`


def _hook(accumulate: weakref.WeakMethod, number: int) -> Callable[[Tensor], None]:
    def after_backward(_: Tensor) -> None:
        method = accumulate()
        if method is not None:
            method(number)

    return after_backward


# Offload of tensors to host memory between phases, and back.

logger = logging.getLogger(__name__)


class HostMemory:
    """Page-locked host memory for offloaded tensors, allocated at the first offload and then reused.

    Newly allocated memory, which the system may swap, is ten times slower than the link to the device.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def move(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the tensor on a device; the copy may still be in flight.

        `key` identifies the tensor, so that its host memory is found again.
        """
        if tensor.device.type == device.type:
            return tensor
        if device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = locked_like(tensor)
        return kept.copy_(tensor, non_blocking=True)


def locked_like(tensor: Tensor) -> Tensor:
    """Return page-locked host memory of exactly the size of a GPU tensor.

    torch's own pinned memory rounds the size up to a power of two.
    """
    made = torch.empty_like(tensor, device="cpu")
    own = made.to_local() if isinstance(made, DTensor) else made
    if not own.nbytes:  # a rank may have no rows of a small parameter
        return made
    runtime = torch.cuda.cudart()
    problem = runtime.cudaHostRegister(own.data_ptr(), own.nbytes, 0)
    if int(problem) == 0:
        weakref.finalize(made, runtime.cudaHostUnregister, own.data_ptr())
    else:
        logger.warning("%d bytes of host memory cannot be page-locked (%s): offloading is slow", own.nbytes, problem)
        with suppress(RuntimeError):  # consume CUDA's pending error here, not at the next kernel launch
            torch.zeros(1, device=tensor.device)
    return made


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, host: HostMemory) -> None:
    """Move the optimizer's state tensors to a device; step counters stay where the optimizer keeps them."""
    for number, (param, state) in enumerate(optimizer.state.items()):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                state[name] = host.move((id(optimizer), number, name), value, device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
