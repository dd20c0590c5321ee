"""DataProto's row and field operations against the same work on a plain Python list of rows."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from meshrl.data.batch import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto

LENGTHS = (3, 0, 5, 1, 2, 4, 7)


def jagged_of(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def make(count: int = 7, meta: dict[str, Any] | None = None) -> DataProto:
    """Dense 1-D and 3-D fields, two jagged fields with shared offsets, one with features, strings, lists and ints."""
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(count)]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    total = int(offsets[-1])
    hidden = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths, dtype=torch.int64) * 2 + 1)
    tensors = {
        "score": torch.arange(count) * 1.5,
        "cube": torch.arange(count * 12, dtype=torch.int64).view(count, 4, 3),
        "tokens": torch.nested.nested_tensor_from_jagged(torch.arange(total), offsets),
        "weights": torch.nested.nested_tensor_from_jagged(torch.arange(total) * 10, offsets),
        "hidden": torch.nested.nested_tensor_from_jagged(
            hidden.view(-1, 1).expand(-1, 2).bfloat16(), offsets * 2 + torch.arange(count + 1)
        ),
    }
    objects = {
        "uid": [f"id{number}" for number in range(count)],
        "turns": [[number] * 2 for number in range(count)],
        "level": np.arange(count) * 2,
    }
    return DataProto.from_dict(tensors, objects, {"step": 4} if meta is None else meta)


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def listed(data: DataProto) -> list[dict[str, Any]]:
    """The rows as plain dicts, by torch's own unbind: the independent side of the comparisons."""
    assert data.batch is not None
    columns = {key: [plain(row) for row in value.unbind()] for key, value in data.batch.items()}
    columns |= {key: [plain(row) for row in value] for key, value in data.non_tensor_batch.items()}
    assert {len(column) for column in columns.values()} == {len(data)}
    return [{key: column[number] for key, column in columns.items()} for number in range(len(data))]


def assert_rows(data: DataProto, expected: list[dict[str, Any]]) -> None:
    assert listed(data) == expected
    assert len(data) == len(expected)
    assert data.batch is not None
    if len(data) and all(key in data.batch for key in ("tokens", "weights")):
        # fields that shared their offsets still do, or this addition is refused
        total = data.batch["tokens"] + data.batch["weights"]
        assert [plain(row) for row in total.unbind()] == [[token * 11 for token in row["tokens"]] for row in expected]


def memory(value: torch.Tensor) -> int:
    return (value.values() if value.is_nested else value).untyped_storage().data_ptr()


def test_the_comparison_can_fail() -> None:
    data = make()
    rows = listed(data)
    assert data.batch is not None
    data.batch["tokens"].values()[4] += 1
    with pytest.raises(AssertionError):
        assert_rows(data, rows)


# --- making ---


def test_lists_become_one_dimensional_arrays_even_if_their_entries_are_equally_long() -> None:
    data = DataProto.from_dict(non_tensors={"equal": [[1, 2], [3, 4]], "unequal": [[1], [2, 3]]})
    assert data.non_tensor_batch["equal"].shape == (2,)
    assert data.non_tensor_batch["equal"].dtype == object
    assert data.non_tensor_batch["unequal"].tolist() == [[1], [2, 3]]
    assert len(data) == 2
    assert data.batch is None


def test_from_single_dict_sorts_tensors_from_arrays() -> None:
    data = DataProto.from_single_dict({"a": torch.ones(3, 2), "b": np.array(["x", "y", "z"], object)}, {"k": 1})
    assert data.batch is not None
    assert list(data.batch.keys()) == ["a"]
    assert list(data.non_tensor_batch) == ["b"]
    assert data.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="'c' is a list"):
        DataProto.from_single_dict({"c": [1, 2]})


