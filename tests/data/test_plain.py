"""plain: every value comes back as it was, to the bit and with its type, and what a file holds is never run."""

import datetime
import decimal
import enum
import json
import math
import pickle
import random
import struct
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.data import plain_data

UTC = datetime.UTC
NAN_WITH_SIGN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**200),
    10**5000,
    0.0,
    -0.0,
    1e-320,
    0.1 + 0.2,
    math.nan,
    NAN_WITH_SIGN,
    math.inf,
    -math.inf,
    1.5 - 0.0j,
    complex(math.nan, -0.0),
    "",
    "text \u00e9 \u2028 \U0001f600",
    "\ud83d\ude00",
    "\ud83d",
    "\0",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    [1, True, None, "x"],
    [[1, 2], [3.5]],
    (),
    (1,),
    ((1, [2]), "a"),
    {},
    {"a": 1},
    {"$": "tuple", "of": [1]},
    {"$": {"$": 1}},
    {1: "a", (2, "b"): [3], None: {}, 1.5: True},
    {"\ud83d\ude00": 1, "é": 2},
    [0.1 * n for n in range(100)],
    [math.nan, NAN_WITH_SIGN, -0.0, math.inf] * 20,
    list(range(-50, 50)),
    [2**63 - 1, -(2**63)] * 40,
    [2**63] * 80,
    [True, 1] * 40,
    (*range(80),),
    np.fromiter([[1.5] * 70, [7] * 70], dtype=object, count=2),
    np.fromiter(range(80), dtype=object, count=80),
    set(range(90)),
    set(),
    {1, 2},
    frozenset(("a", 3)),
    OrderedDict(b=1, a=(2,)),
    datetime.datetime(2026, 7, 1, 12, 30, 5, 123456),
    datetime.datetime(2026, 7, 1, tzinfo=UTC),
    datetime.date(1, 1, 1),
    datetime.datetime(2026, 7, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))),
    datetime.time(23, 59),
    datetime.time(23, 59, tzinfo=UTC),
    datetime.datetime(2026, 7, 1, fold=1),
    datetime.datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime.datetime(2026, 7, 1, tzinfo=datetime.timezone(datetime.timedelta(microseconds=-7))),
    uuid.UUID(int=5),
    datetime.timedelta(days=-3, microseconds=7),
    decimal.Decimal("1.10"),
    decimal.Decimal("sNaN"),
    np.float32(0.1),
    np.float64("nan"),
    np.int8(-5),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1j),
    np.str_("é"),
    np.str_(""),
    np.bytes_(b"a"),
    np.datetime64("2026-07-01T12:00", "ms"),
    np.timedelta64("NaT"),
    np.longdouble("0.1"),
    np.arange(6).reshape(2, 3),
    np.zeros((0, 3), np.float16),
    np.array(2.5),
    np.array(["a", "bcd"]),
    np.array([b"a"]),
    np.arange(3, dtype=">i4"),
    np.array(["2026-07-01"], "M8[D]"),
    np.arange(6).reshape(2, 3).T,
    np.array([], dtype="U"),
    np.array([None, {"a": (1,)}, [1, 2]], dtype=object),
    np.array([[1, "a"]], dtype=object),
    np.array([[], []], object),
    torch.float16,
    torch.arange(6).view(2, 3),
    torch.tensor(2.5),
    torch.zeros(0, 4),
    torch.arange(6).view(2, 3).T,
    torch.tensor([math.nan, -0.0, math.inf]),
    torch.tensor([1 + 2j, complex(0, math.nan)]),
    torch.tensor([True, False]),
    torch.arange(4).to(torch.uint16),
    torch.tensor([0.1]).bfloat16(),
    torch.tensor([0.5]).to(torch.float8_e4m3fn),
    torch.tensor([1 - 2j]).conj(),
    torch.tensor([1 - 2j]).conj().imag,
    torch.tensor(5, dtype=torch.uint64),
    random.Random(3).getstate(),
    np.random.default_rng(3).bit_generator.state,
    np.random.RandomState(3).get_state(),
    torch.Generator().manual_seed(3).get_state(),
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
]


