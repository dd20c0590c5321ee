"""Weights that are no parameters: buffers that a model's files hold, such as the bias of DeepSeek-V3's routers."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the module's state, by name; those it computes for itself are left out."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a model's files hold: parameters, tied ones once, and the buffers that belong to its state."""
    return {name: param.detach() for name, param in module.named_parameters()} | persistent_buffers(module)
