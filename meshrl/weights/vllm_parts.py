"""The shard of every tensor that a rank of vLLM keeps.

vLLM cuts whole tensors itself, and never reads the rest of them. So a rank needs to get only its shard, at its place in
a tensor of the whole shape. The rest is filled with NaN. If vLLM cuts a model in another way than expected, NaN appears
in its parameters. In packed parameters (linear layers on CPUs) NaN appears in the log-probs of the first completion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrl.rollout.vllm.arguments import Parallel
from meshrl.weights.placement import RolloutLayout, Shards, windows
from meshrl.weights.session import fill_with_nothing

# Dtypes that can be checked for NaN; quantized parameters are made from these.
LOOKED_AT = (torch.float32, torch.bfloat16, torch.float16)


def own_parts(
    tensors: Iterable[tuple[str, Tensor]], parallel: Parallel, hf_config: Any, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of whole shape on `device`, in which only this rank's shard is filled in.

    `tensors` are whole tensors, named as in a model's files. The elements outside the shard are NaN.
    """
    found, layout = dict(tensors), RolloutLayout.of(parallel, parallel.size, "packed")
    placement = windows({name: tuple(t.shape) for name, t in found.items()}, hf_config, layout)
    made = {name: torch.empty_like(tensor, device=device) for name, tensor in found.items()}
    fill_with_nothing(made.values())
    here, there = (Shards(placement, parallel.rank, side) for side in (found, made))
    for piece in placement.of_rank(parallel.rank):
        there.region(piece).copy_(here.region(piece))
    yield from made.items()


def unsent(model: nn.Module) -> list[str]:
    """Return the parameters in which a rank has kept elements that it was not sent, which are NaN."""
    params = {name: p for name, p in model.named_parameters() if p.dtype in LOOKED_AT and p.numel()}
    if not params:
        return []
    largest = torch._foreach_norm([p.data for p in params.values()], ord=math.inf)
    values = torch.stack([value.float() for value in largest]).tolist()
    return [name for name, value in zip(params, values, strict=True) if math.isnan(value)]


def owners_of_weights(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the layers that own each parameter.

    Layers may share a parameter, as an embedding and an output head do.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.numel()}
    owners: dict[str, list[nn.Module]] = {}
    for layer in model.modules():
        for param in layer.parameters(recurse=False):
            if id(param) in names:
                owners.setdefault(names[id(param)], []).append(layer)
    return owners
