"""Judged answers: what a row becomes, whose answers stand in for others, what is refused."""

import json

import numpy as np
import pytest
import torch

from meshrl.config.supervised import PreferenceDataConfig
from meshrl.data.supervised_data import JudgedDataset, next_of_another_prompt


@pytest.fixture
def read(chat_tokenizer, tmp_path):
    def made(rows, **settings):
        file = tmp_path / "judged.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = PreferenceDataConfig(**{"max_length": 32, "shuffle": False} | settings)
        return JudgedDataset([str(file)], chat_tokenizer, config)

    return made


def texts(tokenizer, ids, mask):
    """Prompt and answer of each row, as texts."""
    return [
        (tokenizer.decode(row[: int(where.int().argmax())]), tokenizer.decode(row[where]))
        for row, where in zip(ids, mask.bool(), strict=True)
    ]


ROWS = [
    {"prompt": "1>", "response": "2", "label": True},
    {"prompt": "1>", "response": "34", "label": False},
    {"prompt": "22>", "response": "567", "label": 1},
]


def test_rows_become_answers_and_answers_to_other_prompts(read, chat_tokenizer):
    data = read(ROWS)
    batch = data.batch(np.array([2, 0, 1])).batch
    assert batch["good"].tolist() == [True, True, False]
    own = texts(chat_tokenizer, batch["input_ids"], batch["response_mask"])
    assert [(p.replace("<pad>", ""), a) for p, a in own] == [("22>", "567<eos>"), ("1>", "2<eos>"), ("1>", "34<eos>")]
    others = texts(chat_tokenizer, batch["other_input_ids"], batch["other_response_mask"])
    assert others == [("22>", "2<eos>"), ("1>", "567<eos>"), ("1>", "567<eos>")]
    assert batch["other_attention_mask"].sum(1).tolist() == [5, 6, 6]
    assert data.remarks() == []


def test_messages_follow_the_prompt(read, chat_tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": "1"}], "response": [{"role": "assistant", "content": "2"}], "label": 0},
        {"prompt": "3", "response": [{"role": "assistant", "content": "44"}], "label": 0},
    ]
    data = read(rows)
    batch = data.batch(np.arange(2)).batch
    answers = [answer for _, answer in texts(chat_tokenizer, batch["input_ids"], batch["response_mask"])]
    assert answers == ["2<eos>", "44<eos>"]
    assert data.remarks() == ["all 2 answers are bad"]


def test_what_is_too_long_is_cut_or_refused(read):
    rows = [*ROWS, {"prompt": "1" * 20, "response": "2" * 20, "label": True}]
    with pytest.raises(ValueError, match=r"row 4: .*has 41 tokens, more than data.max_length=32"):
        read(rows)
    data = read(rows, truncation="right")
    assert data.remarks() == ["1 of 4 answers truncated"]
    batch = data.batch(np.arange(4)).batch
    assert batch["input_ids"].shape[1] == 32
    assert batch["other_input_ids"].shape[1] <= 32


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"label": "yes"}, "the label 'label' must be true or false, 1 or 0, got 'yes'"),
        ({"label": 2}, "must be true or false"),
        ({"label": None}, "column 'label' is missing or null"),
        ({"response": 3}, "the answer must be a text or a list of messages"),
        ({"response": [{"role": "user", "content": "2"}]}, "begins with the assistant"),
        ({"prompt": None}, "column 'prompt' is missing or null"),
    ],
)
def test_wrong_rows_are_named(read, row, said):
    with pytest.raises(ValueError, match="row 2") as caught:
        read([ROWS[0], ROWS[2] | row])
    assert said in str(caught.value)


def test_one_prompt_is_too_few(read):
    with pytest.raises(ValueError, match="have the same prompt"):
        read(ROWS[:2])


def test_the_next_of_another_prompt():
    assert next_of_another_prompt([b"a", b"a", b"b", b"c", b"c"]) == [2, 2, 3, 0, 0]
    assert next_of_another_prompt([b"a", b"b", b"a", b"a"]) == [1, 2, 1, 1]
    assert next_of_another_prompt([b"a", b"a"]) is None
    random = np.random.default_rng(0)
    prompts = [bytes([x]) for x in random.integers(0, 3, 50)]
    for at, other in enumerate(next_of_another_prompt(prompts)):
        between = [prompts[(at + k) % 50] for k in range((other - at) % 50)]
        assert prompts[other] != prompts[at]
        assert set(between) == {prompts[at]}


def test_columns_are_as_wide_as_their_longest(read):
    batch = read(ROWS).batch(np.array([0])).batch
    assert batch["input_ids"].shape == torch.Size([1, 4])
    assert batch["other_input_ids"].shape == torch.Size([1, 6])
