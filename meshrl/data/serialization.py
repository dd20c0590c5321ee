"""Pickle with the bytes of tensors and arrays kept out of the pickle stream.

`dumps` returns a small pickle and the raw memory of every large tensor and array as memoryviews; whoever carries them
(shared memory, a socket, an object store) moves the memory itself, and `loads` builds tensors on top of what arrived.

What to know when carrying the buffers:
- A contiguous CPU tensor is not copied: its buffer is a view of its own elements (not of its whole storage), so the
  sender must not change it before the buffer has been carried. Any other tensor is copied once.
- `loads` builds on the buffers without a copy where they are writable. A read-only buffer is copied once, because
  torch has no read-only tensors and a write would reach memory that others share. Align buffers to 64 bytes.
- Tensors arrive on the CPU, without gradient history. An object that occurs twice arrives once; two different views of
  one storage arrive as two tensors.
- It is pickle: load only what comes from a trusted process.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

# Below this many bytes a buffer of its own costs more than the copy through the stream.
INLINE_BYTES = 2048

# A torch.Tensor in jagged layout, whose methods (`offsets`, `lengths`) torch's type stubs do not know.
Jagged = Any
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def dumps(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle `obj`; the memory of its large tensors and arrays is returned beside the pickle, as flat byte views."""
    buffers: list[memoryview] = []

    def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < INLINE_BYTES:
            return True
        buffers.append(view)
        return False

    stream = io.BytesIO()
    _TensorPickler(stream, protocol=5, buffer_callback=keep_out_of_band).dump(obj)
    return stream.getvalue(), buffers


def loads(data: bytes, buffers: Sequence[Any] = ()) -> Any:
    """Rebuild what `dumps` took apart, on top of `buffers` (in the order `dumps` returned them)."""
    return pickle.loads(data, buffers=buffers)


class TensorEnvelope:
    """Wraps a tensor so that any pickler (plain, Ray's) moves its memory out of band; it unpickles to the tensor.

    One envelope pickled twice arrives as one tensor: `seal` uses that for jagged fields that share their offsets.
    """

    __slots__ = ("offsets", "tensor")

    def __init__(self, tensor: torch.Tensor, offsets: TensorEnvelope | None = None) -> None:
        self.tensor = tensor
        self.offsets = offsets

    def __reduce_ex__(self, protocol: Any) -> Reduced:
        if self.offsets is None:
            return reduce_dense(self.tensor, protocol)
        function, (values, _, lengths, ragged_dim) = reduce_jagged(self.tensor)
        holes = None if lengths is None else TensorEnvelope(lengths)
        return function, (TensorEnvelope(values), self.offsets, holes, ragged_dim)


def seal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Put every dense or jagged tensor of `fields` in an envelope; other values stay as they are."""
    sealed_offsets: dict[int, TensorEnvelope] = {}
    sealed: dict[str, Any] = {}
    for name, value in fields.items():
        if is_jagged(value):
            offsets = value.offsets()
            envelope = sealed_offsets.setdefault(id(offsets), TensorEnvelope(offsets))
            sealed[name] = TensorEnvelope(value, envelope)
        else:
            sealed[name] = TensorEnvelope(value) if is_plain_dense(value) else value
    return sealed


def is_jagged(value: Any) -> bool:
    """Whether `value` is a nested tensor in torch's jagged layout."""
    return isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged


def is_plain_dense(value: Any) -> bool:
    """Whether `value` is an ordinary strided tensor whose elements lie in memory."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def reduce_dense(tensor: torch.Tensor, protocol: int = 5) -> Reduced:
    """The pickle recipe of a dense tensor: its raw bytes, its dtype and its shape."""
    memory = byte_view(tensor)
    return _rebuild_dense, (
        pickle.PickleBuffer(memory.data) if protocol >= 5 else memory.tobytes(),
        tensor.dtype,
        tuple(tensor.shape),
    )


def reduce_jagged(tensor: Jagged) -> Reduced:
    """The pickle recipe of a jagged tensor: its packed values and offsets, and its lengths where it has holes."""
    return _rebuild_jagged, (tensor.values().detach(), tensor.offsets(), tensor.lengths(), jagged_dim(tensor))


def byte_view(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a dense tensor as a flat uint8 array: a view if it is contiguous on the CPU, else one copy."""
    # gradients and lazy conjugation do not travel
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a single element counts as contiguous whatever its stride, which `view` minds
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def jagged_dim(tensor: Jagged) -> int:
    """The one dim of a jagged tensor whose size differs from row to row."""
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if is_plain_dense(obj):
                return reduce_dense(obj)
            if is_jagged(obj):
                return reduce_jagged(obj)
        elif type(obj) is np.ndarray and not obj.dtype.hasobject and not obj.flags.forc:
            # numpy itself keeps only contiguous arrays out of band
            return np.ascontiguousarray(obj).__reduce_ex__(5)
        return NotImplemented


def _rebuild_dense(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    view = memoryview(memory)
    if view.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if view.readonly:
        flat = torch.from_numpy(np.frombuffer(view, dtype=np.uint8).copy())
    else:
        flat = torch.frombuffer(view, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _rebuild_jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, ragged_dim: int
) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)


# One safetensors file: written without a second copy of its tensors, opened, and found inside its folder.

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
