"""Operations on the fields of a batch, which are dense tensors, jagged tensors or numpy arrays.

* `slice_rows`, `take_rows`, `repeat_rows`, `concat_rows`, `move_rows`: operations on rows.
* `same_value`, `union_of`, `concat_meta`: comparing and merging the values of several batches.

A row is one sample: an index into the first dim. Each row operation takes all fields at once. Jagged fields that share
their offsets can be added to each other, and must share the new offsets as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from meshrl.data.serialization import Jagged, is_jagged, jagged_dim

Fields = Mapping[str, Any]
# The memo of one operation: values derived from offsets tensors, by the identities of these tensors.
Memo = dict[tuple[int, ...], Any]


def slice_rows(fields: Fields, start: int, stop: int, step: int = 1) -> dict[str, Any]:
    """Return the rows `start:stop:step` (within bounds, step > 0) of every field, as views.

    Jagged fields are copied if step > 1.
    """
    memo: Memo = {}
    return {
        name: _slice_jagged(value, start, stop, step, memo) if is_jagged(value) else value[start:stop:step]
        for name, value in fields.items()
    }


def take_rows(fields: Fields, index: torch.Tensor) -> dict[str, Any]:
    """Return copies of the rows in `index` `[N]` (int64, on the CPU, within bounds), in that order."""
    memo: Memo = {}
    return {name: _take(value, index, memo) for name, value in fields.items()}


def repeat_rows(fields: Fields, times: int, interleave: bool) -> dict[str, Any]:
    """Repeat every row `times` times: each row in place (`interleave`), or the whole sequence of rows."""
    memo: Memo = {}
    return {name: _repeat(value, times, interleave, memo) for name, value in fields.items()}


def concat_rows(parts: Sequence[Fields]) -> dict[str, Any]:
    """Concatenate the rows of all parts, which must hold the same fields with matching sizes."""
    for number, part in enumerate(parts):
        if differing := set(parts[0]) ^ set(part):
            raise ValueError(
                f"cannot concatenate: part 0 has fields {sorted(parts[0])}, part {number} has {sorted(part)}; "
                f"they differ in {sorted(differing)}"
            )
    memo: Memo = {}
    return {name: _concat(name, [part[name] for part in parts], memo) for name in parts[0]}


def move_rows(fields: Fields, device: torch.device | str) -> dict[str, Any]:
    """Return all fields with the tensors moved to `device`. Arrays stay as they are."""
    memo: Memo = {}
    return {name: _move(value, torch.device(device), memo) for name, value in fields.items()}


def row(value: Any, number: int) -> Any:
    """Return one row of a field. A row of a jagged field is a dense tensor with the row's own length."""
    if not is_jagged(value):
        return value[number]
    starts, lengths = _extents(value)
    return value.values().narrow(jagged_dim(value) - 1, int(starts[number]), int(lengths[number]))


def size_in_bytes(value: Any) -> int:
    """Return the size in bytes of a tensor field's elements, including the offsets of a jagged tensor."""
    if is_jagged(value):
        return size_in_bytes(value.values()) + size_in_bytes(value.offsets())
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(size_in_bytes(inner) for inner in value.values())


def row_lengths(jagged: Jagged) -> torch.Tensor:
    """Return the length of each row of a jagged tensor, as integers `[rows]`."""
    lengths = jagged.lengths()
    return jagged.offsets().diff() if lengths is None else lengths


def packed_values(jagged: Jagged) -> torch.Tensor:
    """Return the values of all rows without gaps, and without values before the first or after the last row."""
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
    """Move row numbers to a device. Pinned memory lets the host continue without waiting for a GPU's work."""
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
    # None stands for the ragged dim, whose size is a different symbol in every jagged tensor.
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
    """Return each row's start in the values and each row's length, both `[rows]`."""
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


# Merging of mappings from several batches: equal values are kept, and conflicts are errors that name the key.


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values are deeply equal, including nested containers, arrays and tensors. NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, str | int) and isinstance(right, str | int):
        return left == right
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and _same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _same_array(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return set(left) == set(right) and all(same_value(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, float | np.floating) and isinstance(right, float | np.floating) and left != left:
        return bool(right != right)
    return bool(np.all(left == right))


def union_of(kind: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings. A key in both must have the same value. `kind` names the mapping in the error message."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            raise ValueError(
                f"union: {kind} {key!r} is in both with different values: {brief(left[key])} and {brief(right[key])}; "
                f"pop or rename it in one of them"
            )
    return {**left, **{key: value for key, value in right.items() if key not in left}}


def concat_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of concatenated parts. Equal values are kept, and conflicts are errors.

    `metrics` are collected. For `timing` (seconds by name), the longest time of any part is kept.
    """
    merged: dict[str, Any] = {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                continue
            if key == "timing":
                known = merged.setdefault(key, {})
                merged[key] = known | {name: max(known.get(name, 0.0), seconds) for name, seconds in value.items()}
                continue
            if key in merged and not same_value(merged[key], value):
                raise ValueError(
                    f"concat: meta_info {key!r} differs: {brief(merged[key])} before, {brief(value)} in part {number}; "
                    f"make them equal, or pop the key before concatenating"
                )
            merged.setdefault(key, value)
    metrics = [meta["metrics"] for meta in metas if meta.get("metrics") is not None]
    if metrics:
        merged["metrics"] = _concat_metrics(metrics)
    return merged


def brief(value: Any) -> str:
    """Describe a value in at most about 80 characters, for an error message."""
    if isinstance(value, torch.Tensor | np.ndarray):
        name = "jagged" if is_jagged(value) else type(value).__name__
        return f"{name} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.device != right.device or is_jagged(left) != is_jagged(right):
        return False
    if is_jagged(left):
        if not torch.equal(row_lengths(left), row_lengths(right)) or jagged_dim(left) != jagged_dim(right):
            return False
        # Equal rows may have different layouts in memory.
        left, right = packed_values(left), packed_values(right)
    if left.shape != right.shape:
        return False
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True  # two views of the same memory
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_array(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.hasobject:
        return all(map(same_value, left.flat, right.flat))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def _concat_metrics(metrics: list[Any]) -> Any:
    """Join lists of metrics to one list, or dicts of metrics to one dict with a list of all values per name."""
    if all(isinstance(value, list) for value in metrics):
        return [entry for value in metrics for entry in value]
    if not all(isinstance(value, Mapping) for value in metrics):
        kinds = sorted({type(value).__name__ for value in metrics})
        raise ValueError(f"concat: meta_info 'metrics' must be a list everywhere or a dict everywhere, not {kinds}")
    joined: dict[str, list[Any]] = {}
    for value in metrics:
        for name, entry in value.items():
            joined.setdefault(name, []).extend(entry if isinstance(entry, list) else [entry])
    return joined
