"""The reference rollout keeps the contract, and generates as transformers does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract import CHARACTERS, PROMPTS, RolloutContract, make_model, request
from transformers import GenerationConfig

from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.hf import HFRollout
from meshrl.rollout.requests import SamplingParams


class TestHF(RolloutContract):
    long = 150

    def make(self, folder, hf_model):
        return HFRollout(hf_model, pad_token_id=0, tokenizer=char_tokenizer(CHARACTERS), stride=8)


def test_greedy_answers_are_those_of_generate():
    model = make_model(3)
    rollout = HFRollout(model, pad_token_id=0, stride=5)
    rollout.update_weights(model.named_parameters(), 0)
    answers = rollout.complete([request(p, SamplingParams(max_tokens=13, temperature=0.0)) for p in PROMPTS])
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        config = GenerationConfig(max_new_tokens=13, min_new_tokens=13, do_sample=False, pad_token_id=0)
        assert answer.token_ids == model.generate(torch.tensor([prompt]), config)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("stride", [1, 3, 50])
def test_the_stride_changes_nothing(stride):
    model = make_model(3)
    rollout = HFRollout(model, pad_token_id=0, stride=stride, max_num_seqs=3)
    rollout.update_weights(model.named_parameters(), 0)
    answers = rollout.complete([request(p, SamplingParams(max_tokens=11, n=2), 4) for p in PROMPTS])
    whole = HFRollout(model, pad_token_id=0, shares_weights=True)
    whole.update_weights((), 0)
    wanted = whole.complete([request(p, SamplingParams(max_tokens=11, n=2), 4) for p in PROMPTS])
    assert [a.token_ids for a in answers] == [a.token_ids for a in wanted]


def test_the_models_own_habits_are_left_out_and_come_back():
    model = make_model(3).train()
    model.generation_config = habits = GenerationConfig(eos_token_id=list(range(40)), repetition_penalty=3.0)
    rollout = HFRollout(model, pad_token_id=0, shares_weights=True)
    rollout.update_weights((), 0)
    (answer,) = rollout.complete([request(PROMPTS[2], SamplingParams(max_tokens=9))])
    assert answer.finish_reason == "length"
    assert model.generation_config is habits
    assert model.training


def test_stop_strings_need_a_tokenizer():
    rollout = HFRollout(make_model(3), pad_token_id=0, shares_weights=True)
    rollout.update_weights((), 0)
    (answer,) = rollout.complete([request(PROMPTS[0], SamplingParams(max_tokens=2, stop=("x",)))])
    assert "tokenizer" in (answer.error or "")


def test_a_stop_string_counts_behind_the_least_number_of_tokens_only():
    model, tokenizer = make_model(3), char_tokenizer(CHARACTERS)
    rollout = HFRollout(model, pad_token_id=0, tokenizer=tokenizer, shares_weights=True)
    rollout.update_weights((), 0)
    (whole,) = rollout.complete([request(PROMPTS[2], SamplingParams(max_tokens=30), 4)])
    text = "".join(tokenizer.convert_ids_to_tokens(whole.token_ids))
    # One that was there before, one that the last protected token completes, and one that comes behind it.
    stops = text[2:5], text[7:10], text[14:17]
    assert [text.rindex(stop) for stop in stops] == [2, 7, 14]
    params = SamplingParams(max_tokens=30, stop=stops, min_tokens=10)
    (cut,) = rollout.complete([request(PROMPTS[2], params, 4)])
    assert (len(cut.token_ids), cut.finish_reason) == (17, "stop")
    (free,) = rollout.complete([request(PROMPTS[2], replace(params, stop=stops[:2]), 4)])
    assert (len(free.token_ids), free.finish_reason) == (30, "length")


def test_without_weights_nothing_is_generated():
    rollout = HFRollout(make_model(3), pad_token_id=0)
    (answer,) = rollout.complete([request(PROMPTS[0], SamplingParams(max_tokens=2))])
    assert "no weights" in (answer.error or "")


def test_released_weights_take_no_memory():
    model = make_model(3)
    rollout = HFRollout(model, pad_token_id=0)
    rollout.release(["weights"])
    rollout.release()  # once more
    assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
    rollout.resume(["weights"])
    rollout.update_weights(make_model(4).named_parameters(), 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make_model(4).parameters(), strict=True))
