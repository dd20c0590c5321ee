"""Tokenizing in processes: the same ids in the same order as one by one, errors and progress included."""

import json

import pytest

from meshrl.config.data import DataConfig
from meshrl.data import tokenize
from meshrl.data.prompts import PromptDataset
from meshrl.data.tokenize import encode_in_processes, encode_prompt


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(tokenize, "CHUNK", 3)


def test_processes_give_what_one_by_one_gives(chat_tokenizer):
    prompts = [str(n) * (n % 5 + 1) for n in range(16)] + [[{"role": "user", "content": "1+1"}]]
    heard = []
    found = encode_in_processes(chat_tokenizer, prompts, None, 2, lambda done, total: heard.append((done, total)))
    expected = [encode_prompt(chat_tokenizer, prompt, number) for number, prompt in enumerate(prompts)]
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    assert len(heard) == 6
    assert heard[-1] == (17, 17)
    assert sorted(heard) == heard


def test_a_bad_prompt_and_a_dead_process_are_heard(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="row 5: the prompt must be a string or a list of messages"):
        encode_in_processes(tokenizer, ["1", "2", "3", "4", 5], None, 2)
    monkeypatch.setattr(tokenize, "WORKER", "import sys; sys.exit(3)")
    with pytest.raises(RuntimeError, match="a tokenizing process ended with exit code 3"):
        encode_in_processes(tokenizer, ["1"], None, 1)


def test_a_process_that_reads_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(tokenize, "WORKER", "import time; time.sleep(60)")
    monkeypatch.setattr(tokenize, "CHUNK_SECONDS", 0.1)  # a send takes whole seconds
    more_than_a_socket_holds = "x" * 3_000_000
    with pytest.raises(TimeoutError, match=r"has read nothing for 0\.1 s"):
        encode_in_processes(more_than_a_socket_holds, ["1"], None, 1)


def test_long_prompts_are_filtered_alike(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * (n % 6 + 1)}) + "\n" for n in range(20)))
    options = {"max_prompt_length": 4, "filter_overlong_prompts": True}
    alone = PromptDataset([str(file)], tokenizer, DataConfig(**options))
    together = PromptDataset([str(file)], tokenizer, DataConfig(**options, filter_overlong_prompts_workers=2))
    assert alone.dropped == together.dropped == 6
    assert [ids.tolist() for ids in together.prompts] == [ids.tolist() for ids in alone.prompts]
    assert together.rows == alone.rows
