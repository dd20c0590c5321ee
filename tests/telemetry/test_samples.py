"""What is kept of generated samples, where, and that every kind of text and value can be written."""

import json

import numpy as np
import pytest
import torch

from meshrl.data.batch import DataProto, object_array
from meshrl.telemetry.run_folder import RunFolder
from meshrl.telemetry.samples import SampleLog


def batch(count: int, *, prompts=None, truths=None) -> DataProto:
    scores = torch.zeros(count, 3)
    scores[:, 1] = torch.arange(count) * 0.5
    return DataProto.from_dict(
        tensors={"token_level_scores": scores, "number": torch.arange(count)},
        non_tensors={
            "raw_prompt": object_array(prompts or [f"prompt {i}" for i in range(count)]),
            "ground_truth": object_array(truths or list(range(count))),
            "data_source": object_array(["s"] * count),
        },
    )


def decode(data: DataProto) -> list[str]:
    return [f"answer {i}" for i in data.batch["number"].tolist()]


def row(i: int, step: int, split: str) -> dict[str, object]:
    fields = {"prompt": f"prompt {i}", "response": f"answer {i}", "score": i * 0.5, "ground_truth": i}
    return {"step": step, "split": split, **fields, "data_source": "s"}


def read(file) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        yield folder


def test_a_few_go_into_the_run_folder(run):
    log = SampleLog(run, training_samples=2, validation_samples=3)
    log.log_training(batch(5), decode, 1)
    log.log_validation(batch(5), decode, 2)
    wanted = [row(i, 1, "train") for i in range(2)] + [row(i, 2, "val") for i in range(3)]
    assert run.read_generations() == wanted


def test_fewer_than_a_few_and_none_at_all(run):
    log = SampleLog(run, training_samples=4, validation_samples=0)
    log.log_training(batch(1), decode, 1)
    log.log_validation(batch(3), decode, 1)
    assert run.read_generations() == [row(0, 1, "train")]


def test_only_the_few_are_decoded_when_no_folder_asks_for_all(run):
    decoded = []

    def counting(data):
        decoded.append(len(data))
        return decode(data)

    SampleLog(run, training_samples=2).log_training(batch(100), counting, 1)
    assert decoded == [2]


def test_all_go_into_the_folders_asked_for(run, tmp_path):
    train, val = tmp_path / "deep" / "train", tmp_path / "val"
    log = SampleLog(run, training_samples=1, rollout_data_dir=str(train), validation_data_dir=str(val))
    log.log_training(batch(4), decode, 7)
    assert not val.exists()
    log.log_validation(batch(2), decode, 7)
    log.log_validation(batch(1), decode, 7)  # a validation of several batches
    assert read(train / "7.jsonl") == [row(i, 7, "train") for i in range(4)]
    assert read(val / "7.jsonl") == [row(i, 7, "val") for i in (0, 1, 0)]


def test_all_kinds_of_text_and_values(run, tmp_path):
    prompts = [[{"role": "user", "content": "zwölf"}], "half \ud83d of a pair", "line\nbreak \u2028"]
    truths = [np.int64(3), np.asarray([1.5, 2.5]), {"when": complex(1, 2)}]
    log = SampleLog(run, training_samples=3, rollout_data_dir=str(tmp_path / "all"))
    log.log_training(batch(3, prompts=prompts, truths=truths), decode, 1)
    for rows in (run.read_generations(), read_bytes(tmp_path / "all" / "1.jsonl")):
        assert [r["prompt"] for r in rows] == prompts
        assert [r["ground_truth"] for r in rows] == [3, [1.5, 2.5], {"when": "(1+2j)"}]


def read_bytes(file) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line]


def test_a_decoder_that_loses_a_sample_is_noticed(run):
    with pytest.raises(ValueError, match="longer"):
        SampleLog(run).log_training(batch(2), lambda data: ["only one"], 1)


def test_a_validation_in_several_batches_has_as_many_samples_as_in_one(run):
    log = SampleLog(run, validation_samples=3)
    for step in (5, 10):
        for _ in range(4):
            log.log_validation(batch(2), decode, step)
    assert [(r["step"], r["response"]) for r in run.read_generations()] == [
        (step, f"answer {i}") for step in (5, 10) for i in (0, 1, 0)
    ]


def test_the_samples_of_an_earlier_run_move_aside(tmp_path):
    every = tmp_path / "all"
    for number, name in enumerate(("first", "second")):
        with RunFolder(tmp_path / name) as run:
            log = SampleLog(run, rollout_data_dir=str(every), validation_data_dir=str(every))
            for step in range(1, 4 - number):
                log.log_training(batch(number + 1), decode, step)
            log.log_validation(batch(1), decode, 1)
    assert len(read(every / "1.jsonl")) == 3
    assert sorted(file.name for file in every.glob("*.jsonl")) == ["1.jsonl", "2.jsonl"]
    assert sorted(file.name for file in (every / "previous-1").iterdir()) == ["1.jsonl", "2.jsonl", "3.jsonl"]
    with RunFolder(tmp_path / "second", resume=True, last_step=1) as run:
        SampleLog(run, rollout_data_dir=str(every)).log_training(batch(1), decode, 2)
    assert not (every / "previous-2").exists()
    assert len(read(every / "2.jsonl")) == 1
