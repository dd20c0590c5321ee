"""Requests to the embedded rollout: streams, aborts, pauses, memory pressure, new weights on the way, hostile input."""

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Sequence

import pytest
import torch

from meshrl.data.batch import DataProto
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import Completion, Request, SamplingParams

PAD, VOCABULARY = 0, 41
LONG = SamplingParams(20)


def made(model, version: int = 3, **settings) -> EmbeddedRollout:
    rollout = EmbeddedRollout(model, pad_token_id=PAD, shares_weights=True, **({"block_size": 4} | settings))
    rollout.update_weights([], version)
    return rollout


def asked(count: int, params: SamplingParams = LONG, seed: int = 0, shortest: int = 1, longest: int = 18):
    generator = torch.Generator().manual_seed(seed + 100 * count)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    prompts = [tuple(torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]
    return [Request(f"r{i}", prompt, params, seed + i) for i, prompt in enumerate(prompts)]


def check(reference, requests: Sequence[Request], answers: Sequence[Completion], atol: float = 2e-5) -> None:
    """Every token's log-prob is that of Transformers' own model on the finished sequence."""
    prompts = {request.request_id: request for request in requests}
    for answer in answers:
        request = prompts[answer.request_id]
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1]
        log_probs = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
        wanted = log_probs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), wanted, rtol=1e-5, atol=atol)


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def all_back(rollout: EmbeddedRollout) -> bool:
    return rollout.blocks.num_free == rollout.blocks.num_blocks and rollout.rows.num_held == 0


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen2", "qwen3_moe"])
def test_answers_are_those_of_the_model(make_lm, family):
    rollout, requests = made(make_lm(family)), asked(9)
    answers = rollout.complete(requests)
    assert [a.request_id for a in answers] == [r.request_id for r in requests]
    assert {a.finish_reason for a in answers} == {"length"}
    assert all(a.versions == [3] * 20 for a in answers)
    check(make_lm(family, "eager"), requests, answers)
    assert all_back(rollout)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"block_size": 1},
        {"block_size": 32},
        {"num_blocks": 12},
        {"num_blocks": 12, "max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_how_work_is_cut_changes_no_token(make_lm, settings):
    requests = asked(8)
    wanted = made(make_lm("qwen3")).complete(requests)
    rollout = made(make_lm("qwen3"), **settings)
    assert tokens_of(rollout.complete(requests)) == tokens_of(wanted)
    assert all_back(rollout)
    if settings.get("num_blocks"):
        assert rollout.stats()["preemptions"] > 0


def test_a_request_gives_the_same_tokens_alone_and_among_others(make_lm):
    rollout, requests = made(make_lm("qwen3")), asked(12)
    together = rollout.complete(requests)
    for place in (0, 5, 11):
        assert tokens_of(rollout.complete([requests[place]])) == [together[place].token_ids]


def test_samples_of_a_prompt_are_computed_once_differ_and_repeat(make_lm):
    model, seen = make_lm("qwen3"), []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(args[0].numel()))
    request = Request("a", tuple(range(2, 12)), SamplingParams(5, n=6), seed=4)
    rollout = made(model)
    answers = rollout.complete([request])
    assert seen == [10, 6, 6, 6, 6]
    assert [a.index for a in answers] == list(range(6))
    assert len({tuple(a.token_ids) for a in answers}) == 6
    # the first answer is that of the request with n = 1; fewer rows than samples change nothing
    assert made(model).complete([Request("b", request.prompt_token_ids, SamplingParams(5), 4)])[0].token_ids == (
        answers[0].token_ids
    )
    assert tokens_of(made(make_lm("qwen3"), max_num_seqs=4).complete([request])) == tokens_of(answers)
    check(make_lm("qwen3", "eager"), [request], answers)
    assert all_back(rollout)


