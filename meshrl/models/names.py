"""The map from the parameters of Hugging Face's modules to the tensors in Hugging Face's files, as an explicit table.

Reshard plans name tensors as files do: one matrix for each projection of each expert. Modules may hold all experts of a
layer as one stack. The modules of some families have other names than their files. The file also reads sizes from
configs of different families.
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
# The names in a family's files of an expert's projections, and of the block that holds the experts.
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax", "minimax_m2"), ("w1", "w3", "w2"))
BLOCK_NAMES = dict.fromkeys(EXPERT_NAMES, (".mlp.", ".block_sparse_moe."))


@dataclass(frozen=True)
class Part:
    """A tensor of the files inside a module's parameter: its start and its strides, in elements."""

    name: str
    shape: Shape
    offset: int
    row_stride: int
    col_stride: int = 1


def matrix(shape: Shape) -> tuple[int, int]:
    """Return any shape as (rows, columns): all dims after the first form one row."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def file_name(name: str, model_type: str) -> str:
    """Return the name that a module's parameter has in a checkpoint's files."""
    return name.replace(*BLOCK_NAMES[model_type]) if model_type in BLOCK_NAMES else name


def is_of_tower(name: str) -> bool:
    """Return whether a weight belongs to the vision tower, which every rank of a rollout holds whole."""
    return TOWER.search(name) is not None


def module_name(name: str) -> str:
    """Undo `file_name` for a name of any model family."""
    for ours, theirs in BLOCK_NAMES.values():
        name = name.replace(theirs, ours)
    return name


def parts_of(name: str, shape: Shape, model_type: str = "") -> list[Part]:
    """Return the tensors that a module's parameter holds: itself, or the projections of every expert."""
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
    """Return the table for a whole module; raise a `ValueError` if two parameters claim the same tensor."""
    table = {name: parts_of(name, shape, model_type) for name, shape in params.items()}
    owner: dict[str, str] = {}
    for name, parts in table.items():
        for part in parts:
            if part.name in owner:
                raise ValueError(f"'{part.name}' lies in two parameters, '{owner[part.name]}' and '{name}'")
            owner[part.name] = name
    return table


# Sizes that the configs of different families store under different names.


def of_text(hf_config: Any) -> Any:
    """Return the language model's part of a config, which is the whole config unless the model is a VLM."""
    return hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config


def head_dim(hf_config: Any) -> int:
    """Return the number of elements in a query head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def expert_count(hf_config: Any) -> int:
    """Return the number of routed experts in a sparse layer; 0 for a dense model."""
    for field in EXPERT_COUNTS:
        if getattr(hf_config, field, None):
            return int(getattr(hf_config, field))
    return 0
