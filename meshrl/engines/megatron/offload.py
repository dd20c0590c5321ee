"""Sending a Megatron model's weights, gradients and optimizer states to host memory between phases, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from meshrl.engines.offload import HostMemory, move_optimizer


def move_weights(model: Sequence[nn.Module], device: torch.device) -> None:
    """Brings the parameters to a device; those that are views of a common buffer stay views of it."""
    for chunk in model:
        buffered: set[nn.Parameter] = set()
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if buffer.param_data is not None:
                    buffered |= set(buffer.params)
                    move = buffer.offload_to_cpu if device.type == "cpu" else buffer.reload_from_cpu
                    move(move_params=True, move_grads=False)
        for param in chunk.parameters():
            if param not in buffered:
                param.data = param.data.to(device, non_blocking=True)


def move_gradients(model: Sequence[nn.Module], device: torch.device) -> None:
    """Gives the gradients' memory back, or takes it again; they come back as zeros."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                move = buffer.offload_to_cpu if device.type == "cpu" else buffer.reload_from_cpu
                move(move_params=False, move_grads=True)


def move_states(optimizer: Any, device: torch.device, separate_masters: bool, host: HostMemory) -> None:
    """Brings the optimizer's states to a device, and its float32 weights where they are not the model's own memory."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        move_optimizer(part.optimizer, device, host)
        if separate_masters:
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    param.data = host.move(id(param), param.data, device)
