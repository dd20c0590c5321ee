"""What every rollout must do, whatever generates inside: a class of tests to be inherited with an engine of one's own.

    class TestMine(RolloutContract):
        def make(self, folder, hf_model): return MyRollout(...)

One engine serves all tests of the class; each test begins with the first weights under a new version.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from meshrl.data.batch import DataProto
from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.base import Rollout
from meshrl.rollout.requests import Chunk, Completion, Request, SamplingParams, gather

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=()<>"
VOCABULARY = len(CHARACTERS) + 2
CONTEXT = 512
DEADLINE = 60.0
# Long enough for something to happen in the middle, also on a busy machine.
LONG = 460
# Unequal, from a single token to more than a cache block.
PROMPTS = [tuple((7 * i + 3 * j) % (VOCABULARY - 2) + 2 for j in range(size)) for i, size in enumerate((5, 1, 41, 18))]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_names = itertools.count()
_versions = itertools.count(1)


def make_model(seed: int) -> PreTrainedModel:
    """A tiny model whose initial weights are large, so that a wrong token, position or weight shows."""
    return make_from(Qwen3Config(**SHAPE, tie_word_embeddings=True), seed)


def make_experts_model(seed: int) -> PreTrainedModel:
    """The same with experts, and a head of its own."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return make_from(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=False), seed)


def make_from(config: PretrainedConfig, seed: int, attention: str = "sdpa") -> PreTrainedModel:
    """A model with this config and random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def request(prompt: tuple[int, ...], params: SamplingParams, seed: int = 0) -> Request:
    return Request(f"r{next(_names)}", prompt, params, seed)


@torch.no_grad()
def logits_of(hf_model: PreTrainedModel, prompt: tuple[int, ...], answer: list[int]) -> Tensor:
    """The model's logits [tokens, vocabulary] for every token of an answer."""
    ids = torch.tensor([[*prompt, *answer]])
    return hf_model(ids).logits[0, len(prompt) - 1 : -1].float()


def log_probs_of(hf_model: PreTrainedModel, prompt: tuple[int, ...], answer: list[int], temperature: float) -> Tensor:
    return (logits_of(hf_model, prompt, answer) / (temperature or 1.0)).log_softmax(-1)


def chosen(log_probs: Tensor, answer: list[int]) -> Tensor:
    return log_probs.gather(-1, torch.tensor(answer)[:, None])[:, 0]


