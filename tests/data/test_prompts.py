"""Prompts as they come out of files: tokens, padding, what else a row carries, and the rules for long ones."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrl.config.data import CustomDatasetConfig, DataConfig
from meshrl.data.batch import object_array
from meshrl.data.prompts import PromptDataset, PromptStream, ground_truth, truncate
from meshrl.data.tokenize import encode_prompt


@pytest.fixture
def dataset(tmp_path, tokenizer):
    """Writes rows and reads them as a dataset, with any settings."""

    def make(rows, tokenizer=tokenizer, **settings):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PromptDataset([str(file)], tokenizer, DataConfig(**settings))

    return make


def prompts(*texts):
    return [{"prompt": text} for text in texts]


def test_a_batch_is_padded_on_the_left_to_its_longest_prompt(dataset, tokenizer):
    data = dataset(prompts("12+3=", "4", "a+b"))
    batch = data.batch(np.asarray([2, 0, 1]))
    assert batch.batch["input_ids"].dtype == torch.int64
    for row, text in enumerate(["a+b", "12+3=", "4"]):
        ids, mask = batch.batch["input_ids"][row], batch.batch["attention_mask"][row]
        assert mask.tolist() == [0] * (5 - len(text)) + [1] * len(text)
        assert tokenizer.decode(ids[mask.bool()]) == text
        assert set(ids[~mask.bool()].tolist()) <= {tokenizer.pad_token_id}
    assert data.batch(np.asarray([1])).batch["input_ids"].shape == (1, 1)


def test_what_a_row_carries_beside_its_prompt(dataset):
    rows = [
        {"prompt": "1", "data_source": "gsm", "reward_model": {"ground_truth": "7"}, "extra_info": {"n": [1, 2]}},
        {"prompt": "2", "answer": 5, "extra_info": None},
        {"prompt": "3", "ground_truth": [1, 2], "answer": "no", "reward_model": {"style": "rule"}},
    ]
    batch = dataset(rows).batch(np.asarray([0, 1, 2, 0]))
    fields = {name: values.tolist() for name, values in batch.non_tensor_batch.items()}
    assert fields["data_source"] == ["gsm", "unknown", "unknown", "gsm"]
    assert fields["ground_truth"] == ["7", 5, [1, 2], "7"]
    assert fields["extra_info"] == [{"n": [1, 2]}, {}, {}, {"n": [1, 2]}]
    assert fields["raw_prompt"] == ["1", "2", "3", "1"]
    assert len(set(fields["uid"])) == 4  # also for a row that is drawn twice


def test_other_column_names(dataset):
    rows = [{"question": "1+1", "set": "s", "prompt": "wrong"}]
    data = dataset(rows, prompt_key="question", reward_fn_key="set")
    assert data.batch(np.asarray([0])).non_tensor_batch["raw_prompt"].tolist() == ["1+1"]
    assert data.batch(np.asarray([0])).non_tensor_batch["data_source"].tolist() == ["s"]
    with pytest.raises(ValueError, match="column 'prompt' is missing"):
        dataset([{"question": "1"}])


LONG = "0123456789"


@pytest.mark.parametrize(
    ("where", "limit", "wanted"),
    [
        ("left", 4, "6789"),
        ("right", 4, "0123"),
        ("middle", 4, "0189"),
        ("middle", 5, "01789"),
        ("middle", 1, "9"),
        ("left", 1, "9"),
        ("right", 1, "0"),
    ],
)
def test_long_prompts_are_cut(dataset, tokenizer, where, limit, wanted):
    data = dataset(prompts("1", LONG, "2"), max_prompt_length=limit, truncation=where)
    assert [tokenizer.decode(ids) for ids in data.prompts] == ["1", wanted, "2"]
    assert (data.truncated, data.dropped) == (1, 0)


@pytest.mark.parametrize("where", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", range(1, 12))
def test_a_cut_keeps_exactly_the_limit_in_order(where, limit):
    ids = np.arange(12)
    cut = truncate(ids, limit, where)
    assert len(cut) == limit
    assert (np.diff(cut) > 0).all()


def test_a_prompt_of_just_the_limit_stays(dataset):
    data = dataset(prompts(LONG), max_prompt_length=10)
    assert (len(data), data.truncated, data.dropped) == (1, 0, 0)


def test_long_prompts_are_an_error_unless_configured(dataset):
    with pytest.raises(
        ValueError, match=r"row 2: the prompt has 10 tokens, more than data.max_prompt_length=4: raise it, or"
    ):
        dataset(prompts("1", LONG), max_prompt_length=4)


def test_long_prompts_are_dropped_and_counted_with_their_rows(dataset):
    data = dataset(prompts(LONG, "1", LONG, "2"), max_prompt_length=4, filter_overlong_prompts=True, truncation="left")
    assert (len(data), data.dropped, data.truncated) == (2, 2, 0)
    assert data.batch(np.asarray([1])).non_tensor_batch["raw_prompt"].tolist() == ["2"]
    with pytest.raises(ValueError, match=r"no prompt of 1 row is left within data.max_prompt_length=4"):
        dataset(prompts(LONG), max_prompt_length=4, filter_overlong_prompts=True)


def test_chat_prompts_end_where_the_assistant_begins(dataset, chat_tokenizer):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    batch = dataset([{"prompt": messages}] * 2, chat_tokenizer).batch(np.asarray([0, 1]))
    assert chat_tokenizer.decode(batch.batch["input_ids"][0]) == "<system>add<eos><user>1+1<eos><assistant>"
    assert batch.non_tensor_batch["raw_prompt"].shape == (2,)
    assert batch.non_tensor_batch["raw_prompt"][1] == messages


def test_chat_prompts_from_parquet(tmp_path, chat_tokenizer):
    messages = [{"role": "user", "content": "2+2"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages}]), tmp_path / "a.parquet")
    data = PromptDataset([str(tmp_path / "a.parquet")], chat_tokenizer, DataConfig())
    assert chat_tokenizer.decode(data.prompts[0]) == "<user>2+2<eos><assistant>"


def test_chat_prompts_without_a_template(dataset):
    with pytest.raises(ValueError, match="no chat template"):
        dataset([{"prompt": [{"role": "user", "content": "1"}]}])


@pytest.mark.parametrize("bad", [[], ["text"], [{"role": "user"}], {"role": "user", "content": "1"}, 5, [1, 2]])
def test_what_is_no_prompt_is_named(dataset, chat_tokenizer, bad):
    with pytest.raises(ValueError, match="row 2: the prompt must be a string or a list of messages"):
        dataset([{"prompt": "1"}, {"prompt": bad}], chat_tokenizer)


def test_an_empty_prompt_is_named(dataset):
    with pytest.raises(ValueError, match="row 2: the prompt has no tokens: ''"):
        dataset(prompts("1", ""))


def test_encode_prompt_gives_int64(tokenizer):
    ids = encode_prompt(tokenizer, "12", 0)
    assert (ids.dtype, ids.tolist()) == (np.int64, tokenizer.convert_tokens_to_ids(["1", "2"]))


@pytest.mark.parametrize("values", [[[1, 2], [3, 4]], [(1,), (2,)], [np.ones(2), np.zeros(2)], [{}, None], [], ["ab"]])
def test_object_arrays_are_one_dimensional(values):
    array = object_array(values)
    assert (array.shape, array.dtype) == ((len(values),), object)
    assert all(a is b for a, b in zip(array, values, strict=True))


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({}, None),
        ({"answer": 0}, 0),
        ({"reward_model": {"ground_truth": ""}, "answer": 1}, ""),
        ({"reward_model": "rule", "answer": 1}, 1),
    ],
)
def test_ground_truth(row, wanted):
    assert ground_truth(row) == wanted


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_name_the_file_and_its_row(tmp_path, chat_tokenizer, processes):
    """Of several files, and also where the chat template or the tokenizer itself refuses a row."""
    chat_tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    for bad in (LONG, "", "\ud800", 5, [{"role": "user", "content": "1"}]):
        for name, rows in (("a", ["1", "2"]), ("b", ["3", bad, "4"])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
        config = DataConfig(max_prompt_length=4, filter_overlong_prompts_workers=processes)
        with pytest.raises(ValueError, match=r"data file '.*b.jsonl', row 2: the prompt (has|must|cannot)"):
            PromptDataset(files, chat_tokenizer, config)


ROWS = """
class Sums:
    def __init__(self, files, tokenizer, config):
        self.numbers, self.key = [int(file) for file in files], config.prompt_key
        self.pad = tokenizer.pad_token_id

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, at):
        if at == 7:
            raise KeyError("seven")
        number = self.numbers[at]
        if number < 0:
            return {"input_ids": [1], "attention_mask": [1]}
        return {self.key: f"{number}+1=", "data_source": "sums", "ground_truth": str(number + 1)}
