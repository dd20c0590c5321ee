"""Modules built without memory for their parameters, but with real buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
# Buffers of floats are smaller than this, and a parameter that is not is never allocated, not even for a moment.
LARGE = 1 << 24
FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
)
# Filling what has no memory takes a millisecond a parameter. By name: Transformers puts functions of its own in the
# place of torch's.
FILLS = frozenset({"normal_", "uniform_", "trunc_normal_", "fill_", "constant_", "zero_", "zeros_", "ones_"})


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that this thread makes inside have parameters on the meta device and buffers on the CPU.

    Most buffers, such as rotary frequencies, are computed by the modules themselves and in no file: they must be real.
    """
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == META or threading.get_ident() != thread:
            return None  # as it is
        return nn.Parameter(parameter.to(META), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with _LargeOnMeta():
            yield
    finally:
        hook.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Makes new tensors of `LARGE` floats and more on the meta device, where the caller names no other, and fills none.

    Others are no parameters but buffers, such as the mask of all positions that some models have.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FILLS and (filled := args[0] if args else kwargs["tensor"]).device == META:
            return filled
        if func in FACTORIES and kwargs.get("device") is None:
            shape_only = func(*args, **(kwargs | {"device": META}))
            if shape_only.numel() >= LARGE and shape_only.is_floating_point():
                return shape_only
        return func(*args, **kwargs)