def test_several_batch_dims() -> None:
    data = DataProto.from_dict({"a": torch.arange(24).view(4, 3, 2), "b": torch.ones(4, 3)}, num_batch_dims=2)
    assert data.batch is not None
    assert data.batch.batch_size == (4, 3)
    half = data.chunk(2)[1]
    assert half.batch is not None
    assert half.batch.batch_size == (2, 3)
    assert half.batch["a"].tolist() == torch.arange(12, 24).view(2, 3, 2).tolist()
    joined = DataProto.concat([half, data])
    assert joined.batch is not None
    assert joined.batch.batch_size == (6, 3)
    item = data[0].batch
    assert item is not None
    assert item.batch_size == (3,)
    with pytest.raises(ValueError, match="num_batch_dims is 2"):
        DataProto.from_dict({"a": torch.ones(2, 2)}, {"b": ["x", "y"]}, num_batch_dims=2)
    with pytest.raises(ValueError, match="'a' has shape"):
        DataProto.from_dict({"a": torch.ones(2)}, num_batch_dims=2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: DataProto.from_dict({"a": torch.ones(4), "b": torch.ones(5, 2)}),
            r"'b' has batch size \[5\].*'a' has \[4\]",
        ),
        (
            lambda: DataProto.from_dict({"a": torch.ones(4), "j": jagged_of([torch.ones(2)])}),
            r"'j' has batch size \[1\]",
        ),
        (lambda: DataProto.from_dict({"a": torch.ones(4)}, {"uid": ["x"] * 3}), "'uid' has 3 rows, but 'batch' has 4"),
        (lambda: DataProto.from_dict(non_tensors={"u": ["x"], "v": ["x", "y"]}), "'v' has 2 rows, but 'u' has 1"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), "'a' is a list"),  # type: ignore[dict-item]
        (lambda: DataProto.from_dict(non_tensors={"u": "text"}), "'u' is a str"),
        (lambda: DataProto(non_tensor_batch={"u": ["x"]}), "'u' is a list"),  # type: ignore[dict-item]
        (
            lambda: DataProto(batch=TensorDict({"a": torch.ones(2)}, [])),
            r"batch_size \[\], but must have at least one dim",
        ),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), "'a' has shape"),
    ],
)
def test_inconsistent_fields_are_named_with_their_sizes(build: Callable[[], DataProto], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_check_consistency_sees_a_field_changed_later() -> None:
    data = make()
    data.check_consistency()
    data.non_tensor_batch["uid"] = data.non_tensor_batch["uid"][:5]
    with pytest.raises(ValueError, match="'uid' has 5 rows, but 'batch' has 7"):
        data.check_consistency()


# --- rows ---


def test_an_int_gives_one_item_with_the_rows_own_length() -> None:
    data = make()
    rows = listed(data)
    for number in (0, 1, 6, -1, np.int64(2), torch.tensor(3)):
        item = data[number]  # type: ignore[index]
        assert isinstance(item, DataProtoItem)
        assert item.batch is not None
        got = {key: plain(value) for key, value in [*item.batch.items(), *item.non_tensor_batch.items()]}
        assert got == rows[int(number)]
        assert item.meta_info == {"step": 4}
    assert [item.non_tensor_batch["uid"] for item in data] == [row["uid"] for row in rows]
    for number in (7, -8):
        with pytest.raises(IndexError, match="7 rows"):
            data[number]
    for bad in ("uid", 1.0, True, None):
        with pytest.raises(TypeError):
            data[bad]  # type: ignore[call-overload]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    start=st.none() | st.integers(-11, 11),
    stop=st.none() | st.integers(-11, 11),
    step=st.none() | st.integers(-3, 3).filter(bool),
)
def test_slices_mean_what_they_mean_in_python(
    count: int, start: int | None, stop: int | None, step: int | None
) -> None:
    data = make(count)
    assert_rows(data[start:stop:step], listed(data)[start:stop:step])
    assert_rows(data.slice(start, stop, step), listed(data)[start:stop:step])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(1, 9))
