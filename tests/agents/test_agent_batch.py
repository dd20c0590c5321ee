"""Batches over several turns: the trainer's rectangle, with real rollouts behind it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from scripted import TOKENIZER, ScriptedRollout, call_text, make_agent, sample
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from meshrl.agents.agent_rollout import (
    COUNTS,
    AgentRollout,
    agent_metrics,
    as_rectangle,
    as_samples,
    make_agent_rollout,
    run_coroutine,
)
from meshrl.agents.calculator_task import calculator_tokenizer
from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.environments import Environment, Step
from meshrl.agents.loop import Agent, Limits, Trajectory
from meshrl.agents.messages import Sample, ToolCall
from meshrl.agents.parsers import Parsed, ToolParser
from meshrl.agents.toolbox import ToolBox
from meshrl.agents.tools import tool
from meshrl.config.load import load_config
from meshrl.data.batch import DataProto, object_array
from meshrl.data.tokenize import render_chat
from meshrl.models.moe_routing import ROUTED_EXPERTS, Routers
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.hf import HFRollout
from meshrl.rollout.requests import SamplingParams

CHARS = calculator_tokenizer()
STOPS = [CHARS.eos_token_id, *CHARS("012345abcdefgh")["input_ids"]]  # many, so that turns are short
WIDTH = 40


@tool
def echo(text: str) -> str:
    """Says it again."""
    return f"{len(text)}{text[-2:]}"


class AnyLetter(ToolParser):
    """Takes a turn with a vowel in it for a call: a model that was never trained makes some too."""

    def parse(self, text: str) -> Parsed:
        calls = [ToolCall("echo", {"text": text})] if set(text) & set("aeiou*-. :") else []
        return Parsed(text, list(calls))


def tiny_lm(attention, kind=Qwen3Config, **more):
    config = kind(
        vocab_size=len(CHARS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        **more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def make_rollout(kind):
    made = HFRollout if kind == "hf" else EmbeddedRollout
    options = {"stride": 4} if kind == "hf" else {"max_num_batched_tokens": 64}
    model = tiny_lm("sdpa" if kind == "hf" else ATTENTION_NAME)
    rollout = made(model, pad_token_id=0, max_num_seqs=5, shares_weights=True, **options)
    rollout.update_weights((), 4)
    return rollout


@pytest.fixture(scope="module", params=["embedded", "hf"])
def rollout(request):
    made = make_rollout(request.param)
    yield made
    made.close()


def letters_agent(parser=None, **limits):
    box = ToolBox([echo])
    limits = Limits(**{"response_length": WIDTH, "max_assistant_turns": 4, **limits})
    return Agent(TurnEncoder(CHARS, STOPS), box, parser or AnyLetter([echo]), limits)


def prompts(count=11):
    """Prompts of unequal lengths, padded on the left."""
    texts = ["9*8", "77*66", "6", "1234567", "9*9*9"]
    chats = [[{"role": "user", "content": texts[i % 5]}] for i in range(count)]
    rows = [render_chat(CHARS, chat, add_generation_prompt=True) for chat in chats]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "seeds": torch.arange(count) * 7 + 1})


@torch.no_grad()
def reference_log_probs(output, temperature):
    """The model's own log-probs of every response token, each row by itself without padding."""
    model = tiny_lm("sdpa")
    found = torch.zeros(output.batch["responses"].shape)
    for row in range(len(output)):
        inside = output.batch["attention_mask"][row].bool()
        ids = output.batch["input_ids"][row][inside]
        count = int(output.batch["attention_mask"][row, -WIDTH:].sum())
        log_probs = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        found[row, :count] = log_probs[-count:]
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_models_log_probs_and_others_are_masked(rollout, temperature):
    params = SamplingParams(max_tokens=WIDTH, temperature=temperature, stop_token_ids=tuple(STOPS))
    output = AgentRollout(rollout, letters_agent()).generate_sequences(prompts(), params)
    turns = output.non_tensor_batch["assistant_turns"]
    assert turns.max() > 1
    assert len(set(turns.tolist())) > 1
    mask = output.batch["response_mask"].bool()
    real = output.batch["attention_mask"][:, -WIDTH:].bool()
    given = real & ~mask
    assert given.any()
    assert not (mask & ~real).any()
    reference = reference_log_probs(output, temperature)
    found = output.batch["rollout_log_probs"]
    assert (found - reference)[mask].abs().max() < 2e-5
    assert found[~mask].abs().max() == 0
    # The control: with another temperature, or one token further on, the same comparison fails.
    assert (found - reference_log_probs(output, temperature * 1.5))[mask].abs().max() > 1e-2
    assert (found - reference.roll(1, 1))[mask].abs().max() > 1e-2
    versions = output.batch["versions"]
    assert set(versions[mask].tolist()) == {4}
    assert set(versions[~mask].tolist()) == {-1}
    tools_said = CHARS.batch_decode([row[m] for row, m in zip(output.batch["responses"], given, strict=True)])
    assert any("<tool>" in text for text in tools_said)
    for text, calls in zip(tools_said, output.non_tensor_batch["user_turns"], strict=True):
        assert text.count("<tool>") == text.count("<assistant>") == calls
    last = real.sum(1) - 1
    assert mask[torch.arange(len(output)), last].all()


