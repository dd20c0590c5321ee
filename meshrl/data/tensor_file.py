"""One safetensors file: written without a second copy of its tensors, opened, and found inside its folder."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from meshrl.data.serialize import byte_view

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
# Bytes that are written at once: what looks at them as they pass finds them in the processor's cache.
BLOCK = 1 << 18
# The header's own entry for what is not a tensor.
ABOUT = "__metadata__"


class Sink(Protocol):
    """What takes bytes, one block after the other."""

    def write(self, data: Any, /) -> int: ...


def open_tensors(file: Path) -> Any:
    """Open a safetensors file; a `ValueError` that names it if it is not whole."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"'{file}' cannot be read ({error}): it is truncated or damaged") from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path, about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; `about` goes into its header, as texts by name."""
    with file.open("wb") as stream:
        write_tensors(tensors, stream, about)


def write_tensors(tensors: Mapping[str, Tensor], stream: Sink, about: Mapping[str, str] | None = None) -> None:
    """Write what a safetensors file holds, one tensor's bytes after the other.

    The library's own writer holds all of them a second time, and turns the system's errors into its own.
    """
    header: dict[str, object] = {ABOUT: {"format": "pt", **(about or {})}}
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
    stream.write(struct.pack("<Q", len(text)))
    stream.write(text)
    for _, tensor in ordered:
        content = byte_view(tensor).data if tensor.numel() else memoryview(b"")
        for place in range(0, len(content), BLOCK):
            stream.write(content[place : place + BLOCK])


def inside(folder: Path, name: str, links_out: bool = False) -> Path:
    """Return `folder/name`; a `ValueError` where that leads out of the folder: an absolute name, `..`, or a link.

    `links_out` lets links lead anywhere: the hub's cache keeps a model's files elsewhere.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise ValueError(f"'{folder}' names the file {name!r}, which does not lie in it")
    path = folder / name
    if not links_out and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"'{path}' is a link out of its folder")
    return path