def test_a_known_prefix_is_not_computed_again(make_lm):
    model, seen = make_lm("qwen3"), []
    rollout = made(model)
    prompt = tuple(range(2, 20))
    first = rollout.complete([Request("a", prompt, SamplingParams(6))])[0]
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(args[0].numel()))
    longer = (*prompt, *first.token_ids, 7, 8)  # 26 tokens; 18 + 5 have keys and values: five blocks of four
    second = rollout.complete([Request("b", longer, SamplingParams(2))])
    assert seen == [6, 1]
    check(make_lm("qwen3", "eager"), [Request("b", longer, SamplingParams(2))], second)
    assert rollout.stats()["cached_prompt_tokens"] == 20
    assert all_back(rollout)


def test_requests_with_one_prefix_wait_for_the_first_of_them(make_lm):
    model, seen = make_lm("qwen3"), []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(args[0].numel()))
    prefix = tuple(range(2, 18))
    requests = [Request(f"r{i}", (*prefix, 20 + i), SamplingParams(3), i) for i in range(4)]
    answers = made(model).complete(requests)
    assert seen[:2] == [17, 1]  # the first prompt, its second token ...
    assert sum(seen) == 17 + 3 + 4 * 2  # ... then one token each of the three others
    check(make_lm("qwen3", "eager"), requests, answers)


def test_new_weights_forget_all_prefixes(make_lm):
    model = make_lm("qwen3")
    rollout = made(model)
    request = Request("a", tuple(range(2, 20)), LONG)
    rollout.complete([request])
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    rollout.update_weights([], 4)
    reference = make_lm("qwen3", "eager")
    reference.load_state_dict(model.state_dict())
    answers = rollout.complete([request])
    check(reference, [request], answers)
    with pytest.raises(AssertionError):
        check(make_lm("qwen3", "eager"), [request], answers)  # the weights before give others


def steps(rollout: EmbeddedRollout, count: int) -> list:
    return [chunk for _ in range(count) for chunk in rollout.step()]


def enter(rollout: EmbeddedRollout, requests: Sequence[Request]) -> dict[str, Completion]:
    """Starts requests without running them; their answers gather in the result."""
    answers = {r.request_id: Completion(r.request_id, 0) for r in requests}
    rollout._enter(requests, lambda chunk: answers[chunk.request_id].add(chunk))
    return answers


def advance(rollout: EmbeddedRollout, count: int = 1000) -> None:
    for _ in range(count):
        with rollout.lock:
            rollout._advance()
        if not rollout.has_work():
            return


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 5}], ids=str)
def test_running_requests_go_on_with_new_weights_and_say_so(make_lm, settings):
    model, old, new = make_lm("qwen3"), make_lm("qwen3", "eager"), make_lm("qwen3", "eager")
    with torch.no_grad():
        for param in new.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    rollout, requests = made(model, **settings), asked(6)
    answers = enter(rollout, requests)
    advance(rollout, 7)
    model.load_state_dict(new.state_dict())
    rollout.update_weights([], 9)
    advance(rollout)
    changed = 0
    for request in requests:
        answer = answers[request.request_id]
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) <= {3, 9}
        changed += len(set(answer.versions)) == 2
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            both = {v: m(ids, use_cache=False).logits[0].log_softmax(-1) for v, m in ((3, old), (9, new))}
        for place, (token, version) in enumerate(zip(answer.token_ids, answer.versions, strict=True)):
            at = len(request.prompt_token_ids) - 1 + place
            assert answer.log_probs[place] == pytest.approx(float(both[version][at, token]), abs=3e-5)
            other = float(both[12 - version][at, token])
            assert abs(answer.log_probs[place] - other) > 1e-6
    assert changed >= (1 if settings else 6)
    assert all_back(rollout)


def test_a_replica_takes_weights_while_it_runs(make_lm):
    source = make_lm("qwen3")
    rollout = EmbeddedRollout(make_lm("qwen3"), pad_token_id=PAD, block_size=4)
    rollout.update_weights(source.named_parameters(), 1)
    answers = enter(rollout, asked(3))
    advance(rollout, 5)
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(1.1)
    rollout.update_weights(source.named_parameters(), 2)
    advance(rollout)
    assert all(a.versions == [1] * 6 + [2] * 14 for a in answers.values())
    fresh = made(source).complete(asked(3, seed=9))
    assert tokens_of(rollout.complete(asked(3, seed=9))) == tokens_of(fresh)