"""


def test_rows_of_a_custom_class_are_those_of_a_file(dataset, tmp_path, tokenizer):
    (tmp_path / "sums.py").write_text(ROWS)
    custom = CustomDatasetConfig(str(tmp_path / "sums.py"), "Sums")
    numbers = [3, 14, 15]
    own = PromptDataset([str(n) for n in numbers], tokenizer, DataConfig(custom_cls=custom))
    rows = [{"prompt": f"{n}+1=", "data_source": "sums", "ground_truth": str(n + 1)} for n in numbers]
    ours, theirs = (data.batch(np.arange(3)) for data in (own, dataset(rows)))
    assert own.rows == rows
    assert torch.equal(ours.batch["input_ids"], theirs.batch["input_ids"])
    for name in ("data_source", "ground_truth", "raw_prompt"):
        assert ours.non_tensor_batch[name].tolist() == theirs.non_tensor_batch[name].tolist()
    with pytest.raises(ValueError, match="row 1 of Sums: the prompt has 4 tokens, more than"):
        PromptDataset(["3"], tokenizer, DataConfig(custom_cls=custom, max_prompt_length=3))
    with pytest.raises(ValueError, match=r"row 2 of Sums must be a mapping with 'prompt' .* it has input_ids, att"):
        PromptDataset(["3", "-1"], tokenizer, DataConfig(custom_cls=custom))
    with pytest.raises(ValueError, match=r"Sums has no rows for \[\]"):
        PromptDataset([], tokenizer, DataConfig(custom_cls=custom))
    with pytest.raises(RuntimeError, match="Sums failed: KeyError: 'seven'"):
        PromptDataset(["3"] * 8, tokenizer, DataConfig(custom_cls=custom))


def test_only_so_many_samples_are_taken_of_all_files(tmp_path, tokenizer):
    files = []
    for name, texts in (("a", "012"), ("b", "3456789")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        files.append(str(tmp_path / f"{name}.jsonl"))

    def taken(max_samples, **settings):
        data = PromptDataset(files, tokenizer, DataConfig(**settings), max_samples=max_samples)
        return "".join(row["prompt"] for row in data.rows), data.source_of_row.tolist()

    assert taken(5, shuffle=False) == ("01234", [0, 0, 0, 1, 1])
    assert taken(-1)[0] == taken(99)[0] == "0123456789"
    drawn = {seed: taken(5, seed=seed)[0] for seed in range(6)}
    assert all(len(set(texts)) == 5 and sorted(texts) == list(texts) for texts in drawn.values())
    assert len(set(drawn.values())) > 1


def test_variables_of_the_chat_template_reach_every_way_of_reading(dataset, tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template += "{% if not enable_thinking | default(true) %}=={% endif %}"
    rows = [{"prompt": [{"role": "user", "content": "1+1"}]}] * 3 + prompts("2")
    off = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    wanted = ["<user>1+1<eos><assistant>=="] * 3 + ["2"]
    assert chat_tokenizer.decode(dataset(rows, chat_tokenizer).prompts[0]) == wanted[0][:-2]
    for more in ({}, {"filter_overlong_prompts_workers": 2}):
        assert [chat_tokenizer.decode(ids) for ids in dataset(rows, chat_tokenizer, **off, **more).prompts] == wanted
    config = DataConfig(streaming=True, shuffle=False, **off)
    stream = PromptStream([str(tmp_path / "data.jsonl")], chat_tokenizer, config, 4, 0)
    batch = stream.batch(next(iter(stream))).batch
    texts = [
        chat_tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts == wanted
