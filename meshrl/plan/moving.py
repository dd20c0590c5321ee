"""The bytes that a layer's operations read and write, counted by running it on the meta device, one by one.

Matrix products are left to their operations, but for those so thin that memory limits them, such as adapters'. A
compiler fuses neighbours of the rest: `timing.Efficiency.fused` says what is left of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrl.plan.activations import LayerSettings, layer_call

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
# Only memory is taken, nothing is moved.
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach")
# A product with fewer rows, columns or terms than this is limited by memory.
THIN = 256


@dataclass(frozen=True)
class Moved:
    """Of one layer: bytes of what lies between the products and of thin products, and how many operations there are."""

    between: float = 0.0
    thin: float = 0.0
    operations: float = 0.0

    def times(self, factor: float) -> Moved:
        """All of it so many times; the operations are those of one micro-batch, however long."""
        return Moved(self.between * factor, self.thin * factor, self.operations)

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.between + other.between, self.thin + other.thin, self.operations + other.operations)


@dataclass(frozen=True)
class LayerMoves:
    """What one layer moves in its forward and in its backward."""

    forward: Moved
    backward: Moved

    def of_pass(self, trains: bool, again: bool) -> Moved:
        """Of a forward, or of a training step, which may compute its forwards twice."""
        if not trains:
            return self.forward
        return self.forward + self.forward + self.backward if again else self.forward + self.backward


class Mover(TorchDispatchMode):
    """Adds up what every operation inside reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.between = self.thin = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        is_view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in made)
        if name in FREE or is_view:
            return result
        self.operations += 1
        size = sum(x.numel() * x.element_size() for x in (*given, *made))
        if name not in PRODUCTS:
            self.between += size
        elif min(*given[-2].shape[-2:], *given[-1].shape[-2:]) < THIN:
            self.thin += size
        return result


def trace_moves(model: Any, number: int, settings: LayerSettings) -> LayerMoves:
    """Of layer `number` of a model on the meta device; compiler and checkpointing are left aside."""
    layer = model.base_model.layers[number]
    layer.to(settings.dtype).train()
    run = layer_call(model, layer, replace(settings, checkpointing=False, compiled=False))
    hidden = model.config.hidden_size
    first = torch.empty(1, settings.tokens, hidden, dtype=settings.dtype, device="meta", requires_grad=True)
    with Mover() as forward:
        out = run(first)
    with Mover() as backward:
        out.backward(torch.empty_like(out))
    for param in layer.parameters():
        param.grad = None
    return LayerMoves(*(Moved(part.between, part.thin, part.operations) for part in (forward, backward)))
