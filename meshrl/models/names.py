"""From the parameters of Hugging Face's modules to the tensors of Hugging Face's files, by an explicit table.

Plans speak of tensors as files name them: one matrix for each projection of each expert. Modules may hold all experts
of a layer as one stack, and some families' modules have other names than their files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshrl.config.model_folder import EXPERT_COUNTS

Shape = tuple[int, ...]

TOWER = re.compile(r"(^|\.)visual\.")
STACK = re.compile(r"(?P<experts>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)")
# How a family's files name the projections of an expert, and the block that holds the experts.
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax", "minimax_m2"), ("w1", "w3", "w2"))
BLOCK_NAMES = dict.fromkeys(EXPERT_NAMES, (".mlp.", ".block_sparse_moe."))


@dataclass(frozen=True)
class Part:
    """A tensor of the files inside a module's parameter: where it starts and its strides, in elements."""

    name: str
    shape: Shape
    offset: int
    row_stride: int
    col_stride: int = 1


def matrix(shape: Shape) -> tuple[int, int]:
    """Any shape as rows and columns: everything behind the first dim is one row."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def file_name(name: str, model_type: str) -> str:
    """What a module's parameter is called in a checkpoint's files."""
    return name.replace(*BLOCK_NAMES[model_type]) if model_type in BLOCK_NAMES else name


def is_of_tower(name: str) -> bool:
    """Whether a weight is of what looks at images, which every rank of a rollout has whole."""
    return TOWER.search(name) is not None


def module_name(name: str) -> str:
    """The inverse of `file_name`, for any family."""
    for ours, theirs in BLOCK_NAMES.values():
        name = name.replace(theirs, ours)
    return name


def parts_of(name: str, shape: Shape, model_type: str = "") -> list[Part]:
    """The tensors that a module's parameter holds: itself, or the projections of every expert."""
    match = STACK.fullmatch(name)
    if match is None or len(shape) != 3:
        return [Part(file_name(name, model_type), shape, 0, matrix(shape)[1])]
    gate, up, down = EXPERT_NAMES.get(model_type, ("gate_proj", "up_proj", "down_proj"))
    kinds = [gate, up] if match["kind"] == "gate_up_proj" else [down]
    count, height, width = shape
    rows = height // len(kinds)
    experts = file_name(match["experts"], model_type)
    return [
        Part(f"{experts}.{number}.{kind}.weight", (rows, width), (number * height + place * rows) * width, width)
        for number in range(count)
        for place, kind in enumerate(kinds)
    ]


def convert_weight_keys(params: Mapping[str, Shape], model_type: str = "") -> dict[str, list[Part]]:
    """The table for a whole module; a tensor that two parameters claim is an error."""
    table = {name: parts_of(name, shape, model_type) for name, shape in params.items()}
    owner: dict[str, str] = {}
    for name, parts in table.items():
        for part in parts:
            if part.name in owner:
                raise ValueError(f"'{part.name}' lies in two parameters, '{owner[part.name]}' and '{name}'")
            owner[part.name] = name
    return table


# Sizes that configs of different families give under different names.


def of_text(hf_config: Any) -> Any:
    """The part of a config that is of the language model: all of it, but for a model that sees."""
    return hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config


def head_dim(hf_config: Any) -> int:
    """Elements of a head of queries."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def expert_count(hf_config: Any) -> int:
    """Routed experts of a sparse layer; 0 for a dense model."""
    for field in EXPERT_COUNTS:
        if getattr(hf_config, field, None):
            return int(getattr(hf_config, field))
    return 0
