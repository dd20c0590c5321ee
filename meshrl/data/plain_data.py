"""Serialisation of values as plain data: exact, and read without running code, unlike a pickle.

A value becomes a tree of JSON types. A type that JSON does not have becomes an object with the key `$` for its kind:

    {"$": "tuple", "of": [1, 2]}    {"$": "float", "bits": "7ff8000000000000"}    {"$": "tensor", "at": "0"}

The bytes of tensors and arrays are stored separately from the tree. In a file (`save`, `load`) they are tensors of a
safetensors file, in which the tree is one more tensor. In JSON (`to_json`, `from_json`) they are base64 texts.
Supported types are None, bools, numbers, strings, bytes, lists, tuples, dicts, sets, dates, decimals, UUIDs, numpy's
scalars and arrays (also of objects) and torch's tensors (dense and jagged). Any other type is refused, with its name
and its place in the value. Subclasses are refused too, because they would be read as their base type. Tensors are read
as CPU tensors without gradient history.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor

from meshrl.data.serialization import (
    DTYPE_NAMES,
    byte_view,
    is_jagged,
    is_plain_dense,
    jagged_dim,
    open_tensors,
    save_tensors,
)
from meshrl.files import writing_whole

FORMAT = "1"
# The entry in a file's header with the format's version, and the name of the tensor with the tree as JSON bytes.
FORMAT_KEY = "meshrl_plain_data"
TREE = "tree"
KIND = "$"
# Larger integers are written in base 16, because Python reads at most 4,300 decimal digits.
LARGE = 1 << 4096
# The least length at which a list of numbers of one type is stored as a tensor. Token ids and log-probs are long lists.
MANY = 64
# numpy's kinds of dtypes whose arrays are plain bytes: no objects and no records.
ARRAY_KINDS = "biufcSUmM"
# The first byte of a pickle of Python 3.
PICKLE_START = b"\x80"

Tree = Any
Fetch = Callable[[str], Tensor]


class NotPlainError(ValueError):
    """The error for a value that cannot be written as plain data, with its type and its place."""


def save(value: Any, file: Path, where: str = "") -> None:
    """Write a value to one file atomically. Raise `NotPlainError` for a part that is not plain data.

    `where` names the value in the error message, before the path to the part.
    """
    tree, kept = _written(value, where)
    tensors = {name: t if t.dtype in DTYPE_NAMES else _bytes_of(t) for name, t in kept.items()}
    text = json.dumps(tree, separators=(",", ":")).encode()
    tensors[TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with writing_whole(file, on_disk=False) as aside:  # checkpoints flush all their files to disk themselves
        save_tensors(tensors, aside, {FORMAT_KEY: FORMAT})


def load(file: Path) -> Any:
    """Return the value in a file that `save` wrote. Raise `ValueError` for another file, such as a pickle."""
    if is_pickle(file):
        raise ValueError(
            f"'{file}' is a pickle, as files were before: 'meshrl convert {file} NEW --trust-pickle' makes plain data "
            "of it, and runs what it says: only of files that you trust"
        )
    with open_tensors(file) as tensors:
        about = tensors.metadata() or {}
        if about.get(FORMAT_KEY) != FORMAT:
            held = f"format {about[FORMAT_KEY]}" if FORMAT_KEY in about else "tensors alone"
            raise ValueError(f"'{file}' holds {held}, and no plain data of format {FORMAT}")

        def fetch(name: str) -> Tensor:
            found: Tensor = tensors.get_tensor(name)
            return found.clone()  # a copy, because the file's memory map would break if the file were truncated

        try:
            tree = json.loads(tensors.get_tensor(TREE).numpy().tobytes())
            return _Reader(fetch).read(tree)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(f"'{file}' cannot be read ({error}): it is damaged") from error


def is_pickle(file: Path) -> bool:
    """Return whether a file begins like a pickle and not like a safetensors file."""
    with file.open("rb") as stream:
        start = stream.read(12)
    # A safetensors file begins with eight bytes for the header's length, followed by the header's opening brace.
    return start.startswith(PICKLE_START) and start[8:9] != b"{"


def to_json(value: Any, where: str = "") -> Tree:
    """Return the value as JSON types, with the bytes of tensors as base64 texts."""
    tree, kept = _written(value, where)
    return {
        "tree": tree,
        "bytes": {n: base64.b64encode(_bytes_of(t).numpy().tobytes()).decode() for n, t in kept.items()},
    }


def from_json(tree: Tree) -> Any:
    """Return the value that `to_json` converted. Raise `ValueError` if the tree cannot be read."""

    def fetch(name: str) -> Tensor:
        content = bytearray(base64.b64decode(tree["bytes"][name], validate=True))
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    try:
        return _Reader(fetch).read(tree["tree"])
    except Exception as error:
        raise ValueError(f"this is no plain data of ours: {error}") from error


def _written(value: Any, where: str) -> tuple[Tree, dict[str, Tensor]]:
    """Return the tree of a value, and the tensors to which the tree refers by name."""
    writer = _Writer()
    try:
        return writer.tree(value, where), writer.tensors
    except RecursionError:
        raise NotPlainError(f"{where or 'the value'} contains itself, or is nested too deeply") from None


class _Writer:
    """A converter of values to trees, which collects the tensors. A tensor that occurs twice is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def _store(self, tensor: Tensor) -> str:
        name = self._names.setdefault(id(tensor), str(len(self._names)))
        self.tensors[name] = tensor
        return name

    def tree(self, value: Any, where: str) -> Tree:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _WRITERS:
            return _WRITERS[kind](self, value, where)
        if isinstance(value, np.generic):
            return self._scalar(value, where)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        raise NotPlainError(
            f"{where or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which is no plain data: "
            "use numbers, texts, bytes, lists, tuples, dicts, sets, dates, numpy arrays and torch tensors"
        )

    def _int(self, value: int, where: str) -> Tree:
        return value if -LARGE < value < LARGE else {KIND: "int", "hex": hex(value)}

    def _float(self, value: float, where: str) -> Tree:
        return value if math.isfinite(value) else {KIND: "float", "bits": struct.pack(">d", value).hex()}

    def _text(self, value: str, where: str) -> Tree:
        try:
            value.encode()
        except UnicodeEncodeError:  # surrogate halves, which JSON would join to characters
            return {KIND: "text", "points": list(map(ord, value))}
        return value

    def _bytes(self, value: bytes | bytearray, where: str) -> Tree:
        own = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {KIND: type(value).__name__, "at": self._store(own)}

    def _list(self, value: list[Any], where: str) -> Tree:
        kinds = set(map(type, value)) if len(value) >= MANY else set()
        if kinds == {float}:
            return {KIND: "numbers", "dtype": "float64", "at": self._store(torch.tensor(value, dtype=torch.float64))}
        if kinds == {int} and -(2**63) <= min(value) <= max(value) < 2**63:
            return {KIND: "numbers", "dtype": "int64", "at": self._store(torch.tensor(value, dtype=torch.int64))}
        return [self.tree(part, f"{where}[{number}]") for number, part in enumerate(value)]

    def _many(self, value: Any, where: str) -> Tree:
        return {KIND: type(value).__name__, "of": self._list(list(value), where)}

    def _dict(self, value: Mapping[Any, Any], where: str) -> Tree:
        if KIND in value or not set(map(type, value)) <= {str}:
            return {KIND: "dict", "of": self._pairs(value, where)}
        if all(map(str.isascii, value)):
            return {name: self.tree(part, f"{where}[{name!r}]") for name, part in value.items()}
        return {KIND: "dict", "of": self._pairs(value, where)}

    def _pairs(self, value: Mapping[Any, Any], where: str) -> Tree:
        return [
            [self.tree(key, f"{where} key {key!r:.80}"), self.tree(part, f"{where}[{key!r:.80}]")]
            for key, part in value.items()
        ]

    def _ordered(self, value: OrderedDict[Any, Any], where: str) -> Tree:
        versions = vars(value).get("_metadata")  # the versions of modules in a state_dict
        if set(vars(value)) - {"_metadata"}:
            raise NotPlainError(f"{where or 'the value'} is an OrderedDict with attributes of its own: use a dict")
        return {KIND: "ordered", "of": self._pairs(value, where), "versions": self.tree(versions, where)}

    def _moment(self, value: Any, where: str) -> Tree:
        zone = value.tzinfo
        bare = value.replace(tzinfo=None, fold=0).isoformat()
        if isinstance(zone, ZoneInfo) and zone.key:
            return {KIND: type(value).__name__, "iso": bare, "fold": value.fold, "zone": zone.key}
        if type(zone) is datetime.timezone and repr(zone) == repr(datetime.timezone(offset := zone.utcoffset(None))):
            return {KIND: type(value).__name__, "iso": bare, "fold": value.fold, "offset": offset.total_seconds()}
        if zone is not None:
            raise NotPlainError(
                f"{where or 'the value'} has the time zone {zone!r}: use zoneinfo, or datetime.timezone"
            )
        return {KIND: type(value).__name__, "iso": bare, "fold": value.fold}

    def _date(self, value: datetime.date, where: str) -> Tree:
        return {KIND: "date", "iso": value.isoformat()}

    def _duration(self, value: datetime.timedelta, where: str) -> Tree:
        return {KIND: "timedelta", "of": [value.days, value.seconds, value.microseconds]}

    def _decimal(self, value: decimal.Decimal, where: str) -> Tree:
        return {KIND: "decimal", "text": str(value)}

    def _uuid(self, value: uuid.UUID, where: str) -> Tree:
        return {KIND: "uuid", "hex": value.hex}

    def _complex(self, value: complex, where: str) -> Tree:
        return {KIND: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}

    def _dtype(self, value: torch.dtype, where: str) -> Tree:
        return {KIND: "dtype", "name": _name_of(value)}

    def _scalar(self, value: np.generic, where: str) -> Tree:
        if value.dtype.kind not in ARRAY_KINDS or type(value) is not value.dtype.type:
            raise NotPlainError(f"{where or 'the value'} is a {type(value)} of {value.dtype}, which is no plain data")
        return {KIND: "scalar", "dtype": value.dtype.str, "bytes": value.tobytes().hex()}

    def _array(self, value: np.ndarray, where: str) -> Tree:
        shape = list(value.shape)
        if value.dtype == object:
            parts = value.reshape(-1).tolist()
            return {KIND: "objects", "shape": shape, "of": self._list(parts, where)}
        if value.dtype.kind not in ARRAY_KINDS:
            raise NotPlainError(f"{where or 'the value'} is an array of {value.dtype}, which is no plain data")
        content = bytearray(value.tobytes())
        own = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return {KIND: "array", "dtype": value.dtype.str, "shape": shape, "at": self._store(own)}

    def _tensor(self, value: Any, where: str) -> Tree:
        if is_jagged(value):
            holes = value.lengths()
            parts = {
                "values": self._tensor(value.values().detach(), where),
                "offsets": self._tensor(value.offsets(), where),
                "lengths": None if holes is None else self._tensor(holes, where),
            }
            return {KIND: "jagged", **parts, "dim": jagged_dim(value)}
        if not is_plain_dense(value):
            raise NotPlainError(
                f"{where or 'the value'} is a {type(value).__name__} of {value.layout}, no plain tensor"
            )
        own = value.resolve_neg() if value.is_neg() else value
        return {KIND: "tensor", "dtype": _name_of(value.dtype), "shape": list(value.shape), "at": self._store(own)}