def test_index_lists_arrays_tensors_and_masks(data: st.DataObject, count: int) -> None:
    proto = make(count)
    rows = listed(proto)
    numbers = data.draw(st.lists(st.integers(-count, count - 1), max_size=12))
    expected = [rows[number] for number in numbers]
    for index in (numbers, np.array(numbers, np.int32), torch.tensor(numbers, dtype=torch.int64), tuple(numbers)):
        assert_rows(proto[index], expected)
        assert_rows(proto.select_idxs(index), expected)
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    expected = [row for row, kept in zip(rows, mask, strict=True) if kept]
    for picked in (mask, np.array(mask), torch.tensor(mask)):
        assert_rows(proto[picked], expected)


def test_bad_indices_are_refused_with_the_numbers() -> None:
    data = make()
    with pytest.raises(IndexError, match="row 7 of a DataProto with 7 rows"):
        data[[0, 7]]
    with pytest.raises(IndexError, match="row -8"):
        data.select_idxs([-8])
    with pytest.raises(ValueError, match="mask has 6 entries, but there are 7 rows"):
        data[[True] * 6]
    with pytest.raises(TypeError, match="float64"):
        data[np.array([0.0, 1.0])]
    with pytest.raises(ValueError, match="1-D"):
        data.select_idxs([[0, 1]])  # type: ignore[list-item]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6, 12])
def test_chunk_and_concat_are_inverse_and_chunks_are_views(chunks: int) -> None:
    data = make(12)
    rows = listed(data)
    parts = data.chunk(chunks)
    size = 12 // chunks
    assert data.batch is not None
    for number, part in enumerate(parts):
        assert_rows(part, rows[number * size : (number + 1) * size])
        assert part.meta_info == {"step": 4}
        assert part.batch is not None
        assert all(memory(part.batch[key]) == memory(data.batch[key]) for key in data.batch.keys())
        assert np.shares_memory(part.non_tensor_batch["uid"], data.non_tensor_batch["uid"])
    assert_rows(DataProto.concat(parts), rows)
    assert_rows(DataProto.concat(parts[::-1]), [row for part in parts[::-1] for row in listed(part)])


def test_chunk_refuses_what_does_not_divide_unless_padding_is_enabled() -> None:
    data = make(7)
    with pytest.raises(ValueError, match=r"7 rows are not divisible into 3 .*pad_dataproto_to_divisor\(data, 3\)"):
        data.chunk(3)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        data.chunk(0)
    assert not data.is_padding_enabled()
    loose = DataProto.from_dict({"a": torch.arange(7)}, auto_padding=True)
    assert loose.is_padding_enabled()
    parts = loose.chunk(3)
    assert sorted(map(len, parts)) == [2, 2, 3]
    joined = DataProto.concat(parts).batch
    assert joined is not None
    assert joined["a"].tolist() == list(range(7))


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_split(size: int) -> None:
    data = make(7)
    rows = listed(data)
    parts = data.split(size)
    assert [len(part) for part in parts] == [len(rows[start : start + size]) for start in range(0, 7, size)]
    assert [row for part in parts for row in listed(part)] == rows
    with pytest.raises(ValueError, match="at least 1, not 0"):
        data.split(0)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_repeat(times: int) -> None:
    data = make(7)
    rows = listed(data)
    assert_rows(data.repeat(times, interleave=True), [row for row in rows for _ in range(times)])
    assert_rows(data.repeat(times, interleave=False), rows * times)
    assert data.batch is not None
    assert memory(data.repeat(times).batch["tokens"]) != memory(data.batch["tokens"])  # type: ignore[index]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        data.repeat(0)