# Sampling


def test_stop_tokens_and_the_least_number_of_tokens(make_lm):
    stops = tuple(range(1, 12))
    free = made(make_lm("qwen3")).complete(asked(20, SamplingParams(12, stop_token_ids=stops)))
    assert {a.finish_reason for a in free} == {"stop", "length"}
    for answer in free:
        ends = [place for place, token in enumerate(answer.token_ids) if token in stops]
        assert ends in ([], [len(answer.token_ids) - 1])
        assert answer.finish_reason == ("stop" if ends else "length")
    requests = asked(20, SamplingParams(12, stop_token_ids=stops, min_tokens=5))
    held = made(make_lm("qwen3")).complete(requests)
    assert min(len(a.token_ids) for a in held) == 6
    assert all(token not in stops for a in held for token in a.token_ids[:5])
    check(make_lm("qwen3", "eager"), requests, held)


def test_stop_strings_end_an_answer_where_its_text_holds_them(make_lm, tokenizer):
    model = make_lm("qwen3", vocab_size=len(tokenizer))
    prompt = tuple(tokenizer("1+2=")["input_ids"])
    stops = ("ab", "=3", "7")
    requests = [Request(f"r{i}", prompt, SamplingParams(60, stop=stops), i) for i in range(30)]
    free = made(model).complete([Request(r.request_id, prompt, SamplingParams(60), r.seed) for r in requests])
    answers = made(model, tokenizer=tokenizer).complete(requests)
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    for answer, whole in zip(answers, free, strict=True):
        texts = [tokenizer.decode(whole.token_ids[:n]) for n in range(61)]
        first = next((n for n, text in enumerate(texts) if any(stop in text for stop in stops)), 60)
        assert answer.token_ids == whole.token_ids[:first]
        held = any(stop in texts[first] for stop in stops)
        assert answer.finish_reason == ("stop" if held else "length")


def test_a_stop_string_from_before_the_least_number_of_tokens_does_not_end_an_answer(make_lm, tokenizer):
    model = make_lm("qwen3", vocab_size=len(tokenizer))
    prompt = tuple(tokenizer("1+2=")["input_ids"])
    stops = ("1", "2", "=", "7")
    requests = [Request(f"r{i}", prompt, SamplingParams(40, stop=stops, min_tokens=20), i) for i in range(30)]
    free = made(model).complete([Request(r.request_id, prompt, SamplingParams(40), r.seed) for r in requests])
    answers = made(model, tokenizer=tokenizer).complete(requests)
    assert any(len(a.token_ids) > 21 for a in answers)
    for answer, whole in zip(answers, free, strict=True):
        texts = [tokenizer.decode(whole.token_ids[:n]) for n in range(41)]
        first = next((n for n, text in enumerate(texts) if n > 20 and text.endswith(stops)), 40)
        assert answer.token_ids == whole.token_ids[:first]


def test_a_stop_string_without_a_tokenizer_is_an_error_of_its_request(make_lm):
    requests = [*asked(2), Request("s", (2, 3), SamplingParams(4, stop=("x",)))]
    answers = made(make_lm("qwen3")).complete(requests)
    assert [a.finish_reason for a in answers] == ["length", "length", "error"]
    assert "tokenizer" in answers[2].error


def test_logit_bias_forces_and_forbids(make_lm):
    rollout = made(make_lm("qwen3"))
    forced = rollout.complete(asked(3, SamplingParams(6, logit_bias={17: 1e4})))
    assert tokens_of(forced) == [[17] * 6] * 3
    check(make_lm("qwen3", "eager"), asked(3, SamplingParams(6)), forced)  # log-probs of the model itself
    forbidden = rollout.complete(asked(8, SamplingParams(20, logit_bias=dict.fromkeys(range(2, 41), -1e4))))
    assert {token for tokens in tokens_of(forbidden) for token in tokens} <= {0, 1}


