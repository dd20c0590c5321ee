"""Row operations on the fields of a batch: dense tensors, jagged tensors and numpy arrays alike.

A row is one sample: an index into the first dim. Each function takes all fields at once, because jagged fields that
share their offsets (and so can be added to each other) must share them afterwards too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from meshrl.data.serialize import Jagged, is_jagged, jagged_dim

Fields = Mapping[str, Any]
# The memo of one operation: what was derived from an offsets tensor, by the identity of the tensor it came from.
Memo = dict[tuple[int, ...], Any]


def slice_rows(fields: Fields, start: int, stop: int, step: int = 1) -> dict[str, Any]:
    """Rows `start:stop:step` (within bounds, step > 0) of every field, as views; jagged ones are copied if step > 1."""
    memo: Memo = {}
    return {
        name: _slice_jagged(value, start, stop, step, memo) if is_jagged(value) else value[start:stop:step]
        for name, value in fields.items()
    }


def take_rows(fields: Fields, index: torch.Tensor) -> dict[str, Any]:
    """The rows numbered in `index` (int64, on the CPU, within bounds), in that order, as copies."""
    memo: Memo = {}
    return {name: _take(value, index, memo) for name, value in fields.items()}


def repeat_rows(fields: Fields, times: int, interleave: bool) -> dict[str, Any]:
    """Every row `times` times: each beside itself (`interleave`) or the whole sequence of rows again and again."""
    memo: Memo = {}
    return {name: _repeat(value, times, interleave, memo) for name, value in fields.items()}


def concat_rows(parts: Sequence[Fields]) -> dict[str, Any]:
    """The rows of all parts one after the other; the parts must hold the same fields with matching sizes."""
    for number, part in enumerate(parts):
        if differing := set(parts[0]) ^ set(part):
            raise ValueError(
                f"cannot concatenate: part 0 has fields {sorted(parts[0])}, part {number} has {sorted(part)}; "
                f"they differ in {sorted(differing)}"
            )
    memo: Memo = {}
    return {name: _concat(name, [part[name] for part in parts], memo) for name in parts[0]}


def move_rows(fields: Fields, device: torch.device | str) -> dict[str, Any]:
    """Every tensor field on `device`."""
    memo: Memo = {}
    return {name: _move(value, torch.device(device), memo) for name, value in fields.items()}


def row(value: Any, number: int) -> Any:
    """One row of one field; of a jagged field it is the dense tensor of that row's own length."""
    if not is_jagged(value):
        return value[number]
    starts, lengths = _extents(value)
    return value.values().narrow(jagged_dim(value) - 1, int(starts[number]), int(lengths[number]))


def size_in_bytes(value: Any) -> int:
    """Bytes of the elements of a tensor field (and of the offsets, if it is jagged)."""
    if is_jagged(value):
        return size_in_bytes(value.values()) + size_in_bytes(value.offsets())
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(size_in_bytes(inner) for inner in value.values())


def row_lengths(jagged: Jagged) -> torch.Tensor:
    """The length of each row of a jagged tensor, one integer a row."""
    lengths = jagged.lengths()
    return jagged.offsets().diff() if lengths is None else lengths


def packed_values(jagged: Jagged) -> torch.Tensor:
    """The values of the rows laid end to end, without holes and without what lies before or behind the rows."""
    if jagged.lengths() is not None:
        return _take_jagged(jagged, torch.arange(jagged.shape[0]), {}).values()
    offsets = jagged.offsets()
    first, last = int(offsets[0]), int(offsets[-1])
    return jagged.values().narrow(jagged_dim(jagged) - 1, first, last - first)


def _take(value: Any, index: torch.Tensor, memo: Memo) -> Any:
    if is_jagged(value):
        return _take_jagged(value, index, memo)
    if isinstance(value, np.ndarray):
        return value[index.numpy()]
    if isinstance(value, torch.Tensor):
        return value.index_select(0, _send(index, value.device))
    return value[index]


