"""The server's parts by themselves, and the application around a rollout that fails, hangs or ends early on command."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshrl.rollout.base import Rollout
from meshrl.rollout.in_process_rollout import SteppingRollout
from meshrl.rollout.requests import Chunk, Request, SamplingParams
from meshrl.rollout.text import TextStream, answer_text, find_stop
from meshrl.serving import openai_answers
from meshrl.serving.app import build_app, from_folder
from meshrl.serving.openai_answers import ChatShape, CompletionShape, Transcript
from meshrl.serving.openai_requests import ChatBody, CompletionBody
from meshrl.serving.serve import _listen
from meshrl.serving.service import ApiError, Histogram, Service, Slots
from meshrl.serving.settings import Settings


class Scripted(Rollout):
    """Answers every request by what `script` does."""

    version, pad_token_id = 0, 0

    def __init__(self, script):
        self.script, self.aborted, self.paused, self.fails = script, [], None, None
        self.entered = threading.Event()

    async def generate(self, requests):
        for request in requests:
            async for chunk in self.script(self, request):
                yield chunk

    def complete(self, requests):
        raise AssertionError("the server streams")

    def abort(self, request_ids=None):
        self.aborted += request_ids
        self.entered.set()

    def pause(self, mode="keep"):
        self.paused = mode

    def release(self, tags=()):
        raise AssertionError("never")

    def resume(self, tags=None):
        self.paused = None

    def update_weights(self, weights, version):
        if self.fails:
            raise self.fails
        self.version = version

    def stats(self):
        return {"running": 0.0, "generated_tokens": 3.0}

    def close(self):
        pass


async def two_tokens(_, request):
    yield Chunk(request.request_id, 0, [2], [-1.0], [0])
    yield Chunk(request.request_id, 0, [3], [-2.0], [0], "length")


async def breaks(_, request):
    yield Chunk(request.request_id, 0, [2], [-1.0], [0])
    raise RuntimeError("the device fell off")


async def gives_nan(_, request):
    yield Chunk(request.request_id, 0, [2], [float("nan")], [0], "length")


async def fails_at_once(_, request):
    yield Chunk(request.request_id, 0, [2], [-1.0], [0], "error", "the device fell off")


async def refuses(_, request):
    yield Chunk(request.request_id, 0, [], [], [], "error", "no such thing")


async def hangs(rollout, request):
    while not rollout.aborted:
        await asyncio.sleep(0.01)
    yield Chunk(request.request_id, 0, [], [], [], "abort")


@pytest.fixture
def serve(tiny_model_folder, tokenizer):
    def make(script, kind=Scripted, **settings):
        rollout = kind(script)
        opened = SimpleNamespace(
            images=None,
            rollout=rollout,
            tokenizer=tokenizer,
            path=tiny_model_folder,
            dtype=torch.float32,
            vocabulary=len(tokenizer),
            context=32,
            stop_token_ids=(1,),
            trust_remote_code=False,
        )
        service = Service(opened, Settings("tiny", **settings))
        transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
        return rollout, httpx.AsyncClient(transport=transport, base_url="http://localhost")

    return make


BODY = {"model": "tiny", "prompt": "1", "max_tokens": 2}


def post(client, route="/v1/completions", body=BODY, **options):
    async def call():
        return await client.post(route, json=body, **options)

    return asyncio.run(call())


def test_without_a_token_nobody_may_change_the_server(serve):
    rollout, client = serve(two_tokens)
    for route in ("/pause", "/resume", "/update_weights"):
        answer = post(client, route, {}, headers={"authorization": "Bearer "})
        assert answer.status_code == 403
        assert "token" in answer.json()["error"]["message"]
    assert rollout.paused is None


def test_with_a_key_only_its_bearer_may_generate(serve):
    _, client = serve(two_tokens, api_key="k", token="t")
    assert post(client).status_code == 401
    assert post(client, headers={"authorization": "Bearer t"}).status_code == 401
    assert post(client, headers={"authorization": "bearer k"}).json()["choices"][0]["text"] == "01"
    assert post(client, "/pause", {}, headers={"authorization": "Bearer k"}).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_a_rollout_that_breaks_is_reported_and_health_says_so(serve, stream):
    rollout, client = serve(breaks)
    answer = post(client, body=BODY | {"stream": stream})
    assert "the rollout failed" in answer.text
    assert answer.status_code == (200 if stream else 500)
    assert answer.text.endswith("data: [DONE]\n\n") == stream

    async def health():
        return await client.get("/health")

    assert asyncio.run(health()).status_code == 503
    assert "fell off" in asyncio.run(health()).json()["error"]
    rollout.script = two_tokens
    assert post(client).status_code == 200
    assert asyncio.run(health()).status_code == 200


def test_nan_and_late_errors_are_the_servers_own(serve):
    _, client = serve(gives_nan)
    assert "NaN" in post(client).json()["error"]["message"]
    _, client = serve(refuses)
    answer = post(client)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "no such thing")


def test_only_what_an_engine_refuses_at_the_door_is_the_clients_fault(serve):
    class InProcess(Scripted, SteppingRollout):
        add = step = has_work = drop = None  # the script stands for them

    for script, status in ((refuses, 400), (fails_at_once, 500)):
        _, client = serve(script, kind=InProcess)
        assert post(client).status_code == status


def test_resuming_while_a_pause_waits_leaves_nothing_paused(serve):
    rollout, client = serve(two_tokens, token="t")
    waits, goes_on = threading.Event(), threading.Event()

    def pause(mode):
        waits.set()
        assert goes_on.wait(20)
        rollout.paused = mode

    rollout.pause = pause
    secret = {"authorization": "Bearer t"}

    async def story():
        pausing = asyncio.create_task(client.post("/pause", json={"mode": "wait"}, headers=secret))
        await asyncio.to_thread(waits.wait)
        assert (await client.post("/resume", headers=secret)).status_code == 200
        goes_on.set()
        await pausing
        return await client.post("/v1/completions", json=BODY)

    assert asyncio.run(story()).status_code == 200
    assert rollout.paused is None


@pytest.mark.parametrize("shut", [True, False])
def test_reading_weights_ends_with_the_rollout_as_it_is_wanted_by_then(serve, tmp_path, monkeypatch, shut):
    rollout, _ = serve(two_tokens)
    slots = Slots(1, 1)
    slots.shut(not shut)
    opened = SimpleNamespace(dtype=torch.float32, trust_remote_code=False)
    service = SimpleNamespace(slots=slots, rollout=rollout, opened=opened, shapes={"w": [1]}, tied=())
    (tmp_path / "config.json").write_text("{}")

    def read(*_):
        assert rollout.paused == "keep"
        slots.shut(shut)  # somebody pauses or resumes meanwhile
        return {"w": torch.zeros(1)}

    monkeypatch.setattr("meshrl.serving.app.folder_weights", read)
    assert set(from_folder(str(tmp_path), service)) == {"w"}
    assert rollout.paused == ("keep" if shut else None)


def test_a_request_that_takes_too_long_is_ended(serve):
    rollout, client = serve(hangs, request_seconds=0.1)
    assert post(client).status_code == 504
    assert rollout.aborted


def test_a_client_that_stops_reading_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr(openai_answers, "LAST_WORDS_SECONDS", 0.05)
    _, client = serve(two_tokens, request_seconds=0.1)
    app, read = client._transport.app, []
    body = json.dumps(BODY | {"stream": True}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}

    async def send(message):
        read.append(message["type"])
        if len(read) > 1:
            await asyncio.Event().wait()

    async def call():
        arriving = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            return next(arriving, None) or await asyncio.Event().wait()

        await asyncio.wait_for(app(scope, receive, send), 20)

    asyncio.run(call())
    assert read == ["http.response.start", "http.response.body", "http.response.body"]


def test_connections_end_when_nothing_is_read():
    with _listen("127.0.0.1", 0, 0.2) as listening, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listening.getsockname())
        sender, _ = listening.accept()
        with sender, pytest.raises(OSError, match="timed out"):
            sender.sendall(b"x" * (64 << 20))


def test_a_body_that_trickles_in_is_not_waited_for(serve):
    _, client = serve(two_tokens, body_seconds=0.1)

    async def trickle():
        yield b'{"model": '
        await asyncio.sleep(5)
        yield b'"tiny"}'

    async def call():
        return await client.post("/v1/completions", content=trickle(), headers={"content-type": "application/json"})

    assert asyncio.run(call()).status_code == 408


def test_a_failed_update_leaves_the_server_paused(serve, tiny_model_folder):
    rollout, client = serve(two_tokens, token="t", request_seconds=1.5)
    secret = {"authorization": "Bearer t"}
    rollout.fails = RuntimeError("half of it")
    body = {"path": str(tiny_model_folder)}
    answer = post(client, "/update_weights", body, headers=secret)
    assert answer.status_code == 500
    assert rollout.paused == "keep"
    waited = post(client)
    assert waited.status_code == 503
    assert int(waited.headers["retry-after"]) >= 1
    rollout.fails = None
    assert post(client, "/update_weights", body, headers=secret).json() == {"version": 1}
    assert post(client, "/resume", {}, headers=secret).status_code == 200
    assert post(client).status_code == 200


def test_only_one_update_at_a_time(serve, tiny_model_folder):
    rollout, client = serve(two_tokens, token="t")
    body, secret = {"path": str(tiny_model_folder)}, {"authorization": "Bearer t"}

    async def both():
        calls = [client.post("/update_weights", json=body, headers=secret) for _ in range(2)]
        return sorted(answer.status_code for answer in await asyncio.gather(*calls))

    assert asyncio.run(both()) == [200, 409]
    assert rollout.version == 1


def test_settings_are_checked():
    for wrong in ({"max_concurrency": 0}, {"max_queue": -1}, {"request_seconds": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Settings("tiny", **wrong)


# Slots


def test_slots_serve_in_turn_and_forget_those_that_leave():
    async def story():
        slots, order = Slots(2, 3), []
        leave = {name: asyncio.Event() for name in "abcde"}

        async def visit(name):
            async with slots.taken():
                order.append(name)
                await leave[name].wait()

        tasks = {}
        for name in "abcde":
            tasks[name] = asyncio.create_task(visit(name))
            await asyncio.sleep(0)
        assert (order, slots.running, slots.waiting) == (["a", "b"], 2, 3)
        with pytest.raises(ApiError) as refused:
            await visit("late")
        assert (refused.value.status, refused.value.retry_after) == (503, 3)
        # One leaves the queue; another at the very moment at which its turn comes.
        tasks["c"].cancel()
        await asyncio.sleep(0)
        leave["a"].set()
        await asyncio.wait({tasks["a"]})
        tasks["d"].cancel()
        await asyncio.wait({tasks["d"]})
        await asyncio.sleep(0)
        assert (order[-1], slots.running, slots.waiting) == ("e", 2, 0)
        slots.shut(True)
        f = asyncio.create_task(slots.taken().__aenter__())
        leave["b"].set()
        await asyncio.sleep(0.01)
        assert (slots.running, slots.waiting) == (1, 1)
        slots.shut(False)
        await f
        assert (slots.running, slots.waiting) == (2, 0)
        leave["e"].set()
        await tasks["e"]

    asyncio.run(story())


def test_histograms_count_up_to_each_bound():
    histogram = Histogram()
    for seconds in (0.01, 0.02, 0.3, 1000.0):
        histogram.observe(seconds)
    lines = dict(line.rsplit(" ", 1) for line in histogram.lines("x", "text") if line[0] != "#")
    assert lines['x_bucket{le="0.01"}'] == "1"
    assert lines['x_bucket{le="0.025"}'] == "2"
    assert lines['x_bucket{le="300.0"}'] == "3"
    assert lines['x_bucket{le="+Inf"}'] == lines["x_count"] == "4"


# Text


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte, as the pieces of rare characters are in real tokenizers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_no_half_characters(byte_tokenizer, step):
    text = "naïve 漢字 🙂🙃 end"
    tokens = byte_tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    stream = TextStream(byte_tokenizer)
    pieces = [stream.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    assert "".join(pieces) + stream.finish(stopped=False) == text
    assert not any("\ufffd" in piece for piece in pieces)
    # A character that never gets whole is shown as broken at the end, and broken bytes do not hold up the rest.
    stream = TextStream(byte_tokenizer)
    assert stream.push(tokens[:3]) == "na"
    assert stream.finish(stopped=False) == "\ufffd"
    stream = TextStream(byte_tokenizer)
    assert len("".join(stream.push([tokens[3]]) for _ in range(20))) > 8


@pytest.mark.parametrize("step", [1, 3, 50])
def test_stop_strings_are_held_back_and_cut(tokenizer, step):
    def streamed(text, stops, stopped, start=0):
        tokens = tokenizer(text)["input_ids"]
        stream = TextStream(tokenizer, stops, start)
        pieces = [stream.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        return "".join(pieces), stream.finish(stopped)

    assert "".join(streamed("0123abc", ["ab", "3ab"], True)) == "012"
    assert "".join(streamed("0123abc", ["9", "3abc"], True)) == "012"
    sent, rest = streamed("0101012", ["01013"], False)
    assert sent + rest == "0101012"
    assert streamed("01a", ["ab"], False) == ("01", "a")
    # Before `start` tokens stop strings are text like any other, unless they end behind it.
    assert "".join(streamed("abc1ab2", ["ab"], True, start=3)) == "abc1"
    assert "".join(streamed("01ab", ["ab"], True, start=3)) == "01"
    assert "".join(streamed("01a23", ["ab", "a", "23"], True, start=3)) == "01a"


def test_the_token_that_ended_an_answer_has_no_text(tokenizer):
    params = SamplingParams(max_tokens=9, stop_token_ids=(1, 5))
    tokens = tokenizer("0123")["input_ids"]
    assert tokens[-1] == 5
    assert answer_text(tokenizer, params, tokens, "stop") == "012"
    assert answer_text(tokenizer, params, tokens, "length") == "0123"
    assert answer_text(tokenizer, params, [*tokens, 1], "stop") == "0123"


def test_a_stop_string_before_the_least_number_of_tokens_stays_in_the_text(tokenizer):
    params = SamplingParams(max_tokens=9, stop=("ab",), min_tokens=4)
    tokens = tokenizer("0abc1ab")["input_ids"]
    assert answer_text(tokenizer, params, tokens, "stop") == "0abc1"
    assert answer_text(tokenizer, params, tokens[:5], "length") == "0abc1"


def test_a_stop_string_is_found_when_its_last_token_comes(byte_tokenizer):
    tokens = np.array(byte_tokenizer("1漢字=漢字=漢字")["input_ids"])

    def found(*stops):
        return [n for n in range(1, len(tokens) + 1) if find_stop(byte_tokenizer, tokens[:n], stops)]

    # Once each time: what stands further back in the tail was let pass.
    assert found("漢字") == [7, 14, 21]
    assert found("字=漢", "1") == [1, 11, 18]
    assert found("=漢字=") == [15]
    assert found("none") == []


def test_a_character_that_begins_behind_broken_ones_is_not_cut(byte_tokenizer):
    broken, tokens = byte_tokenizer("é")["input_ids"][:1], byte_tokenizer("漢字")["input_ids"]
    for count in range(1, 20):
        stream = TextStream(byte_tokenizer)
        pieces = [stream.push([token]) for token in [*broken * count, *tokens]]
        assert "".join(pieces) + stream.finish(stopped=False) == "\ufffd" * count + "漢字"


def test_stop_strings_are_looked_for_in_what_a_reader_sees(tokenizer):
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    one, two = tokenizer("12")["input_ids"]
    letter = tokenizer("a")["input_ids"][0]

    def found(tokens, *stops):
        ended = next((n for n in range(1, len(tokens) + 1) if find_stop(tokenizer, np.array(tokens[:n]), stops)), None)
        if ended is None:
            return None
        params = SamplingParams(max_tokens=200, stop=stops)
        texts = {answer_text(tokenizer, params, tokens[:ended], "stop")}
        stream = TextStream(tokenizer, stops)
        texts.add("".join(stream.push([token]) for token in tokens[:ended]) + stream.finish(stopped=True))
        (text,) = texts
        return ended, text

    # Special tokens have no text, however many there are.
    assert found([one, pad, two, letter], "12") == (3, "")
    assert found([letter, one, *[pad] * 100, two], "12") == (103, "a")
    assert found([pad, eos], "a", "d>", "<") is None
    # Unless a stop string names one.
    assert found([letter, pad, one], "<pad>") == (2, "a")
    assert found([one, letter, pad, two], "a<pad>") == (3, "1")
    assert found([letter, letter, two, pad], "a<pad>", "<eos>") is None
    assert found([one, letter, pad, two, one], "a<pad>2") == (4, "1")


def words_tokenizer():
    """As SentencePiece makes them: a space belongs to the word behind it."""
    names = ("<eos>", "<pad>", "<unk>", "▁one", "▁two", "▁three", "▁", "a", "b")
    inner = FastTokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize("prompt", [[3, 4], [6], [3, 1], [1], []])
def test_spaces_before_words_are_kept(step, prompt):
    tokenizer, tokens = words_tokenizer(), [6, 4, 1, 5, 0, 0, 3, 7]

    def read(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    stream = TextStream(tokenizer, prompt=prompt)
    pieces = [stream.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    assert read(prompt) + "".join(pieces) == read(prompt + tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_tokens_and_offsets_fit_the_text(stream, chat):
    tokenizer = words_tokenizer()
    kind, shape_of = (ChatBody, ChatShape) if chat else (CompletionBody, CompletionShape)
    asked = {"messages": [{"role": "user", "content": "one"}], "logprobs": True, "top_logprobs": 1}
    asked = asked if chat else {"prompt": "one", "logprobs": 1}
    shape = shape_of(kind(model="tiny", **asked), tokenizer, [[3]])
    params = SamplingParams(max_tokens=9, stop_token_ids=(0,), top_log_probs=1)
    transcript = Transcript(tokenizer, [Request("r", (3,), params)], shape.continues)
    tokens, log_probs = [4, 7, 1, 5, 0], [-0.5, -0.25, -2.0, -3.0, -4.0]
    tops = [{4: -0.5}, {7: -0.25}, {5: -0.1}, {4: -0.2}, {3: -0.3}]
    steps = [slice(i, i + 1) for i in range(5)] if stream else [slice(0, 5)]
    pieces = [
        transcript.piece(
            Chunk("r", 0, tokens[s], log_probs[s], [0] * 5, "stop" if s.stop == 5 else None, None, tops[s])
        )
        for s in steps
    ]
    text = "".join(piece.text for piece in pieces)
    choices = [shape.part(piece) if stream else shape.whole(piece) for piece in pieces]
    first = "two" if chat else " two"
    assert text == f"{first}a three"
    if chat:
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [first, "a", "<pad>", " three", "<eos>"]
        assert [entry["top_logprobs"][0]["token"] for entry in entries] == [first, "a", " three", " two", " one"]
        return
    names, offsets, likeliest = (
        [entry for choice in choices for entry in choice["logprobs"][name]]
        for name in ("tokens", "text_offset", "top_logprobs")
    )
    assert names == [" two", "a", "<pad>", " three", "<eos>"]
    assert offsets == [0, 4, 5, 5, 11]
    assert likeliest == [
        {" two": -0.5},
        {"a": -0.25},
        {" three": -0.1, "<pad>": -2.0},
        {" two": -0.2, " three": -3.0},
        {" one": -0.3, "<eos>": -4.0},
    ]