def test_reorder_in_place_and_only_by_permutations() -> None:
    data = make(7)
    rows = listed(data)
    order = random.Random(0).sample(range(7), 7)
    data.reorder(torch.tensor(order))
    assert_rows(data, [rows[number] for number in order])
    data.reorder(np.argsort(order))
    assert_rows(data, rows)
    for bad in ([0, 1, 2], [0, 0, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match="no permutation of 7 rows"):
            data.reorder(bad)


def test_unfold_column_chunks() -> None:
    data = make(3)
    pairs = np.array([["a", "b"], ["c", "d"], ["e", "f"]], dtype=object)
    data.non_tensor_batch["pair"] = pairs
    unfolded = data.unfold_column_chunks(2, split_keys=["cube", "pair"])
    expected = []
    for row in listed(data):
        for half in range(2):
            expected.append({**row, "cube": row["cube"][2 * half : 2 * half + 2], "pair": row["pair"][half : half + 1]})
    assert_rows(unfolded, expected)
    assert_rows(data.unfold_column_chunks(2), [row for row in listed(data) for _ in range(2)])
    with pytest.raises(ValueError, match=r"'cube' has shape \[3, 4, 3\].*divisible by 3"):
        data.unfold_column_chunks(3, ["cube"])
    with pytest.raises(ValueError, match="'tokens' is jagged"):
        data.unfold_column_chunks(2, ["tokens"])
    with pytest.raises(KeyError, match="nothing"):
        data.unfold_column_chunks(2, ["nothing"])


@pytest.mark.parametrize(("count", "divisor"), [(7, 4), (3, 8), (8, 4), (1, 5), (0, 3)])
def test_padding_to_a_divisor_and_back(count: int, divisor: int) -> None:
    data = make(count)
    rows = listed(data)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert_rows(padded, [rows[number % count] for number in range(count + pad_size)])
    assert_rows(unpad_dataproto(padded, pad_size), rows)


def test_padding_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="drop 4 rows of padding from 3"):
        unpad_dataproto(make(3), 4)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        pad_dataproto_to_divisor(make(3), 0)


# --- mini-batches ---


def test_iterator_in_order_gives_views_epoch_after_epoch() -> None:
    data = make(6)
    rows = listed(data)
    parts = list(data.make_iterator(mini_batch_size=2, epochs=2))
    assert [row for part in parts for row in listed(part)] == rows * 2
    assert all(part.meta_info == {"step": 4} for part in parts)
    assert parts[1].batch is not None
    assert data.batch is not None
    assert memory(parts[1].batch["cube"]) == memory(data.batch["cube"])


def test_shuffled_iterator_covers_each_epoch_once_and_repeats_by_seed() -> None:
    data = make(12)

    def orders(seed: int) -> list[list[str]]:
        parts = data.make_iterator(4, epochs=3, seed=seed, dataloader_kwargs={"shuffle": True})
        seen = [uid for part in parts for uid in part.non_tensor_batch["uid"]]
        return [seen[:12], seen[12:24], seen[24:]]

    first = orders(1)
    assert all(sorted(epoch) == sorted(data.non_tensor_batch["uid"]) for epoch in first)
    assert first[0] != first[1]
    assert first == orders(1)
    assert first != orders(2)
    with pytest.raises(ValueError, match=r"12 rows are not divisible by mini_batch_size \(5\)"):
        data.make_iterator(5, epochs=1)


# --- fields ---


def test_select_shares_memory_unless_deepcopied() -> None:
    data = make(meta={"step": 4, "note": [1]})
    assert data.batch is not None
    part = data.select(["score", "tokens"], ["uid"], ["note"])
    assert listed(part) == [{key: row[key] for key in ("score", "tokens", "uid")} for row in listed(data)]
    assert part.meta_info == {"note": [1]}
    assert part.batch is not None
    assert memory(part.batch["score"]) == memory(data.batch["score"])
    apart = data.select(deepcopy=True)
    assert apart.batch is not None
    assert_rows(apart, listed(data))
    apart.batch["score"].zero_()
    apart.non_tensor_batch["turns"][0].append(9)
    apart.meta_info["note"].append(2)
    assert data.batch["score"][1] == 1.5
    assert data.non_tensor_batch["turns"][0] == [0, 0]
    assert data.meta_info["note"] == [1]
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 7
    with pytest.raises(KeyError, match=r"batch has no \['nope'\]; it has \['cube', 'hidden'"):
        data.select(["nope"])


