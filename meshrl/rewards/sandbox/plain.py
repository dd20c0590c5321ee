"""Conversion of plain data to JSON with exact types, and the channel between a program and its checks.

This file imports only the standard library, and sandboxes load it from its source text. Input may come from a hostile
program, so it is decoded as data and never run as code. Objects that are not plain data stay in their process, and only
their numbers are sent.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MESSAGE_BYTES = 32 << 20
EXACT_INTEGERS = 1 << 53

# Conversions of further types to JSON's types and back, by exact type, because a subclass may override anything.
Walk = Callable[[Any], Any]
TO_JSON: dict[type, tuple[str, Callable[[Any, Walk], Any]]] = {
    int: ("int", lambda value, walk: hex(value)),
    complex: ("complex", lambda value, walk: [value.real, value.imag]),
    bytes: ("bytes", lambda value, walk: value.hex()),
    bytearray: ("bytearray", lambda value, walk: value.hex()),
    tuple: ("tuple", lambda value, walk: [walk(item) for item in value]),
    set: ("set", lambda value, walk: [walk(item) for item in value]),
    frozenset: ("frozenset", lambda value, walk: [walk(item) for item in value]),
    dict: ("dict", lambda value, walk: _pairs(value, walk)),
    OrderedDict: ("OrderedDict", lambda value, walk: _pairs(value, walk)),
    defaultdict: ("defaultdict", lambda value, walk: _pairs(value, walk)),
    Counter: ("Counter", lambda value, walk: _pairs(value, walk)),
    deque: ("deque", lambda value, walk: [value.maxlen, [walk(item) for item in value]]),
    range: ("range", lambda value, walk: [value.start, value.stop, value.step]),
    Decimal: ("Decimal", lambda value, walk: str(value)),
    Fraction: ("Fraction", lambda value, walk: [hex(value.numerator), hex(value.denominator)]),
    datetime: ("datetime", lambda value, walk: value.isoformat()),
    date: ("date", lambda value, walk: value.isoformat()),
    time: ("time", lambda value, walk: value.isoformat()),
    timedelta: ("timedelta", lambda value, walk: [value.days, value.seconds, value.microseconds]),
}
FROM_JSON: dict[str, Callable[[Any, Walk], Any]] = {
    "int": lambda held, walk: int(held, 16),
    "complex": lambda held, walk: complex(*held),
    "bytes": lambda held, walk: bytes.fromhex(held),
    "bytearray": lambda held, walk: bytearray.fromhex(held),
    "tuple": lambda held, walk: tuple([walk(item) for item in held]),
    "set": lambda held, walk: {walk(item) for item in held},
    "frozenset": lambda held, walk: frozenset([walk(item) for item in held]),
    "dict": lambda held, walk: {walk(key): walk(value) for key, value in held},
    "OrderedDict": lambda held, walk: OrderedDict((walk(key), walk(value)) for key, value in held),
    "defaultdict": lambda held, walk: defaultdict(None, ((walk(key), walk(value)) for key, value in held)),
    "Counter": lambda held, walk: Counter({walk(key): walk(value) for key, value in held}),
    "deque": lambda held, walk: deque([walk(item) for item in held[1]], held[0]),
    "range": lambda held, walk: range(*held),
    "Decimal": lambda held, walk: Decimal(held),
    "Fraction": lambda held, walk: Fraction(int(held[0], 16), int(held[1], 16)),
    "datetime": lambda held, walk: datetime.fromisoformat(held),
    "date": lambda held, walk: date.fromisoformat(held),
    "time": lambda held, walk: time.fromisoformat(held),
    "timedelta": lambda held, walk: timedelta(*held),
    "namedtuple": lambda held, walk: namedtuple(str(held[0]), held[1], rename=True)(*map(walk, held[2])),
    "array": lambda held, walk: _array(*held),
}


def _pairs(value: Any, walk: Walk) -> list[list[Any]]:
    return [[walk(key), walk(item)] for key, item in value.items()]


def to_json(value: Any, other: Callable[[Any], dict[str, Any]]) -> Any:
    """Convert a value to JSON. For an object that is not plain data, `other` returns a one-entry dict or raises."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and -EXACT_INTEGERS < value < EXACT_INTEGERS):
        return value

    def walk(item: Any) -> Any:
        return to_json(item, other)

    if kind is list:
        return [walk(item) for item in value]
    if kind in TO_JSON:
        name, convert = TO_JSON[kind]
        return {name: convert(value, walk)}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        held = value.tolist()
        is_array = kind.__name__ == "ndarray" and value.dtype.kind in "biufc"
        return {"array": [value.dtype.str, to_json(held, other)]} if is_array else walk(held)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"namedtuple": [kind.__name__, list(kind._fields), [walk(item) for item in tuple(value)]]}
    return other(value)


def from_json(held: Any, other: Callable[[str, Any], Any]) -> Any:
    """Convert JSON from `to_json` back to the value. `other(name, inner)` converts entries of unknown names."""

    def walk(item: Any) -> Any:
        return from_json(item, other)

    if isinstance(held, list):
        return [walk(item) for item in held]
    if not isinstance(held, dict):
        return held
    ((name, inner),) = held.items()
    return FROM_JSON[name](inner, walk) if name in FROM_JSON else other(name, inner)


def _array(kind: str, held: Any) -> Any:
    import numpy

    def refuse(name: str, inner: Any) -> Any:
        raise ValueError(f"{name} in an array")

    array = numpy.array(from_json(held, refuse), dtype=kind)
    if array.dtype.kind not in "biufc" or (array.size == 0 and array.ndim > 1):
        raise ValueError("no array of numbers, or an empty one of more dimensions, which broadcasts to be equal to all")
    return array


class Channel:
    """One end of a socket that carries messages as JSON, one per line. `number` is its file descriptor."""

    def __init__(self, number: int):
        self.number, self.read = number, b""
        # References to the functions are kept, because a program may replace them in their modules.
        self._write, self._receive, self._dumps, self._loads = os.write, os.read, json.dumps, json.loads

    def send(self, message: Any) -> None:
        """Send a message, or raise `ValueError` if it is longer than `MESSAGE_BYTES`."""
        text = self._dumps(message).encode() + b"\n"
        if len(text) > MESSAGE_BYTES:
            raise ValueError(f"{len(text)} bytes of data are more than the {MESSAGE_BYTES} that a message may have")
        while text:
            text = text[self._write(self.number, text) :]

    def receive(self) -> Any:
        """Wait for the next message. Raise `EOFError` if the other end is gone or the message is too long."""
        pieces = [self.read]
        while b"\n" not in pieces[-1]:
            piece = self._receive(self.number, 1 << 20)
            pieces.append(piece)
            if not piece or sum(map(len, pieces)) > MESSAGE_BYTES + len(piece):
                raise EOFError("the other end is gone")
        line, _, self.read = b"".join(pieces).partition(b"\n")
        return self._loads(line)