def by_file(value, folder):
    plain_data.save(value, folder / "value")
    return plain_data.load(folder / "value")


def by_json(value, folder):
    return plain_data.from_json(json.loads(json.dumps(plain_data.to_json(value))))


def assert_same(got, sent, where="value"):
    """Types and bits; pickle, which is independent of all this, says what there is inside."""
    assert type(got) is type(sent), where
    if isinstance(sent, float | complex):
        assert pickle.dumps(got) == pickle.dumps(sent), where
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent), where
        for number, pair in enumerate(zip(got, sent, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(sent, dict):
        assert_same(list(got), list(sent), f"{where}'s keys")
        assert_same(list(got.values()), list(sent.values()), f"{where}'s values")
    elif isinstance(sent, torch.Tensor):
        sent = torch.empty(sent.shape, dtype=sent.dtype).copy_(sent)
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), where
        assert torch.equal(got.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8)), where
    elif isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), where
        if sent.dtype == object:
            assert_same(got.reshape(-1).tolist(), sent.reshape(-1).tolist(), where)
        else:
            assert got.tobytes() == sent.tobytes(), where
            assert got.flags.writeable
    elif isinstance(sent, np.generic):
        assert (got.dtype, got.tobytes()) == (sent.dtype, sent.tobytes()), where
    elif isinstance(sent, datetime.datetime | datetime.time):
        assert pickle.dumps(got) == pickle.dumps(sent), where
    elif isinstance(sent, decimal.Decimal):
        assert got.as_tuple() == sent.as_tuple(), where
    else:
        assert got == sent, where


@pytest.mark.parametrize("there_and_back", [by_file, by_json])
def test_every_value_comes_back_as_it_was(tmp_path, there_and_back):
    for number, value in enumerate(PLAIN):
        assert_same(there_and_back(value, tmp_path), value, f"value {number}")
    assert_same(there_and_back(PLAIN, tmp_path), PLAIN)
    with pytest.raises(AssertionError):  # the control
        assert_same(there_and_back([1.0], tmp_path), [1])


@pytest.mark.parametrize("there_and_back", [by_file, by_json])
def test_nested_values_of_any_kind(tmp_path, there_and_back):
    numbers = random.Random(5)
    keys = ["a", "$", "of", 1, (2, "x"), None, 2.5, b"k", frozenset((1,))]

    def some(depth):
        kind = numbers.randrange(6) if depth else 0
        parts = [some(depth - 1) for _ in range(numbers.randrange(4))] if kind else []
        objects = np.fromiter(parts, dtype=object, count=len(parts))
        chosen = numbers.sample(keys, len(parts))
        made = (numbers.choice(PLAIN), parts, tuple(parts), dict(zip(chosen, parts, strict=True)), objects)
        return made[kind] if kind < len(made) else {"x": parts}

    for _ in range(60):
        value = some(4)
        assert_same(there_and_back(value, tmp_path), value)


@pytest.mark.parametrize("there_and_back", [by_file, by_json])
def test_a_tensor_that_occurs_twice_comes_back_as_one(tmp_path, there_and_back):
    one, like_it = torch.zeros(3), torch.zeros(3)
    first, second, third = there_and_back([one, one, like_it], tmp_path)
    assert first is second
    assert third is not first
    first += 1
    assert third.sum() == 0
    offsets = torch.tensor([0, 2, 5])
    jagged = [torch.nested.nested_tensor_from_jagged(torch.arange(5.0) * n, offsets) for n in (1, 2)]
    got = there_and_back(jagged, tmp_path)
    assert torch.equal((got[0] + got[1]).values(), torch.arange(5.0) * 3)  # of one structure, or this fails
    with_holes = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([1, 2]))
    found = there_and_back(with_holes, tmp_path)
    assert [row.tolist() for row in found.unbind()] == [row.tolist() for row in with_holes.unbind()]


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Sample:
    x: int


class Zone(datetime.tzinfo):
    """One of somebody's own."""