def test_a_repetition_penalty_follows_the_definition(make_lm):
    """Greedy, against a plain loop over Transformers' own logits."""
    reference = make_lm("qwen3", "eager")
    requests = asked(4, SamplingParams(15, temperature=0.0, repetition_penalty=1.7))
    answers = made(make_lm("qwen3"), num_blocks=40).complete(requests)
    plain = made(make_lm("qwen3")).complete(asked(4, SamplingParams(15, temperature=0.0)))
    assert tokens_of(plain) != tokens_of(answers)
    for request, answer in zip(requests, answers, strict=True):
        ids = list(request.prompt_token_ids)
        for token in answer.token_ids:
            with torch.no_grad():
                logits = reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            for seen in set(ids):
                logits[seen] = logits[seen] / 1.7 if logits[seen] > 0 else logits[seen] * 1.7
            assert int(logits.argmax()) == token
            ids.append(token)


def test_rows_with_different_parameters_do_not_disturb_each_other(make_lm):
    kinds = [
        SamplingParams(10),
        SamplingParams(10, temperature=0.0),
        SamplingParams(10, temperature=0.6, top_k=3),
        SamplingParams(10, top_p=0.5),
        SamplingParams(10, min_p=0.3),
        SamplingParams(10, repetition_penalty=1.5),
        SamplingParams(10, logit_bias={5: 3.0}),
        SamplingParams(10, stop_token_ids=(4, 5, 6), min_tokens=3),
        SamplingParams(10, top_log_probs=4),
    ]
    requests = [Request(f"r{i}", (3, 4 + i, 9), kind, i) for i, kind in enumerate(kinds)]
    together = made(make_lm("qwen3")).complete(requests)
    for request, answer in zip(requests, together, strict=True):
        assert made(make_lm("qwen3")).complete([request])[0].token_ids == answer.token_ids, request.params
    check(make_lm("qwen3", "eager"), requests, together)


def test_the_likeliest_tokens_come_along(make_lm):
    requests = asked(3, SamplingParams(6, temperature=0.8, top_log_probs=5))
    answers = made(make_lm("qwen3")).complete(requests)
    reference = make_lm("qwen3", "eager")
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1]
        wanted = (logits / 0.8).log_softmax(-1).topk(5)
        for place, found in enumerate(answer.top_log_probs):
            assert list(found) == wanted.indices[place].tolist()
            assert list(found.values()) == pytest.approx(wanted.values[place].tolist(), abs=2e-5)


# Streams, aborts, pauses


async def collect(rollout, requests, most: int | None = None):
    chunks = []
    async for chunk in rollout.generate(requests):
        chunks.append(chunk)
        if most is not None and len(chunks) >= most:
            break
    return chunks


def test_a_stream_gives_the_same_answer_token_by_token(make_lm):
    rollout, requests = made(make_lm("qwen3")), asked(4, SamplingParams(7, top_log_probs=2))
    wanted = rollout.complete(requests)
    chunks = asyncio.run(collect(rollout, requests))
    rollout.close()
    assert len(chunks) == 28
    for request, answer in zip(requests, wanted, strict=True):
        own = [chunk for chunk in chunks if chunk.request_id == request.request_id]
        assert [token for chunk in own for token in chunk.token_ids] == answer.token_ids
        assert [chunk.finish_reason for chunk in own] == [None] * 6 + ["length"]
        tops = [top for chunk in own for top in chunk.top_log_probs]
        assert [list(top) for top in tops] == [list(top) for top in answer.top_log_probs]
        assert tops[3] == pytest.approx(answer.top_log_probs[3], abs=1e-5)


def test_leaving_a_stream_frees_its_blocks(make_lm):
    rollout = made(make_lm("qwen3"))

    async def leave():
        stream = rollout.generate(asked(4, SamplingParams(100, n=2)))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    rollout.close()
    assert all_back(rollout)
    assert rollout._left == {}


