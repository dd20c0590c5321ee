"""Safetensors files: which of a folder holds which tensor, and how they are written without a second copy."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from meshrl.files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# What safetensors calls torch's types.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a model folder; empty where there are no safetensors."""
    index = folder / INDEX_NAME
    if index.is_file():
        return {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        return {}
    with open_tensors(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def open_tensors(file: Path) -> Any:
    """Opens a safetensors file; a `ValueError` that names it if it is not whole."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"'{file}' cannot be read ({error}): it is truncated or damaged") from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes a safetensors file, one tensor's bytes after the other.

    The library's own writer holds all of them a second time, and turns the system's errors into its own.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    # Wide types first: readers want every tensor to begin at a multiple of its type's size, and no holes.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"'{name}' is {tensor.dtype}: safetensors has {', '.join(DTYPE_NAMES.values())}")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for _, tensor in ordered:
            dense = tensor.detach().to("cpu").contiguous()
            if dense.numel():
                stream.write(dense.reshape(-1).view(torch.uint8).numpy().data)