_WRITERS: dict[type, Callable[[_Writer, Any, str], Tree]] = {
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._text,
    bytes: _Writer._bytes,
    bytearray: _Writer._bytes,
    list: _Writer._list,
    tuple: _Writer._many,
    set: _Writer._many,
    frozenset: _Writer._many,
    dict: _Writer._dict,
    OrderedDict: _Writer._ordered,
    datetime.datetime: _Writer._moment,
    datetime.time: _Writer._moment,
    datetime.date: _Writer._date,
    datetime.timedelta: _Writer._duration,
    decimal.Decimal: _Writer._decimal,
    uuid.UUID: _Writer._uuid,
    complex: _Writer._complex,
    torch.dtype: _Writer._dtype,
    np.ndarray: _Writer._array,
}


class _Reader:
    """A converter of trees to values. A tensor that occurs twice becomes one tensor."""

    def __init__(self, fetch: Fetch):
        self._fetch = fetch
        self._tensors: dict[tuple[Any, ...], Tensor] = {}

    def read(self, tree: Tree) -> Any:
        if isinstance(tree, list):
            return [self.read(part) if isinstance(part, list | dict) else part for part in tree]
        if not isinstance(tree, dict):
            return tree
        if KIND not in tree:
            return {name: self.read(part) for name, part in tree.items()}
        kind = tree[KIND]
        if kind not in _READERS:
            raise ValueError(f"it holds a {kind!r}, which this version does not know")
        return _READERS[kind](self, tree)

    def _pairs(self, tree: Tree) -> list[tuple[Any, Any]]:
        return [(self.read(key), self.read(part)) for key, part in tree["of"]]

    def _ordered(self, tree: Tree) -> OrderedDict[Any, Any]:
        found = OrderedDict(self._pairs(tree))
        if tree["versions"] is not None:
            vars(found)["_metadata"] = self.read(tree["versions"])
        return found

    def _bytes(self, tree: Tree) -> bytes:
        return self._fetch(tree["at"]).numpy().tobytes()

    def _numbers(self, tree: Tree) -> list[Any]:
        found = self._fetch(tree["at"])
        return found.view(_type_named(tree["dtype"])).tolist()

    def _moment(self, kind: Any, tree: Tree) -> Any:
        zone: datetime.tzinfo | None = None
        if "zone" in tree:
            zone = ZoneInfo(tree["zone"])
        elif "offset" in tree:
            zone = datetime.timezone(datetime.timedelta(seconds=tree["offset"]))
        return kind.fromisoformat(tree["iso"]).replace(tzinfo=zone, fold=tree["fold"])

    def _scalar(self, tree: Tree) -> Any:
        dtype, content = _array_type(tree["dtype"]), bytes.fromhex(tree["bytes"])
        return np.frombuffer(content, dtype)[0] if dtype.itemsize else dtype.type()

    def _array(self, tree: Tree) -> np.ndarray:
        dtype, shape = _array_type(tree["dtype"]), tuple(map(int, tree["shape"]))
        if not dtype.itemsize or not math.prod(shape):
            return np.zeros(shape, dtype)
        content = self._fetch(tree["at"]).numpy().tobytes()
        return np.frombuffer(bytearray(content), dtype).reshape(shape)

    def _objects(self, tree: Tree) -> np.ndarray:
        parts = self.read(tree["of"])
        return np.fromiter(parts, dtype=object, count=len(parts)).reshape(tree["shape"])

    def _tensor(self, tree: Tree) -> Tensor:
        key = tree["at"], tree["dtype"], tuple(tree["shape"])
        if key not in self._tensors:
            dtype, found = _type_named(tree["dtype"]), self._fetch(tree["at"])
            if found.dtype != dtype:
                found = found.view(dtype) if found.numel() else torch.empty(0, dtype=dtype)
            self._tensors[key] = found.view(tuple(map(int, tree["shape"])))
        return self._tensors[key]

    def _jagged(self, tree: Tree) -> Tensor:
        holes = None if tree["lengths"] is None else self._tensor(tree["lengths"])
        values, offsets = self._tensor(tree["values"]), self._tensor(tree["offsets"])
        return torch.nested.nested_tensor_from_jagged(values, offsets, holes, jagged_dim=int(tree["dim"]))