def test_leaving_while_the_engine_is_busy_leaves_nothing_behind(make_lm):
    """The request waits for a step to end when its caller goes away: it must not come in afterwards."""
    rollout = made(make_lm("qwen3"))

    async def leave():
        stream = rollout.generate(asked(4, SamplingParams(100, n=2)))
        with rollout.lock:
            asking = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(leave())
    rollout.close()
    assert rollout._left == {}
    assert all_back(rollout)


@pytest.mark.parametrize("has_thread", [False, True])
def test_a_request_that_enters_does_not_hold_up_the_event_loop(make_lm, monkeypatch, has_thread):
    """Something long, such as a weight update, gets the lock right behind it."""
    rollout, enter = made(make_lm("qwen3")), EmbeddedRollout._enter
    held, ticked, in_time = threading.Event(), threading.Event(), []

    def hold():
        with rollout.lock:
            held.set()
            in_time.append(ticked.wait(5))

    def enter_before_it(self, *args, **settings):
        enter(self, *args, **settings)
        threading.Thread(target=hold).start()
        held.wait()

    async def tick():
        while not held.is_set():
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.005)
        ticked.set()

    async def story():
        first, second = asked(2, SamplingParams(3))
        if has_thread:
            await collect(rollout, [first])
        monkeypatch.setattr(EmbeddedRollout, "_enter", enter_before_it)
        return (await asyncio.gather(collect(rollout, [second]), tick()))[0]

    assert asyncio.run(story())[-1].finish_reason == "length"
    rollout.close()
    assert in_time == [True]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_closed_rollout_takes_no_requests(make_lm):
    rollout = made(make_lm("qwen3"))
    asyncio.run(collect(rollout, asked(1)))
    rollout.close()
    rollout.close()
    for call in (rollout.complete, lambda requests: list(rollout.as_they_end(requests))):
        with pytest.raises(RuntimeError, match="is closed"):
            call(asked(1))
    with pytest.raises(RuntimeError, match="is closed"):
        asyncio.run(asyncio.wait_for(collect(rollout, asked(1)), 20))


def test_a_stream_that_came_in_while_the_rollout_closed_ends_with_words(make_lm, monkeypatch):
    monkeypatch.setattr("meshrl.rollout.in_process_rollout.POLL_SECONDS", 0.05)
    rollout, abort = made(make_lm("qwen3")), EmbeddedRollout.abort
    rollout.pause()

    async def story():
        stream = asyncio.ensure_future(collect(rollout, asked(1)))
        while not rollout._left:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(EmbeddedRollout, "abort", lambda self, request_ids=None: None)  # came too early for it
        await asyncio.to_thread(rollout.close)
        monkeypatch.setattr(EmbeddedRollout, "abort", abort)
        with pytest.raises(RuntimeError, match="closed while requests were running"):
            await asyncio.wait_for(stream, 20)

    asyncio.run(story())
    assert all_back(rollout)


def test_a_name_that_is_taken_does_not_end_whoever_has_it(make_lm):
    rollout, (request,) = made(make_lm("qwen3")), asked(1, SamplingParams(30))

    async def twice():
        first = rollout.generate([request])
        found = [await anext(first)]
        with pytest.raises(ValueError, match="already running"):
            await anext(rollout.generate([request]))
        return found + [chunk async for chunk in first]

    chunks = asyncio.run(twice())
    rollout.close()
    assert chunks[-1].finish_reason == "length"


def test_an_engine_that_failed_in_its_thread_says_so_to_everyone(make_lm, monkeypatch):
    rollout, requests = made(make_lm("qwen3")), asked(2)
    monkeypatch.setattr(rollout.runner, "decode", lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="engine failed") as caught:
        asyncio.run(collect(rollout, requests))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    enter(rollout, asked(1))
    ids = torch.tensor([[2, 3, 4]])
    fields = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.arange(1)}
    for call in (
        lambda: rollout.pause("wait"),
        lambda: rollout.complete([Request("other", (2, 3), LONG, 0)]),
        lambda: rollout.generate_sequences(DataProto.from_dict(fields), LONG),
    ):
        with pytest.raises(RuntimeError, match="engine failed"):
            call()


