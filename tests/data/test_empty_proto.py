"""Every public method on a DataProto without rows: it does what it does with rows, or says what is wrong."""

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from meshrl.data.batch import DataProto, pad_dataproto_to_divisor, unpad_dataproto

EMPTY: dict[str, Callable[[], DataProto]] = {
    "None, None": lambda: DataProto(None, None),
    "None, None, None": lambda: DataProto(None, None, None),
    "nothing": DataProto,
    "from_dict()": DataProto.from_dict,
    "from_dict of None": lambda: DataProto.from_dict(None, None, None),
    "from_dict of {}": lambda: DataProto.from_dict({}, {}, {}),
    "from_single_dict": lambda: DataProto.from_single_dict({}),
    "meta_info alone": lambda: DataProto(meta_info={"step": 1}),
    "tensors of no rows": lambda: DataProto.from_dict({"x": torch.zeros(0, 4)}),
    "tensors that pad themselves": lambda: DataProto.from_dict({"x": torch.zeros(0, 4)}, auto_padding=True),
    "objects of no rows": lambda: DataProto.from_dict(None, {"name": []}),
    "both": lambda: DataProto.from_dict({"x": torch.zeros(0, 4)}, {"name": []}),
    "a TensorDict without fields": lambda: DataProto(TensorDict({}, [0])),
}


def on_disk(data: DataProto, folder: Path) -> DataProto:
    data.save_to_disk(folder / "batch")
    return DataProto.load_from_disk(folder / "batch")


def reordered(data: DataProto) -> DataProto:
    data.reorder([])
    return data


# What gives a batch, or several, without rows again.
SAME: dict[str, Callable[[DataProto], Any]] = {
    "slice": lambda data: data[:2],
    "slice backwards": lambda data: data[::-1],
    "select_idxs": lambda data: data[[]],
    "select_idxs by a mask": lambda data: data[np.zeros(0, bool)],
    "chunk": lambda data: data.chunk(2),
    "split": lambda data: data.split(2),
    "repeat": lambda data: data.repeat(3),
    "repeat end to end": lambda data: data.repeat(3, interleave=False),
    "unfold_column_chunks": lambda data: data.unfold_column_chunks(2, ["x"] if "x" in data._fields() else None),
    "reorder": reordered,
    "make_iterator": lambda data: list(data.make_iterator(2, 2)),
    "make_iterator in any order": lambda data: list(data.make_iterator(2, 2, 1, {"shuffle": True})),
    "select": lambda data: data.select(),
    "select a copy": lambda data: data.select(deepcopy=True),
    "pop": lambda data: data.pop(),
    "union": lambda data: data.union(DataProto(None, None)),
    "rename": lambda data: data.rename(),
    "to": lambda data: data.to("cpu"),
    "concat": lambda data: DataProto.concat([data, data]),
    "pickle": lambda data: pickle.loads(pickle.dumps(data)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pad": lambda data: pad_dataproto_to_divisor(data, 4)[0],
    "unpad": lambda data: unpad_dataproto(data, 0),
    "list": list,
}
# What cannot be, and the words that say so.
REFUSED: dict[str, tuple[Callable[[DataProto], Any], type[Exception], str]] = {
    "a row": (lambda data: data[0], IndexError, "row 0 of a DataProto with 0 rows"),
    "a row from the end": (lambda data: data[-1], IndexError, "row -1 of a DataProto with 0 rows"),
    "select_idxs": (lambda data: data[[0]], IndexError, "row 0 of a DataProto with 0 rows"),
    "chunk": (lambda data: data.chunk(0), ValueError, "at least 1, not 0"),
    "split": (lambda data: data.split(0), ValueError, "at least 1, not 0"),
    "select": (lambda data: data.select(["y"]), KeyError, r"no \['y'\]"),
    "pop": (lambda data: data.pop(["y"]), KeyError, r"no \['y'\]"),
    "rename": (lambda data: data.rename("y", "z"), KeyError, r"no field \['y'\]"),
    "unfold_column_chunks": (lambda data: data.unfold_column_chunks(2, ["y"]), KeyError, r"no field \['y'\]"),
    "unpad": (lambda data: unpad_dataproto(data, 4), ValueError, "4 rows of padding from 0 rows"),
    "concat": (lambda data: DataProto.concat([]), ValueError, "the list is empty"),
}
# Neither, and looked at apart.
LOOKING = {"from_dict", "from_single_dict", "check_consistency", "print_size", "is_padding_enabled"}
FILES = {"save_to_disk", "load_from_disk"}


@pytest.mark.parametrize("made", EMPTY)
@pytest.mark.parametrize("done", SAME)
def test_no_rows_stay_no_rows(made: str, done: str) -> None:
    data = EMPTY[made]()
    found = SAME[done](data)
    parts = found if isinstance(found, list) else [found]
    assert all(isinstance(part, DataProto) and len(part) == 0 for part in parts)
    assert len(parts) == (2 if done == "chunk" else 1) or done in ("split", "list") or done.startswith("make_iterator")


@pytest.mark.parametrize("made", EMPTY)
@pytest.mark.parametrize("done", REFUSED)
def test_what_needs_rows_or_fields_says_so(made: str, done: str) -> None:
    act, kind, words = REFUSED[done]
    with pytest.raises(kind, match=words):
        act(EMPTY[made]())


@pytest.mark.parametrize("made", EMPTY)
def test_looking_and_files(made: str, tmp_path: Path) -> None:
    data = EMPTY[made]()
    assert len(data) == 0
    assert not data
    assert "0 rows" in repr(data)
    data.check_consistency()
    assert set(data.print_size()) == {"batch", "non_tensor_batch"}
    loaded = on_disk(data, tmp_path)
    assert len(loaded) == 0
    assert loaded.meta_info == data.meta_info == EMPTY[made]().meta_info
    assert data.is_padding_enabled() == (made == "tensors that pad themselves")


def test_an_empty_batch_takes_on_what_it_is_joined_with() -> None:
    full = DataProto.from_dict({"x": torch.arange(3)}, {"name": ["a", "b", "c"]})
    for joined in (DataProto(None, None).union(full), full.union(DataProto(None, None))):
        assert joined.batch["x"].tolist() == [0, 1, 2]
        assert joined.non_tensor_batch["name"].tolist() == ["a", "b", "c"]
    one, other = DataProto(None, None), DataProto(None, None)
    one.meta_info["only here"] = 1
    assert other.meta_info == {}


@pytest.mark.parametrize("wrong", [torch.zeros(3), [1], "a", 3])
def test_parts_of_other_kinds_are_named(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(ValueError, match=rf"batch is a {kind}, but must be a TensorDict or None: .*from_dict"):
        DataProto(wrong)
    for name, made in {
        "non_tensor_batch": lambda: DataProto(None, wrong),
        "meta_info": lambda: DataProto(None, None, wrong),
        "tensors": lambda: DataProto.from_dict(wrong),
        "non_tensors": lambda: DataProto.from_dict(None, wrong),
        "data": lambda: DataProto.from_single_dict(wrong),
    }.items():
        with pytest.raises(ValueError, match=rf"{name} is a {kind}, but must be a dict or None"):
            made()


def test_every_public_method_is_in_a_table() -> None:
    public = {name for name, _ in inspect.getmembers(DataProto, callable) if not name.startswith("_")}
    assert public == {name for name in (*SAME, *REFUSED, *LOOKING, *FILES) if name in public}
