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

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

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

    def __init__(self, tensor: torch.Tensor, offsets: "TensorEnvelope | None" = None) -> None:
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