class RolloutContract:
    """Subclasses give `make`, and say what their engine leaves out."""

    tolerance = 2e-5
    # Whether a request's seed decides its tokens, in any company.
    seeded = True
    # Whether top-p counts within what top-k has left, and how many tokens of the context can never be used.
    top_p_within_top_k = True
    spare_tokens = 0
    # Whether penalties, biases and a fewest number of tokens are served; otherwise they are refused.
    adjusts = True
    # Tokens of answers in whose middle something happens; an engine that takes longer for each needs fewer of them.
    long = LONG

    def make(self, folder: Path, hf_model: PreTrainedModel) -> Rollout:
        """The engine, without weights of its own or with those of the folder."""
        raise AssertionError("inherit and override")

    @pytest.fixture(scope="class")
    @classmethod
    def old(cls) -> PreTrainedModel:
        return make_model(0)

    @pytest.fixture(scope="class")
    @classmethod
    def new(cls) -> PreTrainedModel:
        return make_model(1)

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory, old: PreTrainedModel) -> Iterator[Rollout]:
        folder = tmp_path_factory.mktemp("contract")
        save_hf_folder(folder / "model", old.named_parameters(), old)
        char_tokenizer(CHARACTERS).save_pretrained(folder / "model")
        made = cls().make(folder / "model", make_model(2))
        yield made
        made.close()

    @pytest.fixture
    def rollout(self, engine: Rollout, old: PreTrainedModel) -> Iterator[Rollout]:
        engine.update_weights(old.named_parameters(), next(_versions))
        yield engine
        engine.abort()
        engine.resume()

    def assert_matches(
        self, answer: Completion, prompt: tuple[int, ...], hf_model: PreTrainedModel, temperature: float
    ) -> None:
        reference = chosen(log_probs_of(hf_model, prompt, answer.token_ids, temperature), answer.token_ids)
        assert answer.token_ids
        assert (torch.tensor(answer.log_probs) - reference).abs().max() < self.tolerance

    def test_answers_come_as_they_end(self, rollout, old):
        """The same as all at once, the short ones before the long."""
        lengths = [LONG // 3, 2, 40, 7]
        params = [SamplingParams(max_tokens=n, temperature=1.0, n=1 + (n == 7)) for n in lengths]
        requests = [request(prompt, p, seed) for seed, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True))]

        async def take() -> list[Completion]:
            return list(rollout.as_they_end(requests))

        # A server is free to begin with any of them, and a busy machine may hold a short one back.
        ended = in_the_middle(take, lambda answers: len(answers[-1].token_ids) == LONG // 3)
        name_of = {r.request_id: r for r in requests}
        assert sorted((a.request_id, a.index) for a in ended) == sorted(
            (r.request_id, i) for r in requests for i in range(r.params.n)
        )
        assert sorted(len(a.token_ids) for a in ended) == [2, 7, 7, 40, LONG // 3]
        for answer in ended:
            assert answer.finish_reason == "length"
            assert len(answer.versions) == len(answer.token_ids)
            self.assert_matches(answer, name_of[answer.request_id].prompt_token_ids, old, 1.0)

    def test_leaving_answers_early_aborts_the_rest(self, rollout):
        requests = [request(PROMPTS[0], SamplingParams(max_tokens=n, temperature=1.0)) for n in (LONG, 2)]
        answers = rollout.as_they_end(requests)
        assert len(next(answers).token_ids) == 2
        answers.close()
        # Its name is free again, so nothing of it is left.
        (again,) = rollout.complete([replace(requests[0], params=SamplingParams(max_tokens=3))])
        assert len(again.token_ids) == 3

    # Tokens and log-probs

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
    def test_log_probs_are_those_of_the_model_at_the_temperature(self, rollout, old, temperature):
        params = SamplingParams(max_tokens=9, temperature=temperature, n=2)
        requests = [request(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)]
        answers = rollout.complete(requests)
        assert [(a.request_id, a.index) for a in answers] == [(r.request_id, i) for r in requests for i in range(2)]
        for number, answer in enumerate(answers):
            prompt = PROMPTS[number // 2]
            self.assert_matches(answer, prompt, old, temperature)
            assert len(answer.token_ids) == len(answer.log_probs) == len(answer.versions) == 9
            assert set(answer.versions) == {rollout.version}
            assert answer.finish_reason == "length"
            other = chosen(log_probs_of(old, prompt, answer.token_ids, temperature * 1.3), answer.token_ids)
            assert (torch.tensor(answer.log_probs) - other).abs().max() > 100 * self.tolerance

    def test_temperature_zero_takes_the_likeliest_token(self, rollout, old):
        answers = rollout.complete([request(p, SamplingParams(max_tokens=8, temperature=0.0)) for p in PROMPTS])
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            log_probs = log_probs_of(old, prompt, answer.token_ids, 1.0)
            assert answer.token_ids == log_probs.argmax(-1).tolist()
            self.assert_matches(answer, prompt, old, 1.0)

    @pytest.mark.parametrize("temperature", [0.8, 0.0])
    def test_greedy_and_random_requests_share_a_batch(self, rollout, old, temperature):
        mixed = [SamplingParams(max_tokens=6, temperature=t) for t in (temperature, 1.3, temperature, 0.0)]
        answers = rollout.complete([request(p, m, 5) for p, m in zip(PROMPTS, mixed, strict=True)])
        for answer, prompt, params in zip(answers, PROMPTS, mixed, strict=True):
            self.assert_matches(answer, prompt, old, params.temperature)

    @pytest.mark.parametrize(
        "cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.7}], ids=lambda c: "+".join(c)
    )
    def test_log_probs_are_those_before_the_cut(self, rollout, old, cut):
        params = SamplingParams(max_tokens=12, temperature=1.4, **cut)
        answers = rollout.complete([request(p, params, s) for s, p in enumerate(PROMPTS)])
        allowed_sizes = set()
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            self.assert_matches(answer, prompt, old, 1.4)
            log_probs = log_probs_of(old, prompt, answer.token_ids, 1.4)
            for row, token in zip(log_probs.exp(), answer.token_ids, strict=True):
                allowed = kept_tokens(row, self.top_p_within_top_k, **cut)
                allowed_sizes.add(len(allowed))
                assert token in allowed
        assert max(allowed_sizes) < VOCABULARY

    def test_top_log_probs(self, rollout, old):
        for temperature in (1.2, 0.0):
            params = SamplingParams(max_tokens=5, temperature=temperature, top_log_probs=3)
            answers = rollout.complete([request(p, params) for p in PROMPTS])
            for answer, prompt in zip(answers, PROMPTS, strict=True):
                assert answer.top_log_probs is not None
                log_probs = log_probs_of(old, prompt, answer.token_ids, temperature)
                for row, found in zip(log_probs, answer.top_log_probs, strict=True):
                    best = row.topk(3)
                    assert list(found) == best.indices.tolist()
                    assert torch.tensor(list(found.values())) == pytest.approx(best.values, abs=self.tolerance)
        (plain,) = rollout.complete([request(PROMPTS[0], SamplingParams(max_tokens=2))])
        assert plain.top_log_probs is None

    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_a_bias_and_a_penalty_change_the_tokens_but_not_the_log_probs(self, rollout, old, temperature):
        wishes = {"repetition_penalty": 1.5, "logit_bias": {5: 2.5, 9: -3.0, 40: 1.0}}
        params = SamplingParams(max_tokens=20, temperature=temperature, top_k=1, **wishes)
        answers = rollout.complete([request(p, params, s) for s, p in enumerate(PROMPTS)])
        if not self.adjusts:
            assert [a.finish_reason for a in answers] == ["error"] * 4
            assert all("repetition_penalty" in (a.error or "") for a in answers)
            return
        changed = 0
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            self.assert_matches(answer, prompt, old, temperature)
            for step, row in enumerate(logits_of(old, prompt, answer.token_ids)):
                likeliest = int(row.argmax())
                for token in {*prompt, *answer.token_ids[:step]}:
                    row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
                row[[5, 9, 40]] += torch.tensor([2.5, -3.0, 1.0])
                assert answer.token_ids[step] == int(row.argmax())
                changed += answer.token_ids[step] != likeliest
        assert changed > 10

    def test_tokens_follow_the_distribution(self, rollout, old):
        params = SamplingParams(max_tokens=1, temperature=0.8, top_k=4, n=64)
        answers = rollout.complete([request(PROMPTS[3], params, seed) for seed in range(6)])
        row = log_probs_of(old, PROMPTS[3], [2], 0.8)[0]
        best = row.topk(4)
        wanted = best.values.exp() / best.values.exp().sum()
        tokens = torch.tensor([answer.token_ids[0] for answer in answers])
        shares = torch.stack([(tokens == token).float().mean() for token in best.indices])
        assert set(tokens.tolist()) <= set(best.indices.tolist())
        # Five standard deviations of a share over 384 draws.
        assert (shares - wanted).abs().max() < 5 * 0.5 / 384**0.5

    # Ends

    def test_a_stop_token_ends_an_answer_and_stays(self, rollout):
        stops = tuple(range(2, VOCABULARY, 3))
        params = SamplingParams(max_tokens=60, stop_token_ids=stops, n=3)
        answers = rollout.complete([request(p, params, s) for s, p in enumerate(PROMPTS)])
        for answer in answers:
            assert answer.finish_reason == "stop"
            assert answer.token_ids[-1] in stops
            assert not set(answer.token_ids[:-1]) & set(stops)
        assert len({len(a.token_ids) for a in answers}) > 1

    def test_the_models_own_end_token_is_a_token_like_others_unless_asked(self, rollout):
        hot = SamplingParams(max_tokens=60, temperature=2.5, n=4)
        answers = rollout.complete([request(p, hot, 3) for p in PROMPTS])
        assert all(len(a.token_ids) == 60 for a in answers)
        assert any(1 in a.token_ids for a in answers)
        ending = SamplingParams(max_tokens=60, temperature=2.5, n=4, stop_token_ids=(1,))
        ended = [a for a in rollout.complete([request(p, ending, 3) for p in PROMPTS]) if a.finish_reason == "stop"]
        assert ended
        assert all(a.token_ids.index(1) == len(a.token_ids) - 1 for a in ended)

    def test_a_stop_string_ends_an_answer_and_stays(self, rollout):
        free = SamplingParams(max_tokens=30, temperature=0.0)
        (whole,) = rollout.complete([request(PROMPTS[2], free)])
        text = "".join(char_tokenizer(CHARACTERS).convert_ids_to_tokens(whole.token_ids))
        stop = text[4:6]
        length = text.index(stop) + 2
        params = SamplingParams(max_tokens=30, temperature=0.0, stop=(stop, "never seen"))
        (cut,) = rollout.complete([request(PROMPTS[2], params)])
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.finish_reason == "stop"

    def test_fewest_tokens(self, rollout, old):
        stops = tuple(range(2, VOCABULARY, 2))
        params = SamplingParams(max_tokens=12, min_tokens=7, stop_token_ids=stops, n=2)
        answers = rollout.complete([request(p, params, s) for s, p in enumerate(PROMPTS)])
        if not self.adjusts:
            assert all("min_tokens" in (a.error or "") for a in answers)
            return
        for number, answer in enumerate(answers):
            assert len(answer.token_ids) > 7
            assert not set(answer.token_ids[:7]) & set(stops)
            self.assert_matches(answer, PROMPTS[number // 2], old, 1.0)

    def test_a_full_context_ends_an_answer(self, rollout):
        prompt = tuple(range(2, 12)) * 50 + (3, 4, 5, 6)
        (answer,) = rollout.complete([request(prompt, SamplingParams(max_tokens=100))])
        assert answer.finish_reason == "length"
        assert len(prompt) + len(answer.token_ids) == CONTEXT - self.spare_tokens

    # Seeds

    def test_equal_seeds_give_equal_tokens_in_any_company(self, rollout):
        if not self.seeded:
            pytest.skip("the engine has no seeds of its own for each request")
        params = SamplingParams(max_tokens=16, n=3)
        alone = [rollout.complete([request(p, params, 11)]) for p in PROMPTS]
        other = SamplingParams(max_tokens=23, temperature=0.7)
        crowd = [request(PROMPTS[i % 4], other, i) for i in range(9)]
        together = rollout.complete([*crowd, *(request(p, params, 11) for p in PROMPTS)])[9:]
        assert [a.token_ids for answers in alone for a in answers] == [a.token_ids for a in together]
        assert len({tuple(a.token_ids) for a in alone[0]}) == 3
        again = rollout.complete([request(PROMPTS[0], params, 12)])
        assert not {tuple(a.token_ids) for a in again} & {tuple(a.token_ids) for a in alone[0]}

    # Wrong requests

    def test_a_wrong_request_fails_alone(self, rollout, old):
        params = SamplingParams(max_tokens=4, n=2)
        wrong = [(), (2, VOCABULARY), (2, -1), tuple([3] * CONTEXT), tuple([3] * (CONTEXT + 9))]
        requests = [request(p, params) for p in (PROMPTS[0], *wrong, PROMPTS[1])]
        answers = rollout.complete(requests)
        assert [a.finish_reason for a in answers] == ["length"] * 2 + ["error"] * 10 + ["length"] * 2
        for answer in answers[2:12]:
            assert answer.error
            assert not answer.token_ids
        self.assert_matches(answers[0], PROMPTS[0], old, 1.0)
        self.assert_matches(answers[-1], PROMPTS[1], old, 1.0)

    def test_an_id_in_use_is_refused(self, rollout):
        twin = request(PROMPTS[0], SamplingParams(max_tokens=3))
        with pytest.raises(ValueError, match=twin.request_id):
            rollout.complete([twin, twin])
        (answer,) = rollout.complete([twin])
        assert answer.finish_reason == "length"

    # Streaming

    def test_a_stream_tells_the_same_story(self, rollout):
        params = SamplingParams(max_tokens=40, temperature=0.0, n=2)
        requests = [request(p, params) for p in PROMPTS]
        chunks = asyncio.run(collect(rollout, requests))
        streamed = gather(requests, chunks)
        whole = rollout.complete([request(p, params) for p in PROMPTS])
        assert [a.token_ids for a in streamed] == [a.token_ids for a in whole]
        assert [a.finish_reason for a in streamed] == ["length"] * 8
        last = {(c.request_id, c.index): c for c in chunks}
        assert sum(c.finish_reason is not None for c in chunks) == 8
        assert all(c.finish_reason for c in last.values())
        assert all(len(c.token_ids) == len(c.log_probs) == len(c.versions) for c in chunks)
        assert len(chunks) > 8

    def test_streams_run_beside_each_other_and_beside_calls(self, rollout, old):
        params = SamplingParams(max_tokens=20)

        async def all_of_them() -> list[Any]:
            several = [[request(p, params, s) for p in PROMPTS] for s in range(3)]
            call = asyncio.to_thread(rollout.complete, [request(PROMPTS[2], params, 9)])
            return await asyncio.gather(call, *(collect_whole(rollout, r) for r in several))

        call, *streams = asyncio.run(all_of_them())
        self.assert_matches(call[0], PROMPTS[2], old, 1.0)
        for answers in streams:
            for answer, prompt in zip(answers, PROMPTS, strict=True):
                self.assert_matches(answer, prompt, old, 1.0)

    def test_wrong_requests_in_a_stream(self, rollout):
        requests = [request(p, SamplingParams(max_tokens=3)) for p in ((), PROMPTS[0])]
        answers = asyncio.run(collect_whole(rollout, requests))
        assert [a.finish_reason for a in answers] == ["error", "length"]

    def test_leaving_a_stream_aborts_its_requests(self, rollout):
        async def leave() -> None:
            stream = rollout.generate([request(p, SamplingParams(max_tokens=self.long)) for p in PROMPTS])
            async for _ in stream:
                break
            await stream.aclose()

        asyncio.run(leave())
        idle(rollout)

    # Abort and pause

    def test_abort_keeps_what_was_generated(self, rollout, old):
        async def abort_two() -> list[Completion]:
            requests = [request(p, SamplingParams(max_tokens=self.long)) for p in PROMPTS]
            chunks: list[Chunk] = []
            async for chunk in rollout.generate(requests):
                if not chunks:
                    await asyncio.to_thread(rollout.abort, [requests[0].request_id, requests[2].request_id])
                chunks.append(chunk)
                if sum(c.finish_reason is not None for c in chunks) == 2:
                    await asyncio.to_thread(rollout.abort)
            return gather(requests, chunks)

        answers = in_the_middle(abort_two, lambda answers: {answers[i].finish_reason for i in (0, 2)} == {"abort"})
        assert {answers[1].finish_reason, answers[3].finish_reason} <= {"abort", "length"}
        assert all((len(a.token_ids) == self.long) == (a.finish_reason == "length") for a in answers)
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            if answer.token_ids:
                self.assert_matches(answer, prompt, old, 1.0)
        idle(rollout)

    def test_aborting_what_waits_has_ended_or_never_was(self, rollout):
        done = request(PROMPTS[0], SamplingParams(max_tokens=2))
        rollout.complete([done])
        rollout.abort([done.request_id, "nobody"])
        rollout.pause("keep")
        waiting = [request(p, SamplingParams(max_tokens=5, n=2)) for p in PROMPTS]
        call = Call(rollout.complete, waiting)
        time.sleep(0.3)
        assert not call.done
        rollout.abort([waiting[0].request_id])
        rollout.abort()
        assert [a.finish_reason for a in call.result()] == ["abort"] * 8
        rollout.resume()
        (answer,) = rollout.complete([done])
        assert answer.finish_reason == "length"

    def test_pause_and_keep(self, rollout, old):
        """Nothing moves while paused; afterwards all goes on."""
        requests = [request(p, SamplingParams(max_tokens=150)) for p in PROMPTS]

        async def pause_once() -> tuple[list[Completion], float]:
            chunks: list[Chunk] = []
            moved = -1.0
            async for chunk in rollout.generate(requests):
                if not chunks:
                    await asyncio.to_thread(rollout.pause, "keep")
                    await asyncio.sleep(0.3)  # what was on its way may still arrive
                    before = rollout.stats()["generated_tokens"]
                    await asyncio.sleep(0.4)
                    moved = rollout.stats()["generated_tokens"] - before
                    rollout.resume()
                chunks.append(chunk)
            return gather(requests, chunks), moved

        answers, moved = asyncio.run(pause_once())
        assert moved == 0
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", 150)
            self.assert_matches(answer, prompt, old, 1.0)

    @pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
    def test_pausing_without_keeping(self, rollout, old, mode, reason):
        async def pause_once() -> list[Completion]:
            rollout.resume()
            requests = [request(p, SamplingParams(max_tokens=self.long)) for p in PROMPTS]
            chunks: list[Chunk] = []
            async for chunk in rollout.generate(requests):
                if not chunks:
                    await asyncio.to_thread(rollout.pause, mode)
                chunks.append(chunk)
            return gather(requests, chunks)

        answers = in_the_middle(pause_once, lambda answers: {a.finish_reason for a in answers} == {reason})
        assert all((len(a.token_ids) == self.long) == (mode == "wait") for a in answers)
        call = Call(rollout.complete, [request(PROMPTS[0], SamplingParams(max_tokens=2))])
        time.sleep(0.3)
        assert not call.done
        rollout.resume()
        assert call.result()[0].finish_reason == "length"

    def test_an_unknown_way_to_pause(self, rollout):
        with pytest.raises(ValueError, match="keep"):
            rollout.pause("sometimes")

    # Weights

    @pytest.mark.parametrize("paused", [True, False])
    def test_an_update_reaches_running_requests(self, rollout, old, new, paused):
        first = second = -1

        def update() -> None:
            if paused:
                rollout.pause("keep")
            rollout.update_weights(new.named_parameters(), second)
            if paused:
                rollout.resume()

        async def in_flight() -> list[Completion]:
            nonlocal first, second
            first, second = next(_versions), next(_versions)
            rollout.update_weights(old.named_parameters(), first)
            requests = [request(p, SamplingParams(max_tokens=self.long, temperature=0.9)) for p in PROMPTS]
            chunks: list[Chunk] = []
            async for chunk in rollout.generate(requests):
                if not chunks:
                    await asyncio.to_thread(update)
                chunks.append(chunk)
            return gather(requests, chunks)

        answers = in_the_middle(in_flight, lambda found: any(set(a.versions) == {first, second} for a in found))
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            assert answer.finish_reason == "length"
            assert answer.versions == sorted(answer.versions)
            assert set(answer.versions) <= {first, second}
            border = answer.versions.count(first)
            got = torch.tensor(answer.log_probs)
            before, after = (
                chosen(log_probs_of(m, prompt, answer.token_ids, 0.9), answer.token_ids) for m in (old, new)
            )
            reference = torch.cat([before[:border], after[border:]])
            assert (got - reference).abs().max() < self.tolerance
            # The two models do differ: a token under the wrong version would show.
            assert (after - before).abs().mean() > 0.1

    def test_no_cache_outlives_an_update(self, rollout, old, new):
        params = SamplingParams(max_tokens=4)
        for model in (old, new, old):
            rollout.update_weights(model.named_parameters(), next(_versions))
            for _ in range(2):
                for answer, prompt in zip(
                    rollout.complete([request(p, params) for p in PROMPTS]), PROMPTS, strict=True
                ):
                    self.assert_matches(answer, prompt, model, 1.0)
                    assert set(answer.versions) == {rollout.version}

    def test_weights_may_come_in_another_type_and_order(self, rollout, new):
        stream = reversed([(n, p.detach().bfloat16()) for n, p in new.named_parameters()])
        rollout.update_weights(stream, next(_versions))
        rounded = make_model(1)
        with torch.no_grad():
            for param in rounded.parameters():
                param.copy_(param.bfloat16())
        (answer,) = rollout.complete([request(PROMPTS[2], SamplingParams(max_tokens=8))])
        self.assert_matches(answer, PROMPTS[2], rounded, 1.0)

    def test_bad_streams_are_refused_and_a_good_one_mends_all(self, rollout, old, new):
        weights = {name: param.detach() for name, param in new.named_parameters()}
        first, *_, last = weights
        for stream, message in (
            ([(n, w) for n, w in weights.items() if n != last], f"never sent.*'{last}'"),
            ([("model.extra", torch.ones(1)), *weights.items()], "no parameter 'model.extra'"),
            ([(first, weights[first]), *weights.items()], "got it twice"),
            ([(first, weights[first][:1]), *list(weights.items())[1:]], "was sent as"),
            ([], "never sent"),
        ):
            wrong = next(_versions)
            with pytest.raises(ValueError, match=message):
                rollout.update_weights(iter(stream), wrong)
            assert rollout.version != wrong
        rollout.update_weights(weights.items(), next(_versions))
        (answer,) = rollout.complete([request(PROMPTS[2], SamplingParams(max_tokens=6))])
        self.assert_matches(answer, PROMPTS[2], new, 1.0)

    def test_an_update_leaves_the_senders_tensors_alone(self, rollout, new):
        weights = {name: param.detach().clone() for name, param in new.named_parameters()}
        rollout.update_weights(weights.items(), next(_versions))
        rollout.complete([request(PROMPTS[0], SamplingParams(max_tokens=2))])
        assert all(torch.equal(weights[name], param) for name, param in new.named_parameters())
        for tensor in weights.values():
            tensor.zero_()
        (answer,) = rollout.complete([request(PROMPTS[0], SamplingParams(max_tokens=4))])
        self.assert_matches(answer, PROMPTS[0], new, 1.0)

    # Memory

    def test_released_memory_comes_back_in_two_parts(self, rollout, new):
        rollout.release()
        call = Call(rollout.complete, [request(p, SamplingParams(max_tokens=5)) for p in PROMPTS])
        time.sleep(0.2)
        with pytest.raises(RuntimeError, match="resume"):
            rollout.update_weights(new.named_parameters(), next(_versions))
        rollout.resume(["weights"])
        rollout.update_weights(new.named_parameters(), next(_versions))
        time.sleep(0.2)
        assert not call.done
        rollout.resume(["kv_cache"])
        for answer, prompt in zip(call.result(), PROMPTS, strict=True):
            self.assert_matches(answer, prompt, new, 1.0)

    def test_the_cache_alone_may_be_released_while_requests_wait(self, rollout, old):
        requests = [request(p, SamplingParams(max_tokens=120)) for p in PROMPTS]

        async def release_once() -> list[Completion]:
            chunks: list[Chunk] = []
            async for chunk in rollout.generate(requests):
                if not chunks:
                    await asyncio.to_thread(rollout.pause, "keep")
                    await asyncio.to_thread(rollout.release, ["kv_cache"])
                    await asyncio.to_thread(rollout.resume, ["kv_cache"])
                    await asyncio.to_thread(rollout.resume)
                chunks.append(chunk)
            return gather(requests, chunks)

        for answer, prompt in zip(asyncio.run(release_once()), PROMPTS, strict=True):
            assert answer.finish_reason == "length"
            self.assert_matches(answer, prompt, old, 1.0)

    def test_an_unknown_tag(self, rollout):
        with pytest.raises(ValueError, match="kv_cache"):
            rollout.release(["optimizer"])

    # Counts and batches

    def test_stats(self, rollout):
        before = rollout.stats()
        rollout.complete([request(p, SamplingParams(max_tokens=7)) for p in PROMPTS])
        after = idle(rollout)
        assert after["generated_tokens"] - before["generated_tokens"] == 28
        assert after["version"] == rollout.version
        assert all(isinstance(value, int | float) for value in after.values())

    def test_a_batch_of_the_trainer(self, rollout, old):
        width = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in PROMPTS])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
        data = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "seeds": torch.arange(4) + 2**61})
        params = SamplingParams(max_tokens=10, temperature=0.8, stop_token_ids=tuple(range(2, VOCABULARY, 6)))
        found = rollout.generate_sequences(data, params)
        out, endings = found.batch, found.non_tensor_batch["ending"].tolist()
        lengths = out["response_mask"].sum(1)
        assert len(set(lengths.tolist())) > 1
        last = [int(row[length - 1]) for row, length in zip(out["responses"], lengths, strict=True)]
        assert endings == ["stop" if token in params.stop_token_ids else "length" for token in last]
        for i, prompt in enumerate(PROMPTS):
            tokens = out["responses"][i, : lengths[i]].tolist()
            reference = chosen(log_probs_of(old, prompt, tokens, 0.8), tokens)
            assert (out["rollout_log_probs"][i, : lengths[i]] - reference).abs().max() < self.tolerance
            assert out["versions"][i].tolist() == [rollout.version] * len(tokens) + [-1] * (10 - len(tokens))


async def collect(rollout: Rollout, requests: list[Request]) -> list[Chunk]:
    return [chunk async for chunk in rollout.generate(requests)]


async def collect_whole(rollout: Rollout, requests: list[Request]) -> list[Completion]:
    return gather(requests, await collect(rollout, requests))


def in_the_middle(
    scenario: Callable[[], Coroutine[Any, Any, list[Completion]]], hit: Callable[[list[Completion]], bool]
) -> list[Completion]:
    """Runs a scenario; again if a busy machine let everything finish before the moment that it is about."""
    for _ in range(5):
        answers = asyncio.run(scenario())
        if hit(answers):
            return answers
    raise AssertionError("five times nothing happened while requests were running")


def idle(rollout: Rollout) -> dict[str, float]:
    """The counters once nothing runs or waits any more."""
    until = time.monotonic() + DEADLINE
    while (stats := rollout.stats())["running"] + stats["waiting"]:
        assert time.monotonic() < until, stats
        time.sleep(0.02)
    return stats


def kept_tokens(probs: Tensor, within: bool, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Which tokens a cut leaves, one after the other in a plain loop; the border is a little wider than rounding."""
    order = probs.argsort(descending=True).tolist()
    if top_k > 0:
        order = order[:top_k]
    total = sum(float(probs[token]) for token in order) if within else 1.0
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if mass > top_p + 1e-5:
            break
        kept.append(token)
        mass += float(probs[token]) / total
    return {token for token in kept if float(probs[token]) >= min_p * float(probs[order[0]]) - 1e-6}


class Call(threading.Thread):
    """A call in a thread of its own, with its result."""

    def __init__(self, function: Any, *args: Any):
        super().__init__(daemon=True)
        self._function, self._args = function, args
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function(*self._args)
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self.is_alive()

    def result(self) -> Any:
        self.join(DEADLINE)
        assert self.done, "the call did not return"
        if self._error is not None:
            raise self._error
        return self._result
