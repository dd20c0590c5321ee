"""Pairs of answers as token ids: every form in which they come, and what is wrong with a row."""

import json

import numpy as np
import pytest

from meshrl.config.supervised import PreferenceDataConfig
from meshrl.data.supervised_data import PairDataset


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def pairs(tmp_path, chat_tokenizer):
    def read(*rows, **keys):
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = PreferenceDataConfig(**({"max_length": 64, "shuffle": False} | keys))
        return PairDataset([str(file)], chat_tokenizer, config)

    return read


def texts(tokenizer, batch):
    """Of each row the whole text and that of the learned tokens."""
    found = []
    for ids, mask, learn in zip(
        *(batch.batch[n] for n in ("input_ids", "attention_mask", "response_mask")), strict=True
    ):
        found.append((tokenizer.decode(ids[mask.bool()]), tokenizer.decode(ids[learn.bool()])))
    return found


def test_texts_follow_the_prompt_and_end(pairs, chat_tokenizer):
    data = pairs(
        {"prompt": "1+1=", "chosen": "2", "rejected": "100"},
        {"prompt": "2+2=", "chosen": "4", "rejected": "0"},
    )
    assert len(data) == 2
    assert texts(chat_tokenizer, data.batch(np.array([1, 0]))) == [
        ("2+2=4<eos>", "4<eos>"),
        ("2+2=0<eos>", "0<eos>"),
        ("1+1=2<eos>", "2<eos>"),
        ("1+1=100<eos>", "100<eos>"),
    ]


def test_a_chat_prompt_is_rendered(pairs, chat_tokenizer):
    data = pairs({"prompt": [user("1")], "chosen": "2", "rejected": "3"})
    assert texts(chat_tokenizer, data.batch(np.array([0])))[0] == ("<user>1<eos><assistant>2<eos>", "2<eos>")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [user("1"), assistant("2")], "rejected": [user("1"), assistant("3")]},
        {"prompt": [user("1")], "chosen": [assistant("2")], "rejected": [assistant("3")]},
        {"prompt": "1", "chosen": [assistant("2")], "rejected": [assistant("3")]},
        # a prompt that is there as well, as many data sets have it
        {"prompt": "1", "chosen": [user("1"), assistant("2")], "rejected": [user("1"), assistant("3")]},
    ],
)
def test_messages_in_every_form(pairs, chat_tokenizer, row):
    assert texts(chat_tokenizer, pairs(row).batch(np.array([0]))) == [
        ("<user>1<eos><assistant>2<eos>", "2<eos>"),
        ("<user>1<eos><assistant>3<eos>", "3<eos>"),
    ]


def test_turns_that_both_have_are_part_of_the_prompt(pairs, chat_tokenizer):
    before = [user("1"), assistant("2"), user("3")]
    row = {"chosen": [*before, assistant("4")], "rejected": [*before, assistant("5"), user("6"), assistant("7")]}
    chosen, rejected = texts(chat_tokenizer, pairs(row).batch(np.array([0])))
    assert chosen == ("<user>1<eos><assistant>2<eos><user>3<eos><assistant>4<eos>", "4<eos>")
    assert rejected[1] == "5<eos>7<eos>"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "2", "rejected": "3"}, "row 1: the answers need a prompt, and there is no 'prompt'"),
        ({"prompt": "1", "chosen": 2, "rejected": "3"}, "both answers must be texts, or both lists .* chosen: 2"),
        ({"prompt": "1", "chosen": 2, "rejected": 2}, "both answers must be texts, or both lists"),
        ({"prompt": "1", "chosen": "2", "rejected": [assistant("3")]}, "both answers must be texts, or both lists"),
        (
            {"prompt": 5, "chosen": [assistant("2")], "rejected": [assistant("3")]},
            "the prompt must be a string .* got 5",
        ),
        (
            {"chosen": [user("1"), assistant("2")], "rejected": [user("2"), assistant("2")]},
            "the answers do not follow the same prompt: they differ in turn 1",
        ),
        (
            {"prompt": "9", "chosen": [user("1"), assistant("2")], "rejected": [assistant("3")]},
            "the answers do not follow the same prompt",
        ),
        (
            {"prompt": "1", "chosen": [assistant("2")], "rejected": [assistant("2"), user("3"), assistant("4")]},
            "differ in turn 3, not the assistant's",
        ),
        (
            {"chosen": [user("1"), assistant("2")], "rejected": [user("1")]},
            "one conversation is the beginning of the other",
        ),
        ({"prompt": "1", "chosen": "2" * 99, "rejected": "3"}, "prompt with the chosen answer has 101 tokens"),
    ],
)
def test_what_is_wrong_with_a_row_is_told_with_its_place(pairs, row, said):
    with pytest.raises(ValueError, match=said) as caught:
        pairs(row)
    assert "pairs.jsonl', row 1" in str(caught.value)


def test_long_ones_are_cut_and_counted(pairs, chat_tokenizer):
    row = {"prompt": "1+1=", "chosen": "2222", "rejected": "3"}
    data = pairs(row, max_length=6, truncation="right")
    assert data.truncated == 1
    assert texts(chat_tokenizer, data.batch(np.array([0])))[0] == ("1+1=22", "22")


def test_equal_answers_are_left_out_and_counted(pairs):
    same = {"prompt": "1", "chosen": [assistant("2")], "rejected": [assistant("2")]}
    data = pairs({"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "1", "chosen": "2", "rejected": "2"}, same)
    assert len(data) == 1
    assert data.equal == 2


def test_what_becomes_equal_is_left_out_as_well(pairs):
    row = {"prompt": "1+1=", "chosen": "223", "rejected": "224"}
    other = {"chosen": [user("1"), assistant("2") | {"id": 7}], "rejected": [user("1"), assistant("2")]}
    data = pairs(row, other, {"prompt": "1", "chosen": "2", "rejected": "3"}, max_length=6, truncation="right")
    assert (len(data), data.equal) == (1, 2)
    with pytest.raises(ValueError, match=r"all 1 pairs of .*pairs\.jsonl have equal answers"):
        pairs(row, max_length=6, truncation="right")


def test_what_a_template_writes_behind_the_end_is_no_part_of_an_answer(pairs, chat_tokenizer):
    """A policy ends with the end token, and there a reward model is asked: messages end as texts do."""
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("<eos>{%", "<eos>\n{%")
    before = [user("1")]
    texts_of = pairs({"prompt": before, "chosen": "2", "rejected": "3"}).batch(np.array([0]))
    answers = {"prompt": before, "chosen": [assistant("2")], "rejected": [assistant("3")]}
    messages_of = pairs(answers).batch(np.array([0]))
    for name in ("input_ids", "attention_mask", "response_mask"):
        assert messages_of.batch[name].equal(texts_of.batch[name])
    turns = [*before, assistant("2"), user("4"), assistant("5"), user("6")]
    longer = pairs({"chosen": turns, "rejected": [*before, assistant("3")]}).batch(np.array([0]))
    whole, learned = texts(chat_tokenizer, longer)[0]
    assert whole == "<user>1<eos>\n<assistant>2<eos>\n<user>4<eos>\n<assistant>5<eos>"
    assert learned == "2<eos>5<eos>"


def test_a_missing_column_is_named(pairs):
    with pytest.raises(ValueError, match="rejected"):
        pairs({"prompt": "1", "chosen": "2"})