@pytest.mark.parametrize("streams", [False, True])
def test_a_step_that_fails_in_one_callers_thread_is_heard_by_the_others(make_lm, monkeypatch, streams):
    rollout, (first, second) = made(make_lm("qwen3")), asked(2)
    rollout.pause()
    breaks = iter([True])
    monkeypatch.setattr(rollout, "step", lambda: 1 / 0 if next(breaks, False) else [])  # once; then it gives nothing
    heard: list[Exception] = []

    def ask(request, streamed):
        try:
            asyncio.run(collect(rollout, [request])) if streamed else rollout.complete([request])
        except Exception as error:
            heard.append(error)

    callers = [threading.Thread(target=ask, args=pair, daemon=True) for pair in ((first, False), (second, streams))]
    for caller in callers:
        caller.start()
    while len(rollout._left) < 2:
        time.sleep(0.001)
    rollout.resume()
    for caller in callers:
        caller.join(5)
    assert [type(error.__cause__ or error) for error in heard] == [ZeroDivisionError] * 2
    rollout.close()


def test_streams_and_batches_share_the_engine(make_lm):
    rollout = made(make_lm("qwen3"), max_num_seqs=5)
    streamed, batch = asked(4), [Request(f"b{i}", r.prompt_token_ids, LONG, i) for i, r in enumerate(asked(5, seed=50))]
    wanted = tokens_of(rollout.complete(batch))
    found = []
    thread = threading.Thread(target=lambda: found.extend(rollout.complete(batch)))

    async def both():
        thread.start()
        return await collect(rollout, streamed)

    chunks = asyncio.run(both())
    thread.join(timeout=60)
    rollout.close()
    assert tokens_of(found) == wanted
    assert len(chunks) == 80
    assert all_back(rollout)


@pytest.mark.parametrize("after", [0, 1, 2, 6])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 4}], ids=str)
def test_aborting_in_every_state_keeps_what_was_sampled(make_lm, settings, after):
    rollout = made(make_lm("qwen3"), **settings)
    requests = asked(6, longest=10)
    wanted = {a.request_id: a.token_ids for a in rollout.complete(requests)}
    answers = enter(rollout, requests)
    advance(rollout, after)
    rollout.abort(["r1", "r4", "unknown"])
    for name in ("r1", "r4"):
        assert answers[name].finish_reason == "abort"
        assert answers[name].token_ids == wanted[name][: len(answers[name].token_ids)]
    advance(rollout)
    for name in ("r0", "r2", "r3", "r5"):
        assert (answers[name].token_ids, answers[name].finish_reason) == (wanted[name], "length")
    assert all_back(rollout)


def test_aborting_samples_whose_prefill_is_under_way(make_lm):
    rollout = made(make_lm("qwen3"), max_num_batched_tokens=4)
    requests = [Request("a", tuple(range(2, 14)), SamplingParams(4, n=3)), Request("b", (5, 6), SamplingParams(4))]
    wanted = tokens_of(rollout.complete(requests))[3]
    answers = []
    rollout._enter(requests, answers.append)
    advance(rollout, 2)
    rollout.abort(["a"])
    assert sorted(chunk.index for chunk in answers if chunk.request_id == "a") == [0, 1, 2]
    advance(rollout)
    assert answers[-1].token_ids == wanted
    assert all_back(rollout)


def test_pausing_keeps_ends_or_waits_for_what_runs(make_lm):
    rollout, requests = made(make_lm("qwen3")), asked(3)
    wanted = tokens_of(rollout.complete(requests))
    answers = enter(rollout, requests)
    advance(rollout, 3)
    rollout.pause()
    result = []
    thread = threading.Thread(target=lambda: result.extend(rollout.complete([Request("late", (4, 5), LONG)])))
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    rollout.resume()
    thread.join(timeout=60)
    assert len(result[0].token_ids) == 20
    advance(rollout)
    assert [a.token_ids for a in answers.values()] == wanted
    answers = enter(rollout, requests)
    advance(rollout, 3)
    rollout.pause("abort")
    assert {a.finish_reason for a in answers.values()} == {"abort"}
    rollout.resume()
    answers = enter(rollout, requests)
    rollout.pause("wait")
    assert [a.token_ids for a in answers.values()] == wanted
    with pytest.raises(ValueError, match="pause mode"):
        rollout.pause("never")


def test_a_pause_that_waits_makes_no_step_while_memory_is_released(make_lm, monkeypatch):
    rollout, requests = made(make_lm("qwen3")), asked(3)
    wanted = tokens_of(rollout.complete(requests))
    answers = enter(rollout, requests)
    advance(rollout, 3)
    rollout.release(["kv_cache"])
    suspended, step = [], EmbeddedRollout.step

    def noted(self):
        suspended.append(self.is_suspended())
        return [] if suspended[-1] else step(self)

    monkeypatch.setattr(EmbeddedRollout, "step", noted)
    thread = threading.Thread(target=rollout.pause, args=("wait",))
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    rollout.resume(["kv_cache"])
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert set(suspended) == {False}
    assert [a.token_ids for a in answers.values()] == wanted


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_released_weights_take_no_memory(make_lm, family):
    rollout = EmbeddedRollout(make_lm(family), pad_token_id=PAD)
    rollout.update_weights(make_lm(family).state_dict().items(), 1)
    rollout.complete(asked(2))
    places = {weight.untyped_storage().data_ptr() for weight in rollout.hf_model.parameters()}
    rollout.release(["weights"])
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at all objects wakes some that are deprecated
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    # Others, of other tests, may have no memory of this kind.
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided and tensor.device.type == "cpu"]
    assert not [tensor.shape for tensor in dense if tensor.untyped_storage().data_ptr() in places]


def test_releasing_and_resuming_in_the_middle_changes_no_token(make_lm):
    rollout, requests = made(make_lm("qwen3")), asked(5)
    wanted = tokens_of(rollout.complete(requests))
    answers = enter(rollout, requests)
    advance(rollout, 4)
    rollout.release()
    assert rollout.is_suspended()
    assert not rollout.runner.cache.stores
    rollout.resume(["weights"])
    assert rollout.is_suspended()
    rollout.resume(["kv_cache"])
    advance(rollout)
    assert [a.token_ids for a in answers.values()] == wanted
    with pytest.raises(ValueError, match="unknown tag 'cache'"):
        rollout.release(["cache"])


def test_a_replica_gives_its_weights_back_and_needs_them_sent_again(make_lm):
    source = make_lm("qwen3")
    rollout = EmbeddedRollout(make_lm("qwen3"), pad_token_id=PAD)
    rollout.update_weights(source.named_parameters(), 1)
    wanted = tokens_of(rollout.complete(asked(3)))
    rollout.release(["weights"])
    assert sum(p.numel() for p in rollout.hf_model.parameters()) == 0
    with pytest.raises(RuntimeError, match="resume"):
        rollout.update_weights(source.named_parameters(), 2)
    rollout.resume(["weights"])
    assert rollout.is_suspended()  # nothing but zeros so far
    rollout.update_weights(source.named_parameters(), 2)
    assert tokens_of(rollout.complete(asked(3))) == wanted


# Hostile input


def test_each_bad_request_ends_with_its_own_error_and_all_others_finish(make_lm):
    rollout = made(make_lm("qwen3"), max_model_len=32)
    fine = asked(4, longest=8)
    bad = {
        "empty": Request("empty", (), LONG),
        "together may have 32": Request("long", (2,) * 32, LONG),
        "token 41": Request("high", (2, 41), LONG),
        "token -1": Request("negative", (-1,), LONG),
        "logit_bias": Request("bias", (2,), SamplingParams(4, logit_bias={41: 1.0})),
        "stop_token_ids": Request("ends", (2,), SamplingParams(4, min_tokens=1, stop_token_ids=(0, 41))),
        "stop_token_ids names": Request("negative end", (2,), SamplingParams(4, stop_token_ids=(-5,))),
        "top_log_probs": Request("top", (2,), SamplingParams(4, top_log_probs=42)),
        "n is": Request("many", (2,), SamplingParams(4, n=70_000)),
        "every token": Request("nothing", (2,), SamplingParams(4, min_tokens=1, stop_token_ids=tuple(range(41)))),
    }
    answers = {a.request_id: a for a in rollout.complete([*bad.values(), *fine]) if a.index == 0}
    for message, request in bad.items():
        answer = answers[request.request_id]
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert message in answer.error
    assert all(answers[r.request_id].finish_reason == "length" for r in fine)
    assert all_back(rollout)


def test_an_answer_ends_where_the_context_does(make_lm):
    rollout = made(make_lm("qwen3"), max_model_len=16)
    answers = rollout.complete([Request("a", (2,) * 15, SamplingParams(10**9)), Request("b", (2,), SamplingParams(99))])
    assert [len(a.token_ids) for a in answers] == [1, 15]
    assert {a.finish_reason for a in answers} == {"length"}
    assert all_back(rollout)


@pytest.mark.parametrize("how", [{"n": 1}, {"n": 3}])
def test_memory_for_three_blocks_serves_everyone_in_turn(make_lm, how):
    rollout = made(make_lm("qwen3"), num_blocks=3)
    assert rollout.max_model_len == 12
    requests = asked(7, SamplingParams(9, **how), longest=14)
    answers = rollout.complete(requests)
    lengths = {r.request_id: len(r.prompt_token_ids) for r in requests}
    wanted = made(make_lm("qwen3"), max_model_len=12).complete(requests)
    assert tokens_of(answers) == tokens_of(wanted)
    for answer in answers:
        served = lengths[answer.request_id] < 12
        assert answer.finish_reason == ("length" if served else "error")
    assert all_back(rollout)


def test_extreme_sampling_values_are_harmless(make_lm):
    kinds = [
        SamplingParams(3, temperature=1e-30),
        SamplingParams(3, temperature=1e30),
        SamplingParams(3, top_k=10**9, top_p=1e-12, min_p=1.0),
        SamplingParams(3, repetition_penalty=1e30),
        SamplingParams(3, logit_bias={2: 1e30, 3: -1e30}),
    ]
    requests = [Request(f"r{i}", (2, 3), kind, seed=(-1) ** i * 10**30) for i, kind in enumerate(kinds)]
    answers = made(make_lm("qwen3")).complete(requests)
    assert all(a.finish_reason == "length" and len(a.token_ids) == 3 for a in answers)
    assert all(0 <= token < VOCABULARY for a in answers for token in a.token_ids)


def test_ten_thousand_requests_at_once(make_lm):
    rollout = made(make_lm("qwen3"), num_blocks=300)
    requests = [Request(f"r{i}", (2 + i % 37, 3), SamplingParams(2), i) for i in range(10_000)]
    answers = rollout.complete(requests)
    assert all(len(a.token_ids) == 2 for a in answers)
    assert all_back(rollout)


def test_a_name_cannot_be_used_twice_at_the_same_time(make_lm):
    rollout = made(make_lm("qwen3"))
    enter(rollout, asked(2))
    with pytest.raises(ValueError, match="'r1' is already running"):
        rollout.complete(asked(2)[1:])
    with pytest.raises(ValueError, match="'x' is already running"):
        rollout.complete([Request("x", (2,), LONG), Request("x", (3,), LONG)])
    assert sorted(rollout._left) == ["r0", "r1"]
    rollout.abort()
    assert all_back(rollout)


def test_stats_count_what_happened(make_lm):
    rollout = made(make_lm("qwen3"))
    enter(rollout, asked(4, SamplingParams(5)))
    before = rollout.stats()
    assert (before["waiting"], before["running"], before["cache_usage"]) == (4, 0, 0)
    advance(rollout, 2)
    assert rollout.stats()["running"] == 4
    assert 0 < rollout.stats()["cache_usage"] <= 1
    advance(rollout)
    after = rollout.stats()
    assert (after["generated_tokens"], after["finished"], after["waiting"], after["running"]) == (20, 4, 0, 0)
    assert after["version"] == 3
