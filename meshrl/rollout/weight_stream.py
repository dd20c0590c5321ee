"""A stream of (name, tensor) on its way into a rollout: checked by name and shape, named as files, cut into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshrl.models.key_map import parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = tuple[str, Tensor]


def model_without_memory(config: Any) -> PreTrainedModel:
    """A model with this config of which nothing is allocated."""
    from meshrl.models.loading import causal_lm_class

    with torch.device("meta"):
        model: PreTrainedModel = causal_lm_class(config).from_config(config)
    model.tie_weights()
    return model


def shapes_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """The Hugging Face names and shapes of a model's weights."""
    from meshrl.models.buffers import named_weights

    return {name: list(weight.shape) for name, weight in named_weights(model).items()}


def expected_shapes(config: Any) -> dict[str, list[int]]:
    """The same of a model with this config."""
    return shapes_of(model_without_memory(config))


class FileWeights:
    """The weights of a model with this config, on their way to an engine that knows them by the names of its files."""

    def __init__(self, config: Any):
        from meshrl.models.saving import other_names

        self._model, self._type = model_without_memory(config), str(config.model_type)
        self._others = other_names(self._model)
        self.shapes = shapes_of(self._model)

    def renamed(self, weights: Iterable[Named]) -> Iterator[Named]:
        """The stream by those names: of stacked experts often each for itself."""
        from meshrl.models.saving import as_file_tensors, kind_of

        for name, tensor in weights:
            if kind_of(name) in self._others:
                yield from as_file_tensors([(name, tensor)], self._model, turns_squares=True)
                continue
            parts = parts_of(name, tuple(tensor.shape), self._type)
            if len(parts) == 1:
                yield parts[0].name, tensor
                continue
            tensor = tensor.detach().contiguous()
            for part in parts:
                place = tensor.storage_offset() + part.offset
                yield part.name, tensor.as_strided(part.shape, (part.row_stride, part.col_stride), place)


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


@contextmanager
def noted(first: BaseException, words: str) -> Iterator[None]:
    """Around what is to be done after an error: if it fails as well, that is a note on the first one."""
    try:
        yield
    except Exception as error:
        first.add_note(f"{words}: {type(error).__name__}: {error}")


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
