"""Reading Megatron-Core's distributed checkpoints (`torch_dist`), whatever layout wrote them, as Hugging Face tensors.

They hold every parameter as the model of one rank has it, in chunks; layers that are all alike, and experts, lie
stacked along leading dims. Only chunks that are needed are read. Their index is a pickle,
of which only values are let in (`meshrl.engines.stored_before`), and tensors are read as `weights_only`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshrl.data.tensor_file import inside
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import ModuleNames, describe
from meshrl.engines.stored_before import DCP_INDEX, StoredTensor, read_index

EMBEDDING = "embedding.word_embeddings.weight"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Norms that TransformerEngine fuses into the layer behind them; a checkpoint may have either name.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class DistCheckpoint:
    """The parameters of a distributed checkpoint, one at a time."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / DCP_INDEX).is_file():
            raise ValueError(f"'{folder}' is no distributed checkpoint: it has no {DCP_INDEX}")
        self.index = read_index(self.folder / DCP_INDEX)

    def parameter(self, name: str) -> Tensor:
        """A parameter by the name it has in the model of one rank."""
        for key, place in _places(name):
            if held := self.index.tensors.get(key):
                return self._read(key, held, place)
        raise ValueError(f"'{self.folder}' has no parameter '{name}'")

    def _read(self, key: str, held: StoredTensor, place: tuple[int, ...]) -> Tensor:
        """`place` is where the parameter lies along the leading dims."""
        whole = torch.empty(held.size[len(place) :], dtype=held.dtype)
        filled = 0
        for begins, sizes in held.chunks:
            within = [at - begin for at, begin in zip(place, begins, strict=False)]
            if any(not 0 <= at < size for at, size in zip(within, sizes, strict=False)):
                continue
            part = self._chunk(key, begins)[tuple(within)]
            box = tuple(slice(b, b + n) for b, n in zip(begins[len(place) :], sizes[len(place) :], strict=True))
            whole[box] = part
            filled += part.numel()
        if filled != whole.numel():
            raise ValueError(f"'{self.folder}' holds {filled} of {whole.numel()} elements of '{key}'")
        return whole

    def _chunk(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        info = self.index.places[key, offsets]
        file = inside(self.folder, info.file)
        if not file.is_file():
            raise ValueError(f"'{self.folder}' lacks {info.file}, which holds '{key}'")
        with file.open("rb") as stream:
            stream.seek(info.offset)
            content = stream.read(info.length)
        if len(content) != info.length:
            raise ValueError(f"'{file}' is truncated: '{key}' ends behind its end")
        tensor: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return tensor


def _places(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Where a parameter may lie: keys, and its place along their leading dims."""
    match = LAYER.fullmatch(name)
    if match is None:
        yield name, ()
        return
    layer, rest = int(match[1]), match[2]
    expert: tuple[int, ...] = ()
    if inner := EXPERT.fullmatch(rest):
        rest, expert = f"mlp.experts.experts.{inner[2]}", (int(inner[1]),)
    for words in (rest, FUSED.get(rest, rest)):
        yield f"decoder.layers.{layer}.{words}", expert
        yield f"decoder.layers.{words}", (layer, *expert)


def read_hf_tensors(folder: Path, hf_config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the Hugging Face model from a distributed checkpoint, one Megatron parameter after the other."""
    checkpoint = DistCheckpoint(folder)
    padded = len(checkpoint.parameter(EMBEDDING))
    slices = describe(hf_config, ParallelRanks(), ModuleNames(), vocab_size=padded)
    for name, group in groupby(slices, key=lambda piece: piece.parameter):
        parameter = checkpoint.parameter(name)
        found: dict[str, Tensor] = {}
        for piece in group:
            if tuple(parameter.shape) != piece.parameter_shape:
                raise ValueError(
                    f"'{name}' is {list(parameter.shape)} in '{folder}', this model needs {list(piece.parameter_shape)}"
                )
            target = found.setdefault(piece.name, parameter.new_empty(piece.shape))
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            target[box] = piece.region(parameter)
        yield from found.items()
