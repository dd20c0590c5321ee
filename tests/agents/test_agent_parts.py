"""Conversations handed out as they end: the same as all at once, in whatever parts and order they come."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from test_agent_batch import STOPS, WIDTH, letters_agent, make_rollout, prompts

from meshrl.agents.agent_rollout import COUNTS, AgentRollout
from meshrl.controller import PADDING_ROWS_KEY
from meshrl.data.batch import DataProto
from meshrl.rollout.requests import SamplingParams
from meshrl.workers.generation import start_generation

PARAMS = SamplingParams(max_tokens=WIDTH, temperature=1.0, stop_token_ids=tuple(STOPS))


@pytest.fixture(scope="module")
def rollout():
    made = make_rollout("embedded")
    yield made
    made.close()


@pytest.fixture
def in_no_hurry(rollout, monkeypatch):
    """A step takes a while: on a busy machine all answers would else be there before anybody has looked."""
    advance = rollout._advance

    def advance_late():
        time.sleep(0.02)
        advance()

    monkeypatch.setattr(rollout, "_advance", advance_late)


def all_parts(generation):
    rows, parts, until = [], [], time.monotonic() + 60
    while generation.left and time.monotonic() < until:
        found = generation.take(0.05)
        if found is not None:
            rows.append(found[0])
            parts.append(found[1])
    batch = DataProto.concat(parts)
    batch.reorder(np.argsort(np.concatenate(rows), kind="stable"))
    return batch, len(parts)


def same(ours, theirs):
    for name in ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "versions"):
        assert torch.equal(ours.batch[name], theirs.batch[name]), name
    difference = ours.batch["rollout_log_probs"] - theirs.batch["rollout_log_probs"]
    assert difference.abs().max() < 1e-5


@pytest.mark.usefixtures("in_no_hurry")
@pytest.mark.parametrize("padding", [0, 3])
def test_conversations_are_those_of_the_whole_batch(rollout, padding):
    agents = AgentRollout(rollout, letters_agent())
    request = prompts()
    whole = agents.generate_sequences(request, PARAMS).slice(0, 11 - padding)
    request.meta_info[PADDING_ROWS_KEY] = padding
    batch, parts = all_parts(start_generation(rollout, agents, request, PARAMS))
    assert len(batch) == 11 - padding
    assert parts > 1
    same(batch, whole)
    for name in (*COUNTS, "ending"):
        assert list(batch.non_tensor_batch[name]) == list(whole.non_tensor_batch[name])


@pytest.mark.usefixtures("in_no_hurry")
def test_single_answers_too(rollout):
    whole = rollout.generate_sequences(prompts(), PARAMS)
    batch, parts = all_parts(start_generation(rollout, None, prompts(), PARAMS))
    assert parts > 1
    same(batch, whole)


def test_what_goes_wrong_is_heard_by_whoever_asks(rollout):
    request = prompts()
    request.batch["attention_mask"][4] = 0
    generation = start_generation(rollout, AgentRollout(rollout, letters_agent()), request, PARAMS)
    with pytest.raises(ValueError, match="prompt 4 of the batch is empty"):
        all_parts(generation)
