"""Data files are looked at before a run starts: what cannot be trained on is said in one line, with the key."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrl.config import PPOConfig, SFTConfig, check_config
from meshrl.config.validate_data import glance

MakePPO = Callable[..., PPOConfig]
MakeSFT = Callable[..., SFTConfig]


def table(path: Path, **columns: list[str]) -> Path:
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", "a.jsonl has no rows"),
        ("a.jsonl", "\n \n", "a.jsonl has no rows"),
        ("a.jsonl", "{not json}\n", "the first line of"),
        ("a.json", '[{"prompt": "a"}]\n', "is a list: each line must be a JSON object"),
        ("a.jsonl", '{"question": "a", "answer": "b"}\n', "no column 'prompt' (it has: question, answer)"),
        ("a.parquet", "hello", "is not a readable parquet file"),
        ("a.csv", "prompt\n", "is none of .parquet, .jsonl, .json, nor a folder"),
        ("a.jsonl", None, "there is no "),
    ],
)
def test_files_that_cannot_be_used(fine: MakePPO, tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    for key in ("data.train_files", "data.val_files"):
        (problem,) = check_config(fine(f"{key}={tmp_path / name}"))
        assert problem.startswith(f"{key}: ")
        assert words in problem


def test_tables_without_the_column_or_without_rows(fine: MakePPO, tmp_path: Path) -> None:
    (problem,) = check_config(fine(f"data.val_files={table(tmp_path / 'a.parquet', question=['a'])}"))
    assert problem.endswith("has no column 'prompt' (it has: question): name the right one with data.prompt_key")
    (problem,) = check_config(fine(f"data.val_files={table(tmp_path / 'b.parquet', prompt=[])}"))
    assert problem.endswith("b.parquet has no rows")
    assert check_config(fine(f"data.val_files={table(tmp_path / 'c.parquet', prompt=['a'])}")) == []


def test_chat_messages_need_a_chat_template(fine: MakePPO, fine_sft: MakeSFT, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": "42"}]
    lines, columns = tmp_path / "chat.jsonl", tmp_path / "chat.parquet"
    lines.write_text(json.dumps({"prompt": turns[:1], "messages": turns}) + "\n")
    pq.write_table(pa.table({"prompt": [turns[:1]]}), columns)
    for file in (lines, columns):
        (problem,) = check_config(fine(f"data.val_files={file}"))
        assert f"data.val_files: {file} has chat messages in 'prompt' (data.prompt_key), but " in problem
        assert problem.endswith(
            "model has no chat template: put one there as chat_template.jinja, set actor_rollout_ref.model."
            "tokenizer_path to a folder that has one, or write plain text"
        )
    (problem,) = check_config(fine_sft(f"data.train_files=[{lines}]", "data.messages_key=messages"))
    assert "in 'messages' (data.messages_key)" in problem
    assert "set model.tokenizer_path" in problem
    assert check_config(fine(f"data.val_files={lines}", "actor_rollout_ref.model.trust_remote_code=true")) == []
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert check_config(fine(f"data.val_files=[{lines},{columns}]")) == []


def test_a_damaged_table(fine: MakePPO, tmp_path: Path) -> None:
    """Its last bytes say where the description begins, but that is not readable."""
    path = table(tmp_path / "a.parquet", prompt=["a"] * 100)
    content = bytearray(path.read_bytes())
    content[-60:-8] = b"\xff" * 52
    path.write_bytes(content)
    (problem,) = check_config(fine(f"data.val_files={path}"))
    assert problem.startswith("data.val_files: ")
    assert str(path) in problem


def test_a_weighted_stream_begins_its_files_anew(fine: MakePPO, tmp_path: Path) -> None:
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file in files:
        file.write_text('{"prompt": "a"}\n' * 3)
    words = f"data.train_files=[{files[0]},{files[1]}]", "data.streaming=true"
    assert any("6 rows together" in problem for problem in check_config(fine(*words)))
    assert check_config(fine(*words, "data.train_weights=[1,1]", "trainer.total_training_steps=4")) == []


def test_fewer_rows_than_a_batch(fine: MakePPO, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", table(tmp_path / "second.parquet", prompt=["a"] * 24)
    first.write_text('{"prompt": "a"}\n' * 1000)
    (problem,) = check_config(fine(f"data.train_files={first}"))
    assert "1000 rows together, fewer than one batch of 1024" in problem
    assert check_config(fine(f"data.train_files=[{first},{second}]")) == []
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").touch()  # what is not counted is not too little
    assert check_config(fine(f"data.train_files={saved}")) == []


def test_folders_and_lists_that_are_none(fine: MakePPO, tmp_path: Path) -> None:
    (problem,) = check_config(fine(f"data.train_files={tmp_path}"))
    assert problem.endswith("is a folder, but none that datasets' save_to_disk wrote")
    (tmp_path / "dataset_dict.json").touch()
    (problem,) = check_config(fine(f"data.train_files={tmp_path}"))
    assert "holds several splits: name one, such as" in problem
    (problem,) = check_config(fine("data.val_files='a.jsonl,b.jsonl'"))
    assert problem == "data.val_files: there is no a.jsonl,b.jsonl; write several as [a.jsonl,b.jsonl]"


def test_columns_of_demonstrations(fine_sft: MakeSFT, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "a", "messages": None}) + "\n")
    (problem,) = check_config(fine_sft(f"data.val_files={file}"))
    assert "no column 'response'" in problem
    assert "data.response_key" in problem
    several = check_config(fine_sft(f"data.val_files={file}", "data.messages_key=messages"))
    assert [problem.partition(" has ")[2] for problem in several] == [
        "no column 'messages' (it has: prompt, response): name the right one with data.messages_key"
    ]


def test_lines_are_counted_only_as_far_as_needed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\ufeff" + '{"prompt": "a"}\n' * 3 + "{broken far below}\n", encoding="utf-8")
    assert glance(file, enough=2).rows == 2
    assert glance(file, enough=9).rows == 4
    assert glance(file, enough=9).columns == ("prompt",)
