"""Optimizer and learning-rate schedule from the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshrl.config.optim import OptimConfig
from meshrl.engines.master import MasterAdamW


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of each."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class LocalAdamW(torch.optim.AdamW):
    """Fused AdamW on this rank's part of sharded parameters.

    It goes element by element, so that parts can be updated on their own. Asked to update DTensors, torch would first
    find out how the result is sharded, for every tensor, which takes longer than the update.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient."""
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
        """Those of a first step, before it: torch, asked for states that are not there yet, would take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                self._state(param)

    def _state(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in ("exp_avg", "exp_avg_sq"):
                # Of an empty tensor like it torch knows how it is sharded, since the weights were read into one.
                state[name] = torch.empty_like(param)
                torch._foreach_zero_(own_parts([state[name]]))
        return state


def build_optimizer(params: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Fused AdamW over the parameters that require gradients."""
    trained = [p for p in params if p.requires_grad]
    beta1, beta2 = config.betas
    return LocalAdamW(
        trained, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def build_master_optimizer(
    params: Iterable[nn.Parameter], config: OptimConfig, accumulate_in_float32: bool
) -> MasterAdamW:
    """AdamW with float32 master weights over bfloat16 parameters."""
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
    """The learning rate as a fraction of `lr`, for the optimizer step numbered from 0."""
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
    """Warm-up, then constant, or a linear, cosine or late (wsd) decay to `min_lr_ratio`.

    Its state is the number of steps so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int):
        self.optimizer, self.peak = optimizer, config.lr
        self.factor = lr_factor(config, total_steps)
        self.steps = 0
        self._apply()

    def step(self) -> float:
        """Goes on to the next step; returns the rate that the last one had."""
        used = self.peak * self.factor(self.steps)
        self.steps += 1
        self._apply()
        return used

    def set_steps(self, steps: int) -> None:
        """Goes to where a run had stopped."""
        self.steps = steps
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * self.factor(self.steps)
