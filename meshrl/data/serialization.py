"""Pickle with out-of-band bytes of tensors and arrays, and writing of safetensors files.

`dumps` returns a small pickle, and the raw memory of every large tensor and array as memoryviews. A transport (shared
memory, a socket, an object store) moves that memory itself. `loads` builds tensors on the received buffers.
`write_tensors` and `open_tensors` write and open one safetensors file, and `inside` checks a file name.

Rules for a transport of the buffers:
- A contiguous CPU tensor is not copied. Its buffer is a view of its own elements (not of its whole storage). The sender
  must not change the tensor before the buffer has been sent. Any other tensor is copied once.
- `loads` builds on writable buffers without a copy. A read-only buffer is copied once, because torch has no read-only
  tensors, and a write would reach shared memory. Align buffers to 64 bytes.
- Tensors arrive on the CPU, without gradient history. An object that occurs twice arrives once. Two different views of
  one storage arrive as two tensors.
- The format is pickle: load only data from a trusted process.
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

# Below this number of bytes, a separate buffer costs more than a copy in the pickle stream.
INLINE_BYTES = 2048

# A torch.Tensor in jagged layout. Its methods (`offsets`, `lengths`) are missing in torch's type stubs.
Jagged = Any
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def dumps(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle `obj`. Return the pickle and the memory of its large tensors and arrays, as flat byte views."""
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
    """Rebuild the object of `dumps` on top of `buffers`, which must be in the order in which `dumps` returned them."""
    return pickle.loads(data, buffers=buffers)


class TensorEnvelope:
    """A wrapper of a tensor with which any pickler (plain, Ray's) sends its memory out of band.

    It unpickles to the tensor. One envelope that is pickled twice arrives as one tensor. `seal` relies on that for
    jagged fields that share their offsets.
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
    """Wrap every dense or jagged tensor of `fields` in a `TensorEnvelope`. Other values stay as they are."""
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
    """Return whether `value` is a nested tensor in torch's jagged layout."""
    return isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged


def is_plain_dense(value: Any) -> bool:
    """Return whether `value` is an ordinary strided tensor with elements in memory: not nested, quantized or meta."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def reduce_dense(tensor: torch.Tensor, protocol: int = 5) -> Reduced:
    """Return the pickle recipe of a dense tensor: its raw bytes, its dtype and its shape."""
    memory = byte_view(tensor)
    return _rebuild_dense, (
        pickle.PickleBuffer(memory.data) if protocol >= 5 else memory.tobytes(),
        tensor.dtype,
        tuple(tensor.shape),
    )


def reduce_jagged(tensor: Jagged) -> Reduced:
    """Return the pickle recipe of a jagged tensor: its values and offsets, and its lengths if it has holes."""
    return _rebuild_jagged, (tensor.values().detach(), tensor.offsets(), tensor.lengths(), jagged_dim(tensor))


def byte_view(tensor: torch.Tensor) -> np.ndarray:
    """Return a dense tensor's elements as a flat uint8 array: a view of a contiguous CPU tensor, else a copy."""
    # Gradients and lazy conjugation are not sent.
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, but `view` needs stride 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def jagged_dim(tensor: Jagged) -> int:
    """Return the index of a jagged tensor's ragged dim, whose size differs from row to row."""
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if is_plain_dense(obj):
                return reduce_dense(obj)
            if is_jagged(obj):
                return reduce_jagged(obj)
        elif type(obj) is np.ndarray and not obj.dtype.hasobject and not obj.flags.forc:
            # numpy sends only contiguous arrays out of band.
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


# Safetensors files: writing without a second copy of the tensors, opening, and checks of file names.

# safetensors' names of torch's dtypes.
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
# The number of bytes per write. A sink that also reads them (as for a checksum) finds them in the processor's cache.
BLOCK = 1 << 18
# The header's entry for metadata, which is not a tensor.
ABOUT = "__metadata__"


class Sink(Protocol):
    """An object to which blocks of bytes are written, such as a file."""

    def write(self, data: Any, /) -> int: ...


def open_tensors(file: Path) -> Any:
    """Open a safetensors file. Raise `ValueError` with its name if it is truncated or damaged."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"'{file}' cannot be read ({error}): it is truncated or damaged") from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path, about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. `about` has texts by name, which become metadata in the header."""
    with file.open("wb") as stream:
        write_tensors(tensors, stream, about)


def write_tensors(tensors: Mapping[str, Tensor], stream: Sink, about: Mapping[str, str] | None = None) -> None:
    """Write the content of a safetensors file to a stream, one tensor after the other.

    The library's own writer needs a second copy of all tensors in memory, and replaces the system's errors by its own.
    """
    header: dict[str, object] = {ABOUT: {"format": "pt", **(about or {})}}
    at = 0
    # Wide dtypes come first, because every tensor must begin at a multiple of its dtype's size, without holes.
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
    """Return `folder/name`. Raise `ValueError` if it is outside the folder: an absolute name, `..`, or a link.

    `links_out` permits links to any place, because the hub's cache stores a model's files in another folder.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise ValueError(f"'{folder}' names the file {name!r}, which does not lie in it")
    path = folder / name
    if not links_out and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"'{path}' is a link out of its folder")
    return path
