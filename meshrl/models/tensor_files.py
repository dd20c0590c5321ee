"""Which of a model folder's safetensors files holds which tensor."""

from __future__ import annotations

from pathlib import Path

from meshrl.data.tensor_file import inside, open_tensors
from meshrl.files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a model folder; empty where there are no safetensors."""
    index = folder / INDEX_NAME
    if index.is_file():
        files = read_json(index)["weight_map"]
        paths = {file: inside(folder, file, links_out=True) for file in set(files.values())}
        return {name: paths[file] for name, file in files.items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        return {}
    with open_tensors(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)
