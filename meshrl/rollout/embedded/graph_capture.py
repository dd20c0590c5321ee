"""Checks whether a model's step can be captured as a CUDA graph, in which no operation may wait for the device.

A failed capture leaves torch's random generator and allocator in an inconsistent state. So a step is observed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# The size of these operations' results depends on data on the device, so the host has to wait.
WAITING = (
    aten.nonzero,
    aten._local_scalar_dense,
    aten.masked_select,
    aten._unique2,
    aten.unique_consecutive,
    aten.equal,
)
TRANSFORMERS = "transformers"  # the namespace of transformers' own operations: matmuls of experts, one after the other
GROUPING = (9, 10)  # major compute capabilities with grouped matmuls
# With a boolean mask, these operations index by the result of nonzero.
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class _Watch(TorchDispatchMode):
    """A dispatch mode that remembers the first operation that waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.found is None and _waits(func, args, tree_leaves((args, kwargs or {}, out))):
            self.found = str(func)
        return out


def _waits(func: Any, args: Any, everything: list[Any]) -> bool:
    packet = getattr(func, "overloadpacket", None)
    if packet in WAITING or func.namespace == TRANSFORMERS or (packet is aten._grouped_mm and not _groups(args[0])):
        return True
    if packet in INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        return True
    # Tensors on different devices mean a copy that the host waits for. Scalars are passed to a kernel as arguments.
    return len({x.device.type for x in everything if isinstance(x, Tensor) and x.dim()}) > 1


def _groups(x: Tensor) -> bool:
    """Return whether a grouped matmul can read its group sizes on the device, without the host."""
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in GROUPING


def what_waits(step: Callable[[], None]) -> str | None:
    """Return the first operation of a step that waits for the device, or None. The step is executed."""
    with _Watch() as watch:
        step()
    return watch.found


@contextmanager
def sound_after_failure(device: torch.device, pool: tuple[int, int]) -> Iterator[None]:
    """Restore torch's random generator and allocator if a capture into `pool` fails inside the context."""
    index = device.index or 0
    generator, stream = torch.cuda.default_generators[index], torch.cuda.current_stream(device)
    kept = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)  # a failed capture does not leave its own stream
        generator.graphsafe_set_state(kept)
        # Otherwise the allocator treats the capture as still in progress and never frees memory.
        torch._C._cuda_endAllocateToPool(index, pool)
        raise
