"""Which safetensors file of a Hugging Face folder holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a model folder; empty where there are no safetensors."""
    index = folder / INDEX_NAME
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)
