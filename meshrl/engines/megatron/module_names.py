"""From the names of Hugging Face's files to those of its modules, which hold all experts of a layer in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

Shape = tuple[int, ...]
EXPERT = re.compile(r"(?P<layer>.*)\.(mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\.(?P<kind>\w+)\.weight")
# Which of the two stacks a file's tensor belongs to, and whether to its second half.
STACKS = {
    "gate_proj": ("gate_up_proj", False),
    "up_proj": ("gate_up_proj", True),
    "down_proj": ("down_proj", False),
    "w1": ("gate_up_proj", False),
    "w3": ("gate_up_proj", True),
    "w2": ("down_proj", False),
}


def as_module_params(weights: Iterator[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Passes the stream on under the modules' names; an expert's tensors wait until their stack is complete."""
    stacks: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in weights:
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name.replace(".block_sparse_moe.", ".mlp."), tensor
            continue
        kind, second = STACKS[match["kind"]]
        stack = f"{match['layer']}.mlp.experts.{kind}"
        rows = len(tensor) * (2 if kind == "gate_up_proj" else 1)
        if stack not in stacks:
            stacks[stack] = tensor.new_empty((experts, rows, *tensor.shape[1:]))
            missing[stack] = experts * rows // len(tensor)
        first = len(tensor) if second else 0
        stacks[stack][int(match["number"]), first : first + len(tensor)] = tensor
        missing[stack] -= 1
        if missing[stack] == 0:
            yield stack, stacks.pop(stack)
    assert not stacks, f"the experts of {sorted(stacks)} are not complete"


def module_place(name: str, shape: Shape, start: Shape, experts: int) -> tuple[str, Shape, Shape]:
    """The module's tensor that holds a file's tensor, its shape, and where `start` of the file's lies in it.

    An expert's tensor is one slice of a stack, which has one dim more.
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return name.replace(".block_sparse_moe.", ".mlp."), shape, start
    kind, second = STACKS[match["kind"]]
    rows = shape[0] * (2 if kind == "gate_up_proj" else 1)
    place = (int(match["number"]), start[0] + (shape[0] if second else 0), *start[1:])
    return f"{match['layer']}.mlp.experts.{kind}", (experts, rows, *shape[1:]), place
