"""Merging what several batches say of the same key: equal values are kept, conflicts are errors that name the key."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from meshrl.data.rows import packed_values, row_lengths
from meshrl.data.serialize import is_jagged, jagged_dim


def same_value(left: Any, right: Any) -> bool:
    """Whether two values are equal through and through: nested containers, arrays and tensors too; NaN equals NaN."""
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
    """Both mappings in one; a key in both must hold the same value. `kind` says in the error what the keys are of."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            raise ValueError(
                f"union: {kind} {key!r} is in both with different values: {brief(left[key])} and {brief(right[key])}; "
                f"pop or rename it in one of them"
            )
    return {**left, **{key: value for key, value in right.items() if key not in left}}


def concat_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta_info of concatenated parts: equal values are kept, conflicts are errors.

    `metrics` are collected; of `timing`, seconds by name, the slowest part counts.
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
    """A value in at most about 80 characters, for an error message."""
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
        # equal rows may lie differently in memory
        left, right = packed_values(left), packed_values(right)
    if left.shape != right.shape:
        return False
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True  # the same memory, seen through two views
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
    """Lists are joined end to end; dicts become one dict in which each name holds the list of all its values."""
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