def test_pop_takes_fields_out_or_changes_nothing() -> None:
    data = make(meta={"step": 4, "note": 1})
    rows = listed(data)
    for wrong in ({"batch_keys": ["score", "x"]}, {"non_tensor_batch_keys": ["x"]}, {"meta_info_keys": ["x"]}):
        with pytest.raises(KeyError, match="x"):
            data.pop(**{"batch_keys": ["score"], **wrong})
    assert_rows(data, rows)
    popped = data.pop(["score", "hidden"], ["uid"], ["note"])
    taken = ("score", "hidden", "uid")
    assert listed(popped) == [{key: row[key] for key in taken} for row in rows]
    assert listed(data) == [{key: value for key, value in row.items() if key not in taken} for row in rows]
    assert popped.meta_info == {"note": 1}
    assert data.meta_info == {"step": 4}
    assert_rows(data.union(popped).select([*rows[0]][:5], ["uid", "turns", "level"]), rows)


def test_union_adds_fields_and_accepts_equal_ones() -> None:
    data = make()
    extra = DataProto.from_dict({"values": torch.full((7, 2), float("nan"))}, {"answer": list("abcdefg")}, {"more": 2})
    same = copy.deepcopy(data)
    result = data.union(same).union(extra).union(copy.deepcopy(extra))
    assert result is data
    assert data.meta_info == {"step": 4, "more": 2}
    assert data.batch is not None
    assert data.batch["values"].shape == (7, 2)
    assert data.non_tensor_batch["answer"].tolist() == list("abcdefg")
    assert DataProto().union(make()).non_tensor_batch["uid"].tolist() == make().non_tensor_batch["uid"].tolist()


def change_dense(data: DataProto) -> None:
    assert data.batch is not None
    data.batch["score"][3] = -1


def change_jagged(data: DataProto) -> None:
    assert data.batch is not None
    data.batch["tokens"].values()[-1] = -1


def change_jagged_lengths(data: DataProto) -> None:
    assert data.batch is not None
    values, offsets = data.batch["tokens"].values(), data.batch["tokens"].offsets().clone()
    offsets[1] -= 1
    data.batch["tokens"] = torch.nested.nested_tensor_from_jagged(values, offsets)


def change_objects(data: DataProto) -> None:
    data.non_tensor_batch["turns"][2] = [2, 3]


def change_meta(data: DataProto) -> None:
    data.meta_info["step"] = 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_dense, "batch field 'score'"),
        (change_jagged, "batch field 'tokens'"),
        (change_jagged_lengths, "batch field 'tokens'"),
        (change_objects, "non_tensor_batch field 'turns'"),
        (change_meta, "meta_info 'step' .*4 and 5"),
    ],
)
def test_union_names_the_conflicting_key_and_changes_nothing(change: Callable[[DataProto], None], message: str) -> None:
    data, other = make(), copy.deepcopy(make())
    other.non_tensor_batch["new"] = other.non_tensor_batch["uid"]
    change(other)
    with pytest.raises(ValueError, match=message):
        data.union(other)
    assert_rows(data, listed(make()))
    with pytest.raises(ValueError, match="7 rows here, 6 rows in the other"):
        data.union(make(6))


def test_union_of_overlapping_views_compares_their_elements() -> None:
    whole = torch.arange(6.0)
    data = DataProto.from_dict({"a": whole[:3], "b": whole[:2].expand(3, 2)})
    assert data.union(DataProto.from_dict({"a": whole[:3].clone()})) is data
    with pytest.raises(ValueError, match="'a'"):
        data.union(DataProto.from_dict({"a": whole[0:6:2]}))
    with pytest.raises(ValueError, match="'b'"):
        data.union(DataProto.from_dict({"b": whole.view(3, 2)}))


def test_rename_both_parts_also_crosswise() -> None:
    data = make()
    rows = listed(data)
    assert data.rename("score", "points") is data
    data.rename(["tokens", "weights", "uid"], ["weights", "tokens", "name"])
    names = {"score": "points", "tokens": "weights", "weights": "tokens", "uid": "name"}
    assert listed(data) == [{names.get(key, key): value for key, value in row.items()} for row in rows]
    with pytest.raises(ValueError, match=r"1 old keys .* but 2 new keys"):
        data.rename("points", ["a", "b"])
    with pytest.raises(ValueError, match="several fields the name"):
        data.rename("points", "cube")
    with pytest.raises(KeyError, match="score"):
        data.rename("score", "x")