_READERS: dict[str, Callable[[_Reader, Tree], Any]] = {
    "int": lambda reader, tree: int(tree["hex"], 16),
    "float": lambda reader, tree: struct.unpack(">d", bytes.fromhex(tree["bits"]))[0],
    "complex": lambda reader, tree: complex(*struct.unpack(">dd", bytes.fromhex(tree["bits"]))),
    "text": lambda reader, tree: "".join(map(chr, tree["points"])),
    "bytes": _Reader._bytes,
    "bytearray": lambda reader, tree: bytearray(reader._bytes(tree)),
    "tuple": lambda reader, tree: tuple(reader.read(tree["of"])),
    "numbers": lambda reader, tree: reader._numbers(tree),
    "set": lambda reader, tree: set(reader.read(tree["of"])),
    "frozenset": lambda reader, tree: frozenset(reader.read(tree["of"])),
    "dict": lambda reader, tree: dict(reader._pairs(tree)),
    "ordered": _Reader._ordered,
    "datetime": lambda reader, tree: reader._moment(datetime.datetime, tree),
    "time": lambda reader, tree: reader._moment(datetime.time, tree),
    "uuid": lambda reader, tree: uuid.UUID(hex=tree["hex"]),
    "date": lambda reader, tree: datetime.date.fromisoformat(tree["iso"]),
    "timedelta": lambda reader, tree: datetime.timedelta(*tree["of"]),
    "decimal": lambda reader, tree: decimal.Decimal(tree["text"]),
    "dtype": lambda reader, tree: _type_named(tree["name"]),
    "scalar": _Reader._scalar,
    "array": _Reader._array,
    "objects": _Reader._objects,
    "tensor": _Reader._tensor,
    "jagged": _Reader._jagged,
}


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.from_numpy(byte_view(tensor))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {name!r}")
    return dtype


def _array_type(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"{name!r} is no type of plain arrays")
    return dtype
