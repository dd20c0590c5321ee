"""Tensors that rest in host memory between phases, and the way there and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)


class HostMemory:
    """The host's memory for tensors that rest there: page-locked, taken at the first rest and kept.

    Memory that is new each time, and that the system may swap, is ten times slower than the link to the device.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def move(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on a device; `key` says which one it is among those that rest here. The copy may be under way."""
        if tensor.device.type == device.type:
            return tensor
        if device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = locked_like(tensor)
        return kept.copy_(tensor, non_blocking=True)


def locked_like(tensor: Tensor) -> Tensor:
    """Page-locked memory for a tensor of a GPU, of exactly its size (torch's own rounds up to a power of two)."""
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
        with suppress(RuntimeError):  # CUDA would tell it once more, to whoever launches the next kernel
            torch.zeros(1, device=tensor.device)
    return made


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, host: HostMemory) -> None:
    """Brings every tensor of the optimizer's states to a device; step counters stay where the optimizer wants them."""
    for number, (param, state) in enumerate(optimizer.state.items()):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                state[name] = host.move((id(optimizer), number, name), value, device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