# --- concat ---


def test_concat_of_unequal_parts_with_empty_ones() -> None:
    parts = [make(2), make(0), make(7), make(1)]
    assert_rows(DataProto.concat(parts), [row for part in parts for row in listed(part)])


def test_concat_merges_meta_info() -> None:
    array = np.array([1.0, float("nan")])
    parts = [
        make(1, {"step": 1, "array": array, "metrics": [{"a": 1}]}),
        make(1, {"step": 1, "array": array.copy(), "metrics": [{"a": 2}, {"b": 3}], "only": "here"}),
        make(1, {"step": 1}),
    ]
    meta = DataProto.concat(parts).meta_info
    assert meta["metrics"] == [{"a": 1}, {"a": 2}, {"b": 3}]
    assert (meta["step"], meta["only"]) == (1, "here")
    np.testing.assert_array_equal(meta["array"], array)
    dicts = [make(1, {"metrics": {"loss": [1, 2], "lr": 0.1}}), make(1, {"metrics": {"loss": [3]}})]
    assert DataProto.concat(dicts).meta_info["metrics"] == {"loss": [1, 2, 3], "lr": [0.1]}
    timed = [make(1, {"timing": times}) for times in ({"gen": 1.0, "tool": 9.0}, {"gen": 3.0})]
    assert DataProto.concat(timed).meta_info["timing"] == {"gen": 3.0, "tool": 9.0}
    assert DataProto.concat(timed[::-1]).meta_info["timing"] == {"gen": 3.0, "tool": 9.0}
    DataProto.concat([make(1, {"x": kind("nan")}) for kind in (np.float32, np.float64, float, np.float32)])
    with pytest.raises(ValueError, match="'x' differs"):
        DataProto.concat([make(1, {"x": np.float32("nan")}), make(1, {"x": np.float32(1)})])
    with pytest.raises(ValueError, match="metrics"):
        DataProto.concat([parts[0], dicts[0]])
    with pytest.raises(ValueError, match="'step' differs: 1 before, 9 in part 1"):
        DataProto.concat([make(1, {"step": 1}), make(1, {"step": 9})])


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (
            {"a": torch.ones(2, 3)},
            {"a": torch.ones(2, 4)},
            r"'a': a row has shape \(3,\) in part 0 but \(4,\) in part 1",
        ),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, r"differ in \['a', 'b'\]"),
        (
            {"a": torch.ones(1, 2)},
            {"a": jagged_of([torch.ones(2)])},
            "'a': it is a Tensor here and a jagged tensor there",
        ),
        ({"a": jagged_of([torch.ones(2, 3)])}, {"a": jagged_of([torch.ones(2, 4)])}, r"\(None, 3\) in part 0"),
        ({"a": torch.ones(2)}, {}, r"parts \[1\] of 2 have no tensors"),
    ],
)
def test_concat_names_what_does_not_fit(left: dict, right: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.concat([DataProto.from_dict(left), DataProto.from_dict(right)])


def test_concat_names_arrays_of_unequal_shape_and_empty_lists() -> None:
    flat = DataProto.from_dict(non_tensors={"u": np.array([1, 2], object)})
    square = DataProto.from_dict(non_tensors={"u": np.array([[1, 2]], object)})
    with pytest.raises(ValueError, match=r"'u': a row has shape \(\) in part 0 but \(2,\) in part 1"):
        DataProto.concat([flat, square])
    with pytest.raises(ValueError, match="list is empty"):
        DataProto.concat([])


# --- jagged corners ---


def test_jagged_with_a_later_ragged_dim_and_with_holes() -> None:
    turned = jagged_of([torch.arange(n * 2.0).view(n, 2) for n in (3, 0, 2, 1)]).transpose(1, 2)
    dense = torch.arange(40.0).view(4, 10)
    starts, lengths = torch.tensor([0, 1, 2, 9]), torch.tensor([3, 4, 0, 1])
    holed = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    data = DataProto.from_dict({"turned": turned, "holed": holed})
    rows = listed(data)
    assert listed(data[1:3]) == rows[1:3]
    assert listed(data[[3, 0, 0]]) == [rows[3], rows[0], rows[0]]
    assert listed(data.repeat(2)) == [row for row in rows for _ in range(2)]
    assert listed(DataProto.concat([data, data[2:]])) == rows + rows[2:]
    assert [plain(data[number].batch["holed"]) for number in range(4)] == [row["holed"] for row in rows]  # type: ignore[index]


def test_nested_tensordicts_ride_along() -> None:
    inner = TensorDict({"x": torch.arange(6).view(3, 2)}, [3])
    data = DataProto(TensorDict({"inner": inner, "y": torch.arange(3)}, [3]))
    back = DataProto.concat([data[[2, 0]], data[1:]]).repeat(2)
    assert back.batch is not None
    assert back.batch["inner", "x"][:, 0].tolist() == [4, 4, 0, 0, 2, 2, 4, 4]
    assert back.batch["y"].tolist() == [2, 2, 0, 0, 1, 1, 2, 2]


def test_gradients_flow_through_picked_rows() -> None:
    values = torch.arange(6.0, requires_grad=True)
    jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
    picked = DataProto.from_dict({"j": jagged})[[1, 1]].batch
    assert picked is not None
    picked["j"].values().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 2, 2, 2, 2]


