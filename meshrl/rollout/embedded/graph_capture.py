"""Whether a step of a model can be recorded as a graph: nothing in it may wait for the device.

A recording that fails leaves torch's random numbers and its memory in the middle of it. So a step is watched first.
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
# Their results are as large as the device finds, which the host has to know.
WAITING = (
    aten.nonzero,
    aten._local_scalar_dense,
    aten.masked_select,
    aten._unique2,
    aten.unique_consecutive,
    aten.equal,
)
TRANSFORMERS = "transformers"  # operations of its own: the products of experts, one after the other
GROUPING = (9, 10)  # the first numbers of capabilities
# By a mask they take what nonzero finds.
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class _Watch(TorchDispatchMode):
    """Remembers the first operation that waits for the device."""

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
    # From one side to the other: a copy that the host waits for. Single numbers go along with a kernel.
    return len({x.device.type for x in everything if isinstance(x, Tensor) and x.dim()}) > 1


def _groups(x: Tensor) -> bool:
    """Whether the device itself can be told the sizes of the groups of a grouped product."""
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in GROUPING


def what_waits(step: Callable[[], None]) -> str | None:
    """The first operation of a step that waits for the device, or None. The step is taken."""
    with _Watch() as watch:
        step()
    return watch.found


@contextmanager
def sound_after_failure(device: torch.device, pool: tuple[int, int]) -> Iterator[None]:
    """A recording into a pool that fails inside leaves torch's random numbers and memory as they were."""
    index = device.index or 0
    generator, stream = torch.cuda.default_generators[index], torch.cuda.current_stream(device)
    kept = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)  # a recording has one of its own, and leaves it only at a good end
        generator.graphsafe_set_state(kept)
        # Else the allocator thinks for ever that a recording is under way, and gives no memory back.
        torch._C._cuda_endAllocateToPool(index, pool)
        raise
