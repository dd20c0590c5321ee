"""Streamed prompts: the same rows as the whole data, read a little at a time, repeatable and resumable."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from meshrl.config.data import DataConfig
from meshrl.data import prompts
from meshrl.data.prompts import PromptDataset, PromptStream, mixed, shuffled
from meshrl.data.row_files import read_rows, stream_rows

LENGTHS = {"a.jsonl": 11, "b.jsonl": 7, "c.jsonl": 5}


@pytest.fixture
def files(tmp_path):
    number = itertools.count()
    for name, rows in LENGTHS.items():
        lines = [{"prompt": str(10 ** (n % 4) + n), "data_source": name} for n in itertools.islice(number, rows)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(tmp_path / name) for name in LENGTHS]


def make(files, tokenizer, size=4, seed=1, **options):
    config = DataConfig(streaming=True, shuffle_buffer=options.pop("buffer", 6), **options)
    return PromptStream(files, tokenizer, config, size, seed)


def take(prompts, count):
    found = []
    for numbers in itertools.islice(iter(prompts), count):
        batch = prompts.batch(numbers)
        found.append(list(batch.non_tensor_batch["raw_prompt"]))
    return found


def test_an_epoch_is_every_row_once_and_epochs_differ(files, tokenizer):
    prompts = make(files, tokenizer, size=23)
    first, second = take(prompts, 2)
    everything = [row["prompt"] for row in read_rows(files)]
    assert Counter(first) == Counter(second) == Counter(everything)
    assert first != second != everything
    assert take(make(files, tokenizer, size=23), 2) == [first, second]
    assert take(make(files, tokenizer, size=23, seed=2), 1) != [first]
    assert take(make(files, tokenizer, size=23, shuffle=False), 1) == [everything]


def test_batches_are_those_of_the_whole_data_set(files, tokenizer):
    prompts = make(files, tokenizer, shuffle=False)
    whole = PromptDataset(files, tokenizer, DataConfig())
    for number, rows in enumerate(itertools.islice(iter(prompts), 5)):
        ours, theirs = prompts.batch(rows), whole.batch(np.arange(4 * number, 4 * number + 4))
        for name in ("input_ids", "attention_mask"):
            assert ours.batch[name].tolist() == theirs.batch[name].tolist()
        for name, column in theirs.non_tensor_batch.items():
            assert list(ours.non_tensor_batch[name]) == list(column)


@pytest.mark.parametrize("weights", [[], [1.0, 2.0, 1.0]])
def test_it_goes_on_where_it_stood(files, tokenizer, weights):
    whole = take(make(files, tokenizer, train_weights=weights), 13)
    for done in (0, 1, 4, 5, 6, 12):
        first = make(files, tokenizer, train_weights=weights)
        take(first, done)
        later = make(files, tokenizer, train_weights=weights)
        later.load_state_dict(first.state_dict())
        assert take(later, 13 - done) == whole[done:]


def test_weights_are_shares_of_endless_files(files, tokenizer):
    prompts = make(files, tokenizer, size=8, train_weights=[1.0, 2.0, 1.0])
    counts = Counter()
    for numbers in itertools.islice(iter(prompts), 10):
        counts.update(prompts.batch(numbers).non_tensor_batch["data_source"])
    assert counts == {"a.jsonl": 20, "b.jsonl": 40, "c.jsonl": 20}
    assert prompts.epoch == 0


def test_dropped_prompts_are_no_part_of_a_share(files, tokenizer):
    options = {"max_prompt_length": 3, "filter_overlong_prompts": True, "train_weights": [1.0, 2.0, 1.0]}
    prompts = make(files, tokenizer, size=8, **options)
    counts = Counter()
    for numbers in itertools.islice(iter(prompts), 10):
        counts.update(prompts.batch(numbers).non_tensor_batch["data_source"])
    assert counts == {"a.jsonl": 20, "b.jsonl": 40, "c.jsonl": 20}
    assert prompts.metrics()["data/dropped_prompts"] > 0


def test_a_resumed_stream_counts_on(files, tokenizer):
    options = {"max_prompt_length": 3, "filter_overlong_prompts": True}
    whole = make(files, tokenizer, **options)
    expected = []
    for _ in itertools.islice(iter(whole), 9):
        expected.append((whole.epoch, whole.metrics()))
    assert expected[-1][0] >= 2
    for done in range(9):
        first, later = make(files, tokenizer, **options), make(files, tokenizer, **options)
        take(first, done)
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        take(later, 1)
        assert (later.epoch, later.metrics()) == expected[done]
    later.load_state_dict({"epoch": 1, "position": 0})  # as an older version wrote it


def test_long_prompts_are_dropped_or_cut_and_counted(files, tokenizer):
    dropping = make(files, tokenizer, max_prompt_length=3, filter_overlong_prompts=True, shuffle=False)
    kept = [row["prompt"] for row in read_rows(files) if len(row["prompt"]) <= 3]
    assert list(itertools.chain(*take(dropping, len(kept) // 4))) == kept[: len(kept) // 4 * 4]
    assert dropping.metrics()["data/dropped_prompts"] > 0
    cutting = make(files, tokenizer, max_prompt_length=3, truncation="left", shuffle=False)
    numbers = next(iter(cutting))
    assert cutting.batch(numbers).batch["input_ids"].shape == (4, 3)
    assert cutting.metrics()["data/truncated_prompts"] == 1
    with pytest.raises(ValueError, match=r"gives 0 prompts, fewer than one batch of 4 .23 were dropped"):
        take(make(files, tokenizer, max_prompt_length=0, filter_overlong_prompts=True), 1)


def test_only_a_buffer_is_read_ahead(files, tokenizer, monkeypatch):
    read = []

    def watched(file, required=()):
        for row in stream_rows(file, required):
            read.append(row)
            yield row

    monkeypatch.setattr(prompts, "stream_rows", watched)
    take(make(files, tokenizer, buffer=5), 1)
    assert len(read) == 4 + 5
    read.clear()
    take(make(files, tokenizer, shuffle=False), 1)
    assert len(read) == 4


def test_shuffling_mixes_far_and_wide():
    rows = [{"n": n} for n in range(500)]
    out = [row["n"] for row in shuffled(iter(rows), 100, np.random.default_rng(0))]
    assert sorted(out) == list(range(500))
    assert np.abs(np.array(out) - np.arange(500)).mean() > 40
    none = [row["n"] for row in shuffled(iter(rows), 1, np.random.default_rng(0))]
    assert none == list(range(500))


def test_mixing_takes_from_each_in_turn():
    sources = [iter([{"n": n} for n in range(k, k + 9)]) for k in (0, 100)]
    out = [row["n"] for row in itertools.islice(mixed(sources, (1, 1)), 6)]
    assert out == [0, 100, 1, 101, 2, 102]


def test_parquet_and_saved_data_sets_stream_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": str(n), "extra_info": {"n": n}} for n in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    assert list(stream_rows(str(tmp_path / "a.parquet"), ("prompt",))) == rows
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ValueError, match="not a readable parquet"):
        list(stream_rows(str(tmp_path / "bad.parquet")))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="has no rows"):
        list(stream_rows(str(tmp_path / "empty.jsonl")))
    with pytest.raises(FileNotFoundError):
        list(stream_rows(str(tmp_path / "gone.jsonl")))
    with pytest.raises(ValueError, match="row 1: column 'answer' is missing"):
        list(stream_rows(str(tmp_path / "a.parquet"), ("answer",)))
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert list(stream_rows(str(tmp_path / "saved"), ("prompt",))) == rows


def test_a_stream_without_a_fitting_prompt_is_not_read_for_ever(files, tokenizer, monkeypatch):
    monkeypatch.setattr(prompts, "MOST_DROPPED", 50)
    options = {"max_prompt_length": 0, "filter_overlong_prompts": True, "train_weights": [1.0, 1.0, 1.0]}
    with pytest.raises(ValueError, match=r"the last 50 prompts were all over data.max_prompt_length=0"):
        take(make(files, tokenizer, **options), 1)


@pytest.mark.parametrize("weights", [[], [1.0, 1.0, 1.0]])
def test_errors_name_the_file_and_its_row(files, tokenizer, weights):
    rows = read_rows([files[1]])
    for bad, words in (("1" * 9, "has 9 tokens, more than"), ("", "has no tokens"), (7, "must be a string")):
        rows[5]["prompt"] = bad
        with open(files[1], "w") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        prompts = make(files, tokenizer, train_weights=weights, max_prompt_length=8)
        with pytest.raises(ValueError, match=rf"data file '{files[1]}', row 6: the prompt {words}"):
            take(prompts, 20)
