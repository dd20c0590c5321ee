"""The calculator, and the task that is learned with it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from meshrl.agents.calculator import calculator, compute_score, evaluate
from meshrl.agents.calculator_task import (
    CALL_BEGIN,
    CALL_END,
    DEMONSTRATIONS,
    HELD_OUT,
    calculator_tokenizer,
    demonstration,
    make_calculator_model,
    write_calculator_data,
)
from meshrl.agents.messages import ToolCall
from meshrl.agents.parsers import HermesParser
from meshrl.config.load import load_config
from meshrl.config.supervised import SFTConfig
from meshrl.data.prompts import PromptDataset
from meshrl.data.supervised_data import DemonstrationDataset
from meshrl.models.loading import load_tokenizer, stop_token_ids


@pytest.mark.parametrize("seed", range(30))
def test_it_computes_what_python_computes(seed):
    rng = random.Random(seed)
    expression = str(rng.randrange(1, 99))
    for _ in range(rng.randrange(1, 6)):
        expression += rng.choice(["+", "-", "*", " // ", "%", "+(3-"]) + str(rng.randrange(1, 50))
    expression += ")" * expression.count("(")
    assert evaluate(expression) == eval(expression)


def test_powers_divisions_and_signs():
    assert evaluate("2**10") == 1024
    assert evaluate("7/2") == 3.5
    assert evaluate("8/2") == 4
    assert str(evaluate("8/2")) == "4"
    assert evaluate("-(3-5)") == 2
    assert evaluate(" 1.5*2 ") == 3


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "a+1", "9**9**9", "2**1000", "1;2", "", "(1", "'a'*9", "True+1", "[1]*9", "1" * 201, "f(1)",
     "(-8)**0.5", "(" * 150 + "1" + ")" * 40],
)  # fmt: skip
def test_anything_else_is_refused_at_once(expression):
    with pytest.raises(ValueError):
        evaluate(expression)


def test_the_tool():
    assert asyncio.run(calculator("12*34")) == "408"
    assert calculator.schema()["function"]["parameters"]["required"] == ["expression"]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(calculator("1/0"))


def test_a_call_takes_few_tokens_and_is_read_as_hermes():
    tokenizer = calculator_tokenizer()
    ids = tokenizer(f"{CALL_BEGIN}12*34{CALL_END}")["input_ids"]
    assert len(ids) == 7
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert HermesParser().parse(text).calls == [ToolCall("calculator", {"expression": "12*34"})]


def test_data_and_model_fit_the_recipes(tmp_path):
    files = write_calculator_data(tmp_path, seed=3)
    again = write_calculator_data(tmp_path / "again", seed=4)
    rows = {name: [json.loads(line) for line in Path(path).read_text().splitlines()] for name, path in files.items()}

    def questions(name):
        return {(row.get("prompt") or row["messages"])[0]["content"] for row in rows[name]}

    assert len(questions("held_out")) == HELD_OUT
    assert len(questions("demonstrations")) == DEMONSTRATIONS
    assert not questions("held_out") & (questions("prompts") | questions("demonstrations"))
    assert Path(files["held_out"]).read_text() == Path(again["held_out"]).read_text()
    assert Path(files["prompts"]).read_text() != Path(again["prompts"]).read_text()
    share = sum(len(row["messages"]) == 4 for row in rows["demonstrations"]) / DEMONSTRATIONS
    assert 0.2 < share < 0.3
    for row in rows["prompts"][:50]:
        assert int(row["ground_truth"]) == eval(row["prompt"][0]["content"])

    folder = make_calculator_model(tmp_path / "model", num_hidden_layers=1, hidden_size=32)
    tokenizer = load_tokenizer(str(folder), False)
    assert stop_token_ids(str(folder), tokenizer) == [tokenizer.eos_token_id]
    for name, path in files.items():  # enough of them
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows[name][:60]))
    config = load_config("calculator").config
    assert PromptDataset([files["prompts"]], tokenizer, config.data).dropped == 0
    sft = load_config("calculator_sft", root=SFTConfig).config
    data = DemonstrationDataset([files["demonstrations"]], tokenizer, sft.data)
    ids, learn = data.sequences[next(i for i, row in enumerate(rows["demonstrations"]) if len(row["messages"]) == 4)]
    text = tokenizer.decode(ids)
    learned = tokenizer.decode(ids[learn])
    assert text.replace("<user>", "").count("<") == 2 + 1 + 2 + 2  # call, tool, two turns, two ends
    assert "<tool>" not in learned
    assert learned.count("<eos>") == 2


def test_the_reward_counts_the_last_words_only():
    call = f"{CALL_BEGIN}3*4{CALL_END}"

    def score(text):
        return compute_score("calculator", text, "12", {})

    assert score("12") == {"score": 1.0, "acc": 1.0, "tool_use": 0.0}
    assert score(f"{call}12") == {"score": 1.0, "acc": 1.0, "tool_use": 1.0}
    assert score(f"12{call}13")["score"] == 0.0
    assert score(call)["score"] == 0.0
    assert demonstration((3, 4), with_tool=True)["messages"][-1]["content"] == "12"
