"""Weights that are no parameters: buffers that a model's files hold, such as the bias of DeepSeek-V3's routers."""

from __future__ import annotations

from torch import Tensor, nn


def buffer_homes(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The buffers that belong to the module's state, as name, owner and the owner's name for it.

    Those that a module computes for itself are left out. Walking through all modules takes longer than looking up.
    """
    return [
        (f"{prefix}.{name}" if prefix else name, part, name)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the module's state, by name."""
    return {name: owner.get_buffer(own) for name, owner, own in buffer_homes(module)}


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a model's files hold: parameters, tied ones once, and the buffers that belong to its state."""
    return {name: param.detach() for name, param in module.named_parameters()} | persistent_buffers(module)
