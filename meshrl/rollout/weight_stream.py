"""A stream of (name, tensor) on its way into a rollout: checked by name and shape, and cut into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, Tensor]


def expected_shapes(config: Any) -> dict[str, list[int]]:
    """The Hugging Face names and shapes of the weights of a model with this config; nothing is allocated."""
    from transformers import AutoModelForCausalLM

    from meshrl.models.buffers import named_weights

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {name: list(weight.shape) for name, weight in named_weights(model).items()}


def checked(weights: Iterable[Named], expected: Mapping[str, Iterable[int]]) -> Iterator[Named]:
    """Passes the stream on; raises for an unknown, repeated or misshapen tensor, and at the end for missing ones."""
    left = dict(expected)
    for name, tensor in weights:
        shape = left.pop(name, None)
        if shape is None:
            raise ValueError(f"weight sync: the rollout has no parameter '{name}', or got it twice")
        if tuple(shape) != tensor.shape:
            sizes = f"has shape {list(shape)} here, but was sent as {list(tensor.shape)}"
            raise ValueError(f"weight sync: '{name}' {sizes}")
        yield name, tensor
    if left:
        raise ValueError(f"weight sync: {len(left)} parameters were never sent, such as '{next(iter(left))}'")


def buckets(weights: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Gathers neighbouring tensors up to `max_bytes`; a larger tensor is a bucket of its own.

    A bucket is emptied when the next one is asked for: whoever asks still has it in a variable.
    """
    bucket: list[Named] = []
    held = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > max_bytes:
            yield bucket
            bucket.clear()
            held = 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket
