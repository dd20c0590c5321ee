"""DataProto: a batch of samples with tensors and Python objects, the message between controller and workers.

`batch` holds tensors (dense or jagged) whose first dim is the sample. `non_tensor_batch` holds numpy arrays (mostly of
objects) of the same length. `meta_info` holds values for the whole batch. Slices, chunks and splits are views; methods
that pick or repeat rows copy them. `to`, `union`, `rename`, `reorder` and `pop` change the object itself.

`scored_rows` finds the samples that have a score. `concat_samples` joins batches of different prompt widths.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor
from torch.utils.data import DataLoader

from meshrl.data import plain_data
from meshrl.data.columns import (
    brief,
    concat_meta,
    concat_rows,
    move_rows,
    repeat_rows,
    row,
    size_in_bytes,
    slice_rows,
    take_rows,
    union_of,
)
from meshrl.data.serialization import dumps, is_jagged, seal

logger = logging.getLogger(__name__)

# The key that marks a file as a stored DataProto, and the version of the format.
STORED_KEY, STORED_FORMAT = "dataproto", 1
# If set in meta_info, chunks may have unequal sizes, because the dispatcher pads them.
AUTO_PADDING_KEY = "_auto_padding"

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
Slice = slice  # inside DataProto that name is its method
Keys = str | Sequence[str] | None


@dataclass(eq=False)
class DataProtoItem:
    """One sample of a DataProto: its tensors without the batch dim, its objects, and the batch's meta_info."""

    batch: Any = None  # a TensorDict, or None without tensors; typed Any, because indexing it has no useful type
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of samples in three parts, which the module's docstring describes. None stands for an empty part."""

    batch: Any = None  # a TensorDict, or None without tensors; typed Any, because indexing it has no useful type
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is not None and not is_tensor_collection(self.batch):
            raise ValueError(
                f"batch is a {type(self.batch).__name__}, but must be a TensorDict or None: make a DataProto of "
                "tensors with DataProto.from_dict"
            )
        self.non_tensor_batch = _mapping("non_tensor_batch", self.non_tensor_batch)
        self.meta_info = _mapping("meta_info", self.meta_info)
        self.check_consistency()

    # --- making ---

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a DataProto from tensors and from arrays or lists of objects, with samples as the first dim of each.

        A list becomes a 1-D array of its entries, of any type. With `num_batch_dims` > 1 that many leading dims of the
        tensors are batch dims of the TensorDict. With `auto_padding`, `chunk` may return chunks of unequal size.
        """
        if num_batch_dims < 1 or (num_batch_dims > 1 and non_tensors):
            raise ValueError(f"num_batch_dims is {num_batch_dims}: it must be 1, or more if there are no non_tensors")
        tensors, meta_info = _mapping("tensors", tensors), _mapping("meta_info", meta_info)
        if auto_padding:
            meta_info = {**meta_info, AUTO_PADDING_KEY: True}
        batch = _tensordict(tensors, num_batch_dims) if tensors else None
        arrays = {key: _as_array(key, value) for key, value in _mapping("non_tensors", non_tensors).items()}
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Build a DataProto from a collate function's dict: tensors go to `batch`, arrays to `non_tensor_batch`."""
        for key, value in _mapping("data", data).items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ValueError(
                    f"field {key!r} is a {type(value).__name__}, but must be a torch.Tensor or numpy array"
                )
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all parts, which must hold the same fields.

        Equal values of meta_info are kept, and different values are an error. Exceptions are `metrics` and `timing`:
        `metrics` are collected (lists are joined; dicts become one list per name), and the longest `timing` is kept.
        """
        if not data:
            raise ValueError("concat needs at least one DataProto, and the list is empty")
        without = [number for number, part in enumerate(data) if part.batch is None]
        if without and len(without) < len(data):
            raise ValueError(f"cannot concatenate: parts {without} of {len(data)} have no tensors (batch is None)")
        first = data[0]
        meta_info = concat_meta([part.meta_info for part in data])
        arrays = concat_rows([part.non_tensor_batch for part in data])
        if first.batch is None:
            return type(first)(None, arrays, meta_info)
        fields = concat_rows([part._fields() for part in data])
        batch = TensorDict(fields, [sum(map(len, data)), *first.batch.batch_size[1:]], device=first.batch.device)
        return type(first)(batch, arrays, meta_info)

    # --- looking ---

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __repr__(self) -> str:
        fields = [f"{key}: {brief(value)}" for key, value in [*self._fields().items(), *self.non_tensor_batch.items()]]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(fields)}; meta_info: {sorted(self.meta_info)})"

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: Slice | RowIndex) -> DataProto: ...
    def __getitem__(self, item: Any) -> DataProto | DataProtoItem:
        """Return one row as a DataProtoItem, a slice as views, or copied rows for a list, array, tensor or mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | tuple | range | np.ndarray | torch.Tensor) and np.ndim(item) > 0:
            return self.select_idxs(item)
        if isinstance(item, bool | np.bool_) or not hasattr(item, "__index__"):
            raise TypeError(
                f"a DataProto is indexed by int, slice, list, array, tensor or mask, not {type(item).__name__}"
            )
        number = item.__index__()
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a DataProto with {len(self)} rows")
        number %= len(self)
        batch = None
        if self.batch is not None:
            rows = {key: row(value, number) for key, value in self._fields().items()}
            batch = TensorDict(rows, self.batch.batch_size[1:], device=self.batch.device)
        objects = {key: value[number] for key, value in self.non_tensor_batch.items()}
        return DataProtoItem(batch, objects, dict(self.meta_info))

    def check_consistency(self) -> None:
        """Raise `ValueError` with the field and the sizes if the fields differ in their number of rows."""
        first, rows = "", 0
        if self.batch is not None:
            batch_size = self.batch.batch_size
            if not batch_size or (len(batch_size) > 1 and self.non_tensor_batch):
                limit = "one dim, beside non_tensor_batch" if batch_size else "at least one dim, the samples"
                raise ValueError(f"batch has batch_size {list(batch_size)}, but must have {limit}")
            first, rows = "batch", batch_size[0]
            for key, value in self.batch.items():
                if value.shape[0] != rows:
                    raise ValueError(f"field {key!r} has {value.shape[0]} rows, but 'batch' has {rows}")
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise ValueError(f"non_tensor_batch {key!r} is a {type(array).__name__}, but must be an array of rows")
            if not first:
                first, rows = key, len(array)
            if len(array) != rows:
                raise ValueError(f"field {key!r} has {len(array)} rows, but {first!r} has {rows}")

    def print_size(self, prefix: str = "") -> dict[str, int]:
        """Log and return the size in bytes of the tensors and of the serialised non-tensor arrays."""
        data, buffers = dumps(self.non_tensor_batch)
        sizes = {
            "batch": sum(map(size_in_bytes, self._fields().values())),
            "non_tensor_batch": len(data) + sum(view.nbytes for view in buffers) if self.non_tensor_batch else 0,
        }
        text = ", ".join(f"{name} {size / 2**20:.3f} MiB" for name, size in sizes.items())
        logger.info("%s%d rows: %s", f"{prefix}: " if prefix else "", len(self), text)
        return sizes

    def is_padding_enabled(self) -> bool:
        """Return whether `chunk` may return chunks of unequal size, as with `auto_padding=True`."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    # --- picking rows ---

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Return the rows `start:end:step` with Python's meaning, as views. A negative step copies the rows."""
        first, stop, stride = slice(start, end, step).indices(len(self))
        if stride < 0:
            return self.select_idxs(range(first, stop, stride))
        return self._with_rows(len(range(first, stop, stride)), lambda fields: slice_rows(fields, first, stop, stride))

    def select_idxs(self, idxs: RowIndex) -> DataProto:
        """Return copies of the rows in `idxs`: row numbers in any order, or a boolean mask over all rows.

        A negative number counts from the end.
        """
        index = _row_numbers(idxs, len(self))
        return self._with_rows(len(index), lambda fields: take_rows(fields, index))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into `chunks` equal parts, as views. Without padding enabled, an indivisible number of rows raises."""
        count = len(self)
        if chunks < 1:
            raise ValueError(f"chunk: the number of chunks must be at least 1, not {chunks}")
        if count % chunks and not self.is_padding_enabled():
            raise ValueError(
                f"chunk: {count} rows are not divisible into {chunks} equal chunks; "
                f"pad them first with pad_dataproto_to_divisor(data, {chunks})"
            )
        bounds = [number * count // chunks for number in range(chunks + 1)]
        return [self.slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Split into parts of `split_size` rows, as views. The last part may be shorter."""
        if split_size < 1:
            raise ValueError(f"split: split_size must be at least 1, not {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat every row `repeat_times` times. The order of rows a, b is a a b b if interleaved, else a b a b."""
        if repeat_times < 1:
            raise ValueError(f"repeat: repeat_times must be at least 1, not {repeat_times}")
        return self._with_rows(len(self) * repeat_times, lambda fields: repeat_rows(fields, repeat_times, interleave))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Split each row into `n_split` rows: cut fields in `split_keys` along their second dim and repeat the others.

        The input rows hold samples that must not be shuffled apart, such as a chosen and a rejected response.
        """
        split = set(split_keys or ())
        self._require(split, {*self._fields(), *self.non_tensor_batch}, "unfold_column_chunks")
        repeated = self.repeat(n_split, interleave=True)
        for fields, target in ((self._fields(), repeated.batch), (self.non_tensor_batch, repeated.non_tensor_batch)):
            for key in split & set(fields):
                assert target is not None
                target[key] = _unfold(key, fields[key], n_split)
        return repeated

    def reorder(self, indices: RowIndex) -> None:
        """Reorder the rows in place by `indices`, a permutation of all row numbers."""
        index = _row_numbers(indices, len(self))
        if len(index) != len(self) or not torch.equal(index.sort().values, torch.arange(len(self))):
            raise ValueError(
                f"reorder: {len(index)} indices, {len(index.unique())} of them different, are no permutation of "
                f"{len(self)} rows; to drop or repeat rows use select_idxs"
            )
        ordered = self.select_idxs(index)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Iterate over mini-batches of `mini_batch_size` rows for `epochs` epochs.

        `dataloader_kwargs` are passed to torch's DataLoader. With `{"shuffle": True}` each epoch has another order,
        which `seed` makes repeatable.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(
                f"make_iterator: {len(self)} rows are not divisible by mini_batch_size ({mini_batch_size})"
            )
        if not len(self):
            return iter(())
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers: Any = range(len(self))
        loader = DataLoader(numbers, mini_batch_size, collate_fn=list, generator=generator, **(dataloader_kwargs or {}))
        return (self._rows_of(idxs) for _ in range(epochs) for idxs in loader)

    # --- picking and joining fields ---

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a DataProto with the named fields (None: all of that part). Memory is shared unless `deepcopy`."""
        batch = self.batch
        if batch_keys is not None:
            fields = _picked(self._fields(), batch_keys, "select: batch")
            batch = None if batch is None else TensorDict(fields, batch.batch_size, device=batch.device)
        elif batch is not None:
            batch = batch.copy()
        arrays = _picked(self.non_tensor_batch, non_tensor_batch_keys, "select: non_tensor_batch")
        selected = type(self)(batch, arrays, _picked(self.meta_info, meta_info_keys, "select: meta_info"))
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove the named fields (None: no field of that part) and return them as another DataProto."""
        fields = _picked(self._fields(), batch_keys or (), "pop: batch")
        arrays = _picked(self.non_tensor_batch, non_tensor_batch_keys or (), "pop: non_tensor_batch")
        meta_info = _picked(self.meta_info, meta_info_keys or (), "pop: meta_info")
        batch = None
        if self.batch is not None and fields:
            batch = TensorDict(fields, self.batch.batch_size, device=self.batch.device)
            self.batch = self.batch.exclude(*fields)
        self.non_tensor_batch = {key: value for key, value in self.non_tensor_batch.items() if key not in arrays}
        for key in meta_info:
            del self.meta_info[key]
        return type(self)(batch, arrays, meta_info)

    def union(self, other: DataProto) -> DataProto:
        """Add the fields and meta_info of `other` in place, and return self. A key in both must have equal values."""
        if len(self) != len(other) and not (self._is_empty() or other._is_empty()):
            raise ValueError(f"union: {len(self)} rows here, {len(other)} rows in the other; they must be equal")
        fields = union_of("batch field", self._fields(), other._fields())
        arrays = union_of("non_tensor_batch field", self.non_tensor_batch, other.non_tensor_batch)
        meta_info = union_of("meta_info", self.meta_info, other.meta_info)
        source = self.batch if self.batch is not None else other.batch
        batch = None if source is None else TensorDict(fields, source.batch_size, device=source.device)
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta_info
        return self

    def rename(self, old_keys: Keys = None, new_keys: Keys = None) -> DataProto:
        """Rename fields of either part in place, and return self. The keys are two names or two equally long lists."""
        old, new = _key_list(old_keys), _key_list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old keys {old} but {len(new)} new keys {new}")
        present = [*self._fields(), *self.non_tensor_batch]
        self._require(set(old), set(present), "rename")
        names = dict(zip(old, new, strict=True))
        renamed = [names.get(key, key) for key in present]
        if twice := sorted({key for key in renamed if renamed.count(key) > 1}):
            raise ValueError(f"rename: {names} would give several fields the name {twice}")
        if self.batch is not None:
            fields = {names.get(key, key): value for key, value in self._fields().items()}
            self.batch = TensorDict(fields, self.batch.batch_size, device=self.batch.device)
        self.non_tensor_batch = {names.get(key, key): value for key, value in self.non_tensor_batch.items()}
        return self

    # --- moving ---

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors to `device` in place, and return self."""
        if self.batch is not None:
            self.batch = TensorDict(move_rows(self._fields(), device), self.batch.batch_size, device=device)
        return self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write to one file of plain data atomically. Raise `ValueError` for a value that is not plain data.

        Tensors are stored and loaded as CPU tensors. A subclass is loaded as a DataProto.
        """
        batch = None if self.batch is None else _plain_batch(self.batch)
        parts = {"batch": batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        plain_data.save({STORED_KEY: STORED_FORMAT, **parts}, Path(filepath), type(self).__name__)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Read a file that `save_to_disk` wrote. No code in the file is run."""
        try:
            found = plain_data.load(Path(filepath))
        except FileNotFoundError:
            raise
        except ValueError as error:
            raise ValueError(f"{filepath} is no whole file of DataProto.save_to_disk: {error}") from error
        if not isinstance(found, dict) or found.get(STORED_KEY) != STORED_FORMAT:
            raise ValueError(f"{filepath} holds a {type(found).__name__}, not a DataProto of format {STORED_FORMAT}")
        batch = None if found["batch"] is None else _stored_batch(found["batch"])
        return DataProto(batch, found["non_tensor_batch"], found["meta_info"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Envelopes let every pickler with out-of-band buffers (plain, Ray's) transfer the tensors' memory directly.
        batch = None if self.batch is None else (seal(self._fields()), tuple(self.batch.batch_size))
        return _rebuild, (type(self), batch, self.non_tensor_batch, self.meta_info)

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        return type(self)(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    # --- inner helpers ---

    def _is_empty(self) -> bool:
        return self.batch is None and not self.non_tensor_batch

    def _fields(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _with_rows(self, count: int, pick: Callable[[Mapping[str, Any]], dict[str, Any]]) -> DataProto:
        """Return a DataProto of `count` rows, whose fields `pick` computes from this object's fields."""
        batch = None
        if self.batch is not None:
            batch = TensorDict(pick(self._fields()), [count, *self.batch.batch_size[1:]], device=self.batch.device)
        return type(self)(batch, pick(self.non_tensor_batch), dict(self.meta_info))

    def _rows_of(self, idxs: list[int]) -> DataProto:
        consecutive = idxs == list(range(idxs[0], idxs[0] + len(idxs)))
        return self.slice(idxs[0], idxs[0] + len(idxs)) if consecutive else self.select_idxs(idxs)

    @staticmethod
    def _require(keys: set[str], present: set[str], what: str) -> None:
        if missing := sorted(keys - present):
            raise KeyError(f"{what}: no field {missing}; there are {sorted(present)}")


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append repeated rows until the length is divisible. Return the batch and the number of added rows.

    The rows are repeated from the first row on.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, not {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows, which `pad_dataproto_to_divisor` added."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot drop {pad_size} rows of padding from {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def _mapping(name: str, value: Any) -> Any:
    """Return the mapping itself, or an empty dict for None. Raise `ValueError` for any other type."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, but must be a dict or None")
    return value


def _plain_batch(batch: TensorDict) -> dict[str, Any]:
    """Convert a TensorDict, and nested TensorDicts, to types that `plain_data` can store."""
    fields = {key: _plain_batch(value) if isinstance(value, TensorDict) else value for key, value in batch.items()}
    return {"batch_size": list(batch.batch_size), "fields": fields}


def _stored_batch(stored: Mapping[str, Any]) -> TensorDict:
    fields = {
        key: _stored_batch(value) if isinstance(value, dict) else value for key, value in stored["fields"].items()
    }
    return TensorDict(fields, stored["batch_size"])


def _rebuild(cls: type[DataProto], batch: Any, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]) -> DataProto:
    return cls(None if batch is None else TensorDict(batch[0], batch[1]), arrays, meta_info)


def _tensordict(tensors: Mapping[str, torch.Tensor], batch_dims: int) -> TensorDict:
    sizes: dict[str, list[int]] = {}
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor | TensorDict):
            raise ValueError(f"tensor field {key!r} is a {type(value).__name__}; pass it in non_tensors or as a tensor")
        if value.ndim < batch_dims or (batch_dims > 1 and is_jagged(value)):
            raise ValueError(f"tensor field {key!r} has shape {list(value.shape)}, too few dense dims for {batch_dims}")
        sizes[key] = list(value.shape[:batch_dims])
    first, expected = next(iter(sizes.items()))
    for key, size in sizes.items():
        if size != expected:
            raise ValueError(
                f"tensor field {key!r} has batch size {size}, but {first!r} has {expected}: all need the same rows"
            )
    return TensorDict(dict(tensors), expected)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Return a 1-D array of these objects.

    `np.array` would return a 2-D array if the objects are lists of equal length.
    """
    return np.fromiter(values, dtype=object, count=len(values))


def columns_of(data: DataProto, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the non-tensor columns with these names. Names that the batch does not have are skipped."""
    return {name: data.non_tensor_batch[name] for name in names if name in data.non_tensor_batch}


def _as_array(key: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return object_array(value)
    raise ValueError(f"non_tensors field {key!r} is a {type(value).__name__}, but must be a list or a numpy array")


def _row_numbers(idxs: Any, count: int) -> torch.Tensor:
    """Convert any kind of index to row numbers, int64 on the CPU. Check the length of a mask and all bounds."""
    index = idxs.detach().cpu() if isinstance(idxs, torch.Tensor) else torch.from_numpy(np.array(idxs))
    if index.ndim != 1:
        raise ValueError(f"rows are picked by a 1-D index, not one of shape {list(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise ValueError(f"the mask has {len(index)} entries, but there are {count} rows")
        return index.nonzero().squeeze(1)
    if index.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if index.is_floating_point() or index.is_complex():
        raise TypeError(f"rows are picked by integers or booleans, not {index.dtype}")
    index = index.long()
    low, high = int(index.min()), int(index.max())
    if low < -count or high >= count:
        raise IndexError(f"row {high if high >= count else low} of a DataProto with {count} rows")
    return torch.where(index < 0, index + count, index)


def _unfold(key: str, value: Any, n_split: int) -> Any:
    if is_jagged(value) or value.ndim < 2 or value.shape[1] % n_split:
        size = "is jagged" if is_jagged(value) else f"has shape {list(value.shape)}"
        raise ValueError(f"unfold_column_chunks: field {key!r} {size}; its second dim must be divisible by {n_split}")
    return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])


def _picked(values: Mapping[str, Any], keys: Sequence[str] | None, what: str) -> dict[str, Any]:
    if keys is None:
        return dict(values)
    if missing := [key for key in keys if key not in values]:
        raise KeyError(f"{what} has no {missing}; it has {sorted(values)}")
    return {key: values[key] for key in keys}


def _key_list(keys: Keys) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or ())


# Samples of a batch that have a score.

# The column that marks samples whose reward failed. These samples are not trained on.
DROPPED = "reward_dropped"


def scored_rows(batch: DataProto) -> np.ndarray:
    """Return a mask `[samples]` (bool) of the samples that have a score.

    A sample that is dropped because its reward failed has a 0 that is not a score.
    """
    dropped = batch.non_tensor_batch.get(DROPPED)
    return np.ones(len(batch), dtype=bool) if dropped is None else ~dropped.astype(bool)


# Joining of samples of several generations, with prompts of unequal width and different columns.

# Fields that begin with the prompt, padded on the left, and the value of their padding (None: the pad token).
LEFT_PADDED = {"prompts": None, "input_ids": None, "attention_mask": 0, "position_ids": 0}


def concat_samples(parts: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """Concatenate the samples of all parts. Prompts are padded to one width; missing columns are filled with None."""
    width = max(part.batch["prompts"].shape[1] for part in parts)
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    return DataProto.concat([_with_width(part, width, list(columns), pad_token_id) for part in parts])


def _with_width(part: DataProto, width: int, columns: Sequence[str], pad_token_id: int) -> DataProto:
    more = width - part.batch["prompts"].shape[1]
    tensors = dict(part.batch.items())
    for name, fill in LEFT_PADDED.items():
        if more and name in tensors:
            tensors[name] = _padded_left(tensors[name], more, pad_token_id if fill is None else fill)
    nothing = np.full(len(part), None, dtype=object)
    return DataProto.from_dict(tensors, {name: part.non_tensor_batch.get(name, nothing) for name in columns})


def _padded_left(values: Tensor, more: int, fill: int) -> Tensor:
    return torch.cat([values.new_full((len(values), more), fill), values], 1)
