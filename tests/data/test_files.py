"""Rows from files of every kind, and what is said of bad ones."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrl.data.row_files import read_rows

ROWS = [
    {"prompt": "1+1=", "answer": 2, "tags": ["a", "b"], "info": {"level": 1}},
    {"prompt": "zwölf ∑ 🙂\u2028x", "answer": None, "tags": [], "info": {"level": 2}},
]


def write_jsonl(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    files = [write_jsonl(tmp_path / "a.jsonl", ROWS), write_parquet(tmp_path / "b.parquet", ROWS)]
    assert read_rows(files[:1]) == ROWS
    assert read_rows(files[1:]) == ROWS
    assert read_rows(files[::-1], required=("prompt", "info")) == ROWS + ROWS


def test_files_are_read_in_the_given_order(tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [{"n": name}]) for name in "bca"]
    assert [row["n"] for row in read_rows(files)] == ["b", "c", "a"]


def test_a_saved_dataset_and_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    assert read_rows([str(tmp_path / "one")]) == ROWS
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "many"))
    assert read_rows([str(tmp_path / "many" / "test")]) == ROWS
    with pytest.raises(ValueError, match=r"several splits \(train, test\)"):
        read_rows([str(tmp_path / "many")])


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    assert read_rows([str(file)]) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"line 2: not valid JSON"),
        (b'{"a": 1}\n\n[1, 2]\n', r"line 3: expected an object, got list"),
        (b'"text"\n', r"line 1: expected an object, got str"),
        (b'{"a": 1}\n{"a": "\xff\xfe"}\n', r"line 2: not valid JSON"),
        (b"", r"has no rows"),
        (b"\n \n", r"has no rows"),
    ],
)
def test_bad_lines_are_named_with_file_and_line(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows([str(file)])
    assert str(file) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PAR1 this is no parquet PAR1"])
def test_a_broken_parquet_file_is_named(tmp_path, content):
    file = tmp_path / "bad.parquet"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad.parquet' is not a readable parquet file"):
        read_rows([str(file)])


def test_an_empty_parquet_file_has_no_rows(tmp_path):
    file = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    with pytest.raises(ValueError, match="has no rows"):
        read_rows([str(file)])


def test_a_second_empty_file_is_noticed_too(tmp_path):
    fine = write_jsonl(tmp_path / "fine.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"none.jsonl' has no rows"):
        read_rows([fine, write_jsonl(tmp_path / "none.jsonl", [])])


def test_missing_and_null_columns_are_named_with_their_row(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", ROWS)
    with pytest.raises(ValueError, match=r"row 2: column 'answer' is missing or null"):
        read_rows([file], required=("prompt", "answer"))
    with pytest.raises(ValueError, match=r"row 1: column 'question'.*it has: prompt, answer, tags, info"):
        read_rows([file], required=("question",))
    with pytest.raises(ValueError, match="it has: nothing"):
        read_rows([write_jsonl(tmp_path / "b.jsonl", [{}])], required=("prompt",))


def test_false_and_zero_are_values(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"a": 0, "b": False, "c": ""}])
    assert read_rows([file], required=("a", "b", "c")) == [{"a": 0, "b": False, "c": ""}]


def test_files_that_are_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.jsonl' does not exist"):
        read_rows([str(tmp_path / "none.jsonl")])
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"a.csv': expected .parquet, .jsonl or a folder"):
        read_rows([str(tmp_path / "a.csv")])