# --- the rest ---


def test_to_moves_in_place_and_keeps_shared_offsets() -> None:
    data = make()
    rows = listed(data)
    assert data.to("cpu") is data
    assert_rows(data, rows)
    assert data.batch is not None
    assert data.batch.device == torch.device("cpu")
    data.to("meta")
    assert all(value.device.type == "meta" for value in data.batch.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_on_a_gpu() -> None:
    data = make()
    rows = listed(data)
    data.to("cuda")
    assert data.batch is not None
    assert all(value.is_cuda for value in data.batch.values())
    assert_rows(data, rows)
    assert_rows(data[[2, 0]], [rows[2], rows[0]])
    assert_rows(DataProto.concat([data[:3], data[3:]]), rows)
    assert_rows(data.repeat(2), [row for row in rows for _ in range(2)])
    assert_rows(data.to("cpu"), rows)


def test_copies() -> None:
    data = make(meta={"note": [1]})
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert data.batch is not None
    assert shallow.batch is not None
    assert deep.batch is not None
    shallow.batch["new"] = torch.ones(7)
    shallow.meta_info["new"] = 1
    assert "new" not in data.batch.keys()
    assert "new" not in data.meta_info
    assert memory(shallow.batch["score"]) == memory(data.batch["score"])
    assert_rows(deep, listed(data))
    deep.batch["score"].zero_()
    deep.meta_info["note"].append(2)
    assert data.batch["score"][2] == 3.0
    assert data.meta_info["note"] == [1]


def test_meta_info_of_a_part_is_its_own_dict() -> None:
    data = make(6)
    data.chunk(2)[0].meta_info["step"] = 99
    assert data.meta_info["step"] == 4


def test_print_size_counts_bytes(caplog: pytest.LogCaptureFixture) -> None:
    data = DataProto.from_dict(
        {"a": torch.ones(4, 10), "j": jagged_of([torch.ones(2).bfloat16()] * 4)}, {"u": ["x" * 1000] * 4}
    )
    with caplog.at_level("INFO"):
        sizes = data.print_size("rollout")
    assert sizes["batch"] == 4 * 10 * 4 + 8 * 2 + 5 * 8
    assert 1000 <= sizes["non_tensor_batch"] < 1400
    assert "rollout: 4 rows" in caplog.text
    assert DataProto().print_size() == {"batch": 0, "non_tensor_batch": 0}


def test_repr_is_short_and_names_every_field() -> None:
    text = repr(make())
    assert len(text) < 600
    assert all(name in text for name in ("7 rows", "score", "tokens", "uid", "step", "float32 [7]"))