def test_every_token_of_all_turns_has_its_route():
    """Also those that others said, which the next turn's prompt holds; but for the last one of a conversation."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = tiny_lm(ATTENTION_NAME, Qwen3MoeConfig, **experts)
    rollout = EmbeddedRollout(model, pad_token_id=0, max_num_seqs=5, shares_weights=True, records_routes=True)
    rollout.update_weights((), 4)
    params = SamplingParams(max_tokens=WIDTH, stop_token_ids=tuple(STOPS))
    output = AgentRollout(rollout, letters_agent()).generate_sequences(prompts(), params)
    rollout.close()
    assert output.non_tensor_batch["assistant_turns"].max() > 1
    plain = tiny_lm("eager", Qwen3MoeConfig, **experts)
    routers = Routers(plain)
    for row, routes in enumerate(output.non_tensor_batch[ROUTED_EXPERTS]):
        ids = output.batch["input_ids"][row][output.batch["attention_mask"][row].bool()]
        with torch.no_grad(), routers.routing(records=True):
            plain(ids[None])
            own = routers.recorded().numpy()
        assert (np.sort(routes, -1)[:-1] == np.sort(own, -1)[:-1]).all()
        assert (routes[-1] == 255).all()


def test_without_calls_it_is_the_rollouts_own_batch(rollout):
    class Silent(ToolParser):
        def parse(self, text):
            return Parsed(text)

    params = SamplingParams(max_tokens=WIDTH, stop_token_ids=tuple(STOPS))
    batch = prompts()
    single = rollout.generate_sequences(batch, params)
    multi = AgentRollout(rollout, letters_agent(Silent())).generate_sequences(batch, params)
    assert set(single.batch.keys()) == set(multi.batch.keys())
    for name in single.batch.keys():
        a, b = single.batch[name], multi.batch[name]
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        if name == "rollout_log_probs":
            assert (a - b).abs().max() < 1e-5
        else:
            assert torch.equal(a, b), name
    assert set(multi.non_tensor_batch["ending"]) <= {"stop", "length"}


def test_seeds_alone_decide_whatever_runs_beside(rollout):
    params = SamplingParams(max_tokens=WIDTH, stop_token_ids=tuple(STOPS))
    batch = prompts()
    agents = AgentRollout(rollout, letters_agent())
    whole = agents.generate_sequences(batch, params)
    part = agents.generate_sequences(batch.select_idxs([8, 3]), params)
    assert torch.equal(part.batch["responses"], whole.batch["responses"][[8, 3]])
    assert torch.equal(part.batch["response_mask"], whole.batch["response_mask"][[8, 3]])


def test_samples_run_at_once_and_end_out_of_order():
    @tool
    async def nap(seconds: float) -> str:
        """Sleeps."""
        napping.append(napping[-1] + 1)
        await asyncio.sleep(seconds)
        napping.append(napping[-1] - 1)
        return "ok"

    def speak(prompt, request):
        question = prompt.partition("user\n")[2].partition("<|end|>")[0]
        return "done" if "ok<|end|>" in prompt else call_text("nap", seconds=float(question))

    naps, napping = [0.6, 0.2, 0.4, 0.0], [0]
    rollout = ScriptedRollout(speak)
    agents = AgentRollout(rollout, make_agent([nap]))

    async def run():
        params = SamplingParams(max_tokens=400)
        return [
            t.sample.number
            async for t in agents.run([sample(str(seconds), i) for i, seconds in enumerate(naps)], params)
        ]

    assert asyncio.run(run()) == list(np.argsort(naps))
    assert max(napping) > 1
    assert rollout.handed_over[0] == 4  # all first turns in one batch
    assert rollout.most_running == 4


def test_one_failure_ends_the_batch_with_its_own_words():
    class Hanging(ScriptedRollout):
        async def _answer(self, request, queue):
            if "agents" in request.request_id and request.request_id.endswith("-1-turn0"):
                self.reason = "error"
                await super()._answer(request, queue)
            else:
                await asyncio.Event().wait()

    agents = AgentRollout(Hanging(lambda prompt, request: ""), make_agent())

    async def run():
        async for _ in agents.run([sample(number=i) for i in range(3)], SamplingParams(max_tokens=9)):
            pass

    with pytest.raises(RuntimeError, match="sample 1, turn 0: the rollout failed: made to fail"):
        asyncio.run(asyncio.wait_for(run(), 10))


def test_the_rectangle_holds_each_token_at_its_place():
    batch = prompts(3)
    rng = np.random.default_rng(0)
    found = []
    for row, (size, given) in enumerate([(5, 2), (0, 0), (8, 3)]):
        one = Trajectory(Sample(row, (1,)), [1], [], ending="stop")
        one.token_ids = rng.integers(2, 30, size).tolist()
        one.mask = [int(not 1 <= i < 1 + given) for i in range(size)]
        one.log_probs = (-rng.random(size)).tolist()
        one.versions = [7 * m - 1 for m in one.mask]
        one.tool_calls, one.rewards = row, [0.5] * row
        found.append(one)
    output = as_rectangle(batch, found, 9, 0)
    tensors = output.batch
    prompt_width = batch.batch["input_ids"].shape[1]
    for row, one in enumerate(found):
        position = -1
        for at in range(9):
            inside = at < len(one.token_ids)
            assert tensors["responses"][row, at] == (one.token_ids[at] if inside else 0)
            assert tensors["response_mask"][row, at] == (one.mask[at] if inside else 0)
            assert tensors["attention_mask"][row, prompt_width + at] == inside
            assert tensors["versions"][row, at] == (one.versions[at] if inside else -1)
            assert abs(float(tensors["rollout_log_probs"][row, at]) - (one.log_probs[at] if inside else 0.0)) < 1e-6
        for at in range(prompt_width + 9):
            position += int(tensors["attention_mask"][row, at])
            assert tensors["position_ids"][row, at] == max(position, 0)
    assert output.non_tensor_batch["tool_calls"].tolist() == [0, 1, 2]
    assert list(output.non_tensor_batch["turn_rewards"]) == [[], [0.5], [0.5, 0.5]]
    assert len(DataProto.concat([output, output])) == 6


class Riddle(Environment):
    def reset(self, one):
        return [{"role": "user", "content": one.extra_info["riddle"]}]

    def step(self, text):
        return Step(done=True)


def test_prompts_of_environments_are_padded_to_the_prompt_length():
    agent = make_agent(environment=Riddle, prompt_length=50, response_length=6)
    batch = prompts(2)
    batch.non_tensor_batch["extra_info"] = object_array([{"riddle": "why"}, {"riddle": "wherefore"}])
    output = AgentRollout(ScriptedRollout(lambda p, r: "so"), agent).generate_sequences(
        batch, SamplingParams(max_tokens=6)
    )
    assert output.batch["prompts"].shape == (2, 50)
    for row, riddle in enumerate(["why", "wherefore"]):
        inside = output.batch["attention_mask"][row].bool()
        text = TOKENIZER.decode(output.batch["input_ids"][row][inside])
        assert text == f"<|start|>user\n{riddle}<|end|>\n<|start|>assistant\nso<|end|>"


def test_samples_know_their_row():
    batch = prompts(2)
    batch.non_tensor_batch |= {
        "raw_prompt": object_array([[{"role": "user", "content": "9*8"}], "77"]),
        "ground_truth": object_array(["72", None]),
        "extra_info": object_array([{"a": 1}, None]),
    }
    first, second = as_samples(batch)
    assert CHARS.decode(list(first.prompt_ids)) == "<user>9*8<assistant>"
    assert (first.ground_truth, first.extra_info, first.messages[0]["content"]) == ("72", {"a": 1}, "9*8")
    assert (second.extra_info, second.messages) == ({}, ({"role": "user", "content": "77"},))
    batch.batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="prompt 1 of the batch is empty"):
        as_samples(batch)


def test_metrics_are_those_counted_by_hand():
    batch = DataProto.from_dict(
        {"x": torch.zeros(4)},
        non_tensors={
            **{name: np.zeros(4, np.int64) for name in COUNTS},
            "assistant_turns": np.array([1, 2, 3, 2]),
            "user_turns": np.array([0, 1, 2, 1]),
            "tool_calls": np.array([0, 1, 3, 0]),
            "malformed_calls": np.array([0, 0, 0, 1]),
            "tool_errors": np.array([0, 1, 1, 1]),
            "ending": object_array(["stop", "length", "turns", "stop"]),
        },
    )
    metrics = agent_metrics(batch)
    assert metrics["agent/num_turns/mean"] == 3.0
    assert metrics["agent/num_turns/max"] == 5.0
    assert metrics["agent/tool_calls/mean"] == 1.0
    assert metrics["agent/tool_use_share"] == 0.75
    assert metrics["agent/tool_errors/sum"] == 3.0
    assert metrics["agent/malformed_calls/sum"] == 1.0
    assert metrics["agent/ended_by/stop"] == 0.5
    assert metrics["agent/ended_by/length"] == 0.25
    assert agent_metrics(DataProto.from_dict({"x": torch.zeros(4)})) == {}


def test_a_rollout_from_the_config():
    config = load_config("calculator").config.actor_rollout_ref.rollout
    speak = ScriptedRollout(lambda prompt, request: "")
    made = make_agent_rollout(speak, CHARS, config, [CHARS.eos_token_id])
    assert list(made.agent.box.tools) == ["calculator"]
    assert made.agent.limits == Limits(32, 8, 3, None, 1)
    assert made.agent.box.max_response_length == 40
    with pytest.raises(ValueError, match="does not end generation"):
        make_agent_rollout(speak, CHARS, config, [5])


def test_without_weights_nothing_is_generated():
    rollout = ScriptedRollout(lambda prompt, request: "x")
    rollout.version = -1
    with pytest.raises(RuntimeError, match="no weights yet"):
        AgentRollout(rollout, make_agent()).generate_sequences(prompts(1), SamplingParams(max_tokens=3))


def test_it_can_be_called_from_inside_an_event_loop():
    async def inner():
        await asyncio.sleep(0)
        return 3

    async def failing():
        raise KeyError("x")

    async def outer():
        return run_coroutine(inner())

    assert asyncio.run(outer()) == run_coroutine(inner()) == 3
    with pytest.raises(KeyError):
        run_coroutine(failing())
