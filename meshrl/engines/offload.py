"""Moving optimizer states between device and host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Brings every tensor of the optimizer's states to a device; step counters stay where the optimizer wants them."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                state[name] = value.to(device, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