def _send(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Row numbers on a tensor's device, by way of pinned memory: the host does not wait for the device's work."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def _repeat(value: Any, times: int, interleave: bool, memo: Memo) -> Any:
    if isinstance(value, np.ndarray):
        return np.repeat(value, times, axis=0) if interleave else np.concatenate([value] * times, axis=0)
    if isinstance(value, torch.Tensor) and not is_jagged(value):
        return value.repeat_interleave(times, dim=0) if interleave else torch.cat([value] * times)
    index = torch.arange(value.shape[0])
    return _take(value, index.repeat_interleave(times) if interleave else index.repeat(times), memo)


def _concat(name: str, values: list[Any], memo: Memo) -> Any:
    kinds = {"a jagged tensor" if is_jagged(value) else f"a {type(value).__name__}" for value in values}
    if len(kinds) > 1:
        raise ValueError(f"cannot concatenate field {name!r}: it is {' here and '.join(sorted(kinds))} there")
    jagged = is_jagged(values[0])
    row_shapes = [_row_shape(value) for value in values]
    for number, shape in enumerate(row_shapes):
        if shape != row_shapes[0]:
            raise ValueError(
                f"cannot concatenate field {name!r}: a row has shape {row_shapes[0]} in part 0 "
                f"but {shape} in part {number}; pad them to one size or use a jagged tensor"
            )
    if jagged:
        return _concat_jagged(values, memo)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values, axis=0)
    return torch.cat(values, dim=0)


def _row_shape(value: Any) -> tuple[int | None, ...]:
    # None stands for the ragged dim, whose size is a symbol of its own in every jagged tensor
    return tuple(size if isinstance(size, int) else None for size in value.shape[1:])


def _move(value: Any, device: torch.device, memo: Memo) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if not is_jagged(value) or value.device == device:
        return value.to(device)
    offsets, lengths = value.offsets(), value.lengths()
    moved = memo.setdefault((id(offsets),), offsets.to(device))
    holes = None if lengths is None else lengths.to(device)
    values = value.values().to(device)
    return torch.nested.nested_tensor_from_jagged(values, moved, holes, jagged_dim=jagged_dim(value))


def _extents(jagged: Jagged) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row starts in the values, and how long it is."""
    return jagged.offsets()[:-1], row_lengths(jagged)


def _identity(jagged: Jagged) -> tuple[int, int]:
    return id(jagged.offsets()), id(jagged.lengths())


def _offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def _slice_jagged(jagged: Jagged, start: int, stop: int, step: int, memo: Memo) -> torch.Tensor:
    stop = max(start, stop)
    if step != 1 or jagged.lengths() is not None:
        return _take_jagged(jagged, torch.arange(start, stop, step), memo)
    offsets = jagged.offsets()
    key = _identity(jagged)
    if key not in memo:
        first, last = int(offsets[start]), int(offsets[stop])
        memo[key] = first, last, offsets[start : stop + 1] - first
    first, last, rebased = memo[key]
    ragged_dim = jagged_dim(jagged)
    values = jagged.values().narrow(ragged_dim - 1, first, last - first)
    return torch.nested.nested_tensor_from_jagged(values, rebased, jagged_dim=ragged_dim)


def _take_jagged(jagged: Jagged, index: torch.Tensor, memo: Memo) -> torch.Tensor:
    key = _identity(jagged)
    if key not in memo:
        starts, lengths = _extents(jagged)
        index = index.to(starts.device)
        taken = lengths[index]
        offsets = _offsets_of(taken)
        total = int(offsets[-1])
        shift = torch.repeat_interleave(starts[index] - offsets[:-1], taken, output_size=total)
        memo[key] = offsets, shift + torch.arange(total, device=starts.device)
    offsets, positions = memo[key]
    ragged_dim = jagged_dim(jagged)
    values = jagged.values().index_select(ragged_dim - 1, positions)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_dim)


def _concat_jagged(parts: list[Jagged], memo: Memo) -> torch.Tensor:
    key = tuple(number for part in parts for number in _identity(part))
    if key not in memo:
        memo[key] = _offsets_of(torch.cat([row_lengths(part) for part in parts]))
    ragged_dim = jagged_dim(parts[0])
    packed = [packed_values(part) for part in parts]
    values = torch.cat(packed, dim=ragged_dim - 1)
    return torch.nested.nested_tensor_from_jagged(values, memo[key], jagged_dim=ragged_dim)