Pair = namedtuple("Pair", "a b")
RING = []
RING.append(RING)
REFUSED = {
    "test_plain.Sample": Sample(1),
    "test_plain.Colour": Colour.RED,
    "test_plain.Pair": Pair(1, 2),
    "collections.defaultdict": defaultdict(list),
    "builtins.function": lambda: None,
    "builtins.type": dict,
    "pathlib.PosixPath": Path("x"),
    "an array of": np.zeros(2, [("a", int)]),
    "is a Parameter": torch.nn.Parameter(torch.zeros(1)),
    "torch.sparse_coo": torch.zeros(2).to_sparse(),
    "numpy.record": np.rec.array([(1,)], dtype=[("a", int)])[0],
    "the time zone <": datetime.datetime(2026, 7, 1, tzinfo=Zone()),
    "time zone": datetime.datetime(2026, 7, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")),
}


@pytest.mark.parametrize("said", REFUSED)
def test_other_values_are_refused_with_their_type_and_place(tmp_path, said):
    value = {"a": [0, {"b": (1, REFUSED[said])}]}
    for write in (
        lambda: plain_data.save(value, tmp_path / "value", "state"),
        lambda: plain_data.to_json(value, "state"),
    ):
        with pytest.raises(plain_data.NotPlainError, match=r"state\['a'\]\[1\]\['b'\]\[1\] (is|has)") as caught:
            write()
        assert said in str(caught.value).replace("tests.data.", "")
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_contains_itself_is_refused():
    with pytest.raises(plain_data.NotPlainError, match="contains itself"):
        plain_data.to_json(RING)


def test_files_are_plain_safetensors(tmp_path):
    plain_data.save({"w": torch.arange(3.0), "n": 5}, tmp_path / "value")
    held = load_file(tmp_path / "value")
    assert torch.equal(held["0"], torch.arange(3.0))
    assert json.loads(held["tree"].numpy().tobytes())["n"] == 5


DAMAGED = [
    {"$": "no such kind"},
    {"$": "tensor", "at": "7", "dtype": "float32", "shape": [1]},
    {"$": ["a"]},
    {"$": "tuple"},
    {"$": "tensor", "at": "0", "dtype": "load", "shape": [3]},
    {"$": "array", "dtype": "O", "shape": [1], "at": "0"},
    {"$": "tensor", "at": "0", "dtype": "float32", "shape": [99]},
    {"$": "scalar", "dtype": "O", "bytes": "00" * 8},
    {"$": "array", "dtype": "<f4", "shape": [1 << 60], "at": "0"},
    {"$": "objects", "shape": [2], "of": [1]},
    {"$": "dict", "of": [[[1], 2]]},
    {"$": "float", "bits": "zz"},
    {"$": "set", "of": [[1]]},
    {"$": "int", "hex": "x"},
    {"$": "datetime", "iso": "soon"},
    {"$": "decimal", "text": "x"},
    {"$": "tensor", "at": "tree", "dtype": "q", "shape": []},
]


@pytest.mark.parametrize("tree", DAMAGED, ids=str)
def test_damaged_trees_are_refused(tmp_path, tree):
    text = torch.frombuffer(bytearray(json.dumps([tree]).encode()), dtype=torch.uint8)
    save_file({"0": torch.ones(3), "tree": text}, tmp_path / "value", {plain_data.FORMAT_KEY: plain_data.FORMAT})
    with pytest.raises(ValueError, match=r"value' cannot be read \(.*it is damaged"):
        plain_data.load(tmp_path / "value")
    with pytest.raises(ValueError, match="this is no plain data of ours"):
        plain_data.from_json({"tree": [tree], "bytes": {"0": "AAAA"}})


def test_files_of_others_and_damaged_ones_are_told(tmp_path):
    path = tmp_path / "value"
    save_file({"tree": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="holds tensors alone"):
        plain_data.load(path)
    save_file({"tree": torch.zeros(3)}, path, {plain_data.FORMAT_KEY: "2"})
    with pytest.raises(ValueError, match="holds format 2, and no plain data of format 1"):
        plain_data.load(path)
    deep = torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)
    save_file({"tree": deep}, path, {plain_data.FORMAT_KEY: plain_data.FORMAT})
    with pytest.raises(ValueError, match="it is damaged"):
        plain_data.load(path)
    plain_data.save(list(range(50)), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            plain_data.load(path)
