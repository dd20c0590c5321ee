"""Whatever clients send or do: a clear refusal for them, nothing for the others to notice, all blocks back."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save
from served import CONCURRENCY, CONTEXT, MOST_BYTES, QUEUE, TOKEN
from transformers import AutoModelForCausalLM

FILE = "model.safetensors"
LONG = {"model": "tiny", "prompt": "1+2=", "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client
        client.post("/resume")
    server.wait_until_idle()


@pytest.fixture(scope="module")
def plain(server):
    """A client for requests that leave nothing behind."""
    with server.http() as client:
        yield client


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def completion(http, **fields):
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "ab", "max_tokens": 3} | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "none may be empty"),
        ({"prompt": [[]]}, "none may be empty"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": "a" * CONTEXT}, f"the prompt has {CONTEXT} tokens"),
        ({"prompt": "a" * (CONTEXT - 2)}, "ask for at most 2"),
        ({"prompt": [0, -1]}, "token id -1"),
        ({"prompt": [10**30]}, "outside the vocabulary"),
        ({"prompt": [1.5]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": {"a": 1}}, "prompt must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 10**15}, "ask for at most"),
        ({"max_tokens": "9"}, "valid integer"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"n": 0}, "n:"),
        ({"n": 17}, "17 answers, more than the 16"),
        ({"prompt": ["a"] * 17}, "17 answers, more than the 16"),
        ({"seed": 2**80}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stop_token_ids": [-1]}, "token id -1 in stop_token_ids"),
        ({"logit_bias": {"99999": 1}}, "token id 99999 in logit_bias"),
        ({"logit_bias": {"many": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 1e9}}, "logit_bias"),
        ({"echo": True}, "'echo' is not served"),
        ({"best_of": 4}, "best_of"),
        ({"frequency_penalty": 1}, "'frequency_penalty' is not served"),
        ({"colour": "red"}, "colour: this server knows no such field"),
    ],
)
def test_wrong_requests_are_refused_in_words(plain, fields, words):
    answer = completion(plain, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 20_000 + b"}",
    ],
)
def test_bodies_that_are_no_requests(plain, raw):
    for route in ("/v1/completions", "/v1/chat/completions"):
        answer = plain.post(route, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of text and image_url"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a function with a name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "cannot be set"),
        ({"chat_template_kwargs": {"tokenize": False}}, "cannot be set"),
        ({"response_format": {"type": "json_object"}}, "'response_format' is not served"),
    ],
)
def test_wrong_chats_are_refused_in_words(plain, fields, words):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1"}], "max_tokens": 2} | fields
    answer = plain.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_extreme_but_sound_values_are_served(http):
    for fields in (
        {"temperature": 0.001, "logprobs": 20},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"top_k": 10**9},
        {"repetition_penalty": 0.01},
        {"stop": "a string that never comes"},
        {"stop": None, "n": None},
        {"prompt": "a" * (CONTEXT - 3)},
        {"logit_bias": {"5": 100}, "logprobs": 1},
        {"user": "someone", "presence_penalty": 0},
    ):
        answer = completion(http, **fields)
        assert answer.status_code == 200, (fields, answer.text)
        assert 1 <= answer.json()["usage"]["completion_tokens"] <= 3


def test_large_bodies_are_refused_unread_and_unending_ones_cut(http, server):
    assert completion(http, prompt="a" * MOST_BYTES).status_code == 413
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(MOST_BYTES // 4096 + 2):
            raw.sendall(b"1000\r\n" + b"a" * 4096 + b"\r\n")
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
    assert completion(http).status_code == 200


def test_unknown_routes_methods_and_models(plain):
    assert plain.get("/v2/everything").status_code == 404
    assert plain.get("/v1/completions").status_code == 405
    assert completion(plain, model="gpt").status_code == 404


@pytest.mark.parametrize("route", ["/pause", "/resume", "/update_weights"])
@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"]
)
def test_only_the_bearer_of_the_token_may_change_the_server(server, route, header):
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    answer = httpx.post(f"{server.url}{route}", headers=headers, content=b'{"path": "/nowhere"}', timeout=60)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/health", timeout=60).json()["status"] == "ok"


async def one_of_many(host, port, number):
    """A request by hand: 1,000 real clients would be slower than the server."""
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps({"model": "tiny", "prompt": f"{number}=", "max_tokens": 8, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)


def test_a_thousand_requests_at_once_are_served_or_sent_away(http, server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    host, port = server.url.removeprefix("http://").split(":")

    async def flood():
        return await asyncio.wait_for(asyncio.gather(*(one_of_many(host, int(port), i) for i in range(1000))), 120)

    answers = asyncio.run(flood())
    served = [body for status, _, body in answers if status == 200]
    refused = [(head, body) for status, head, body in answers if status == 503]
    assert len(served) + len(refused) == 1000
    assert len(served) >= CONCURRENCY + QUEUE
    assert refused
    assert all(body["usage"]["completion_tokens"] == 8 for body in served)
    for head, body in refused:
        assert b"\r\nretry-after: " in head
        assert body["error"]["type"] == "overloaded_error"
    server.wait_until_idle()
    assert completion(http).status_code == 200


def test_the_openai_client_comes_back_after_a_refusal(http, server):
    refusals = 'http_responses_total{route="/v1/completions",status="503"}'
    before = server.metrics().get(refusals, 0)

    async def many():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=20) as client:
            calls = [client.completions.create(model="tiny", prompt=f"{i}", max_tokens=3) for i in range(QUEUE + 9)]
            return await asyncio.gather(*calls)

    http.post("/pause")
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asyncio.run, many())
        wait_for(lambda: server.metrics().get(refusals, 0) >= before + 9)
        http.post("/resume")
        assert len(answers.result()) == QUEUE + 9


def test_a_client_that_goes_away_frees_its_blocks(http, server):
    gone = server.metric("clients_gone_total")
    with http.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        http_paused = httpx.post(f"{server.url}/pause", headers={"authorization": f"Bearer {TOKEN}"}, timeout=60)
        assert http_paused.json() == {"status": "paused", "mode": "keep"}
        assert server.metric("rollout_running") == 1
        assert server.metric("rollout_free_blocks") < server.metric("rollout_total_blocks")
    # Still paused: nothing but the client's leaving can have freed them.
    server.wait_until_idle()
    assert server.metric("clients_gone_total") == gone + 1
    assert server.metric("rollout_generated_tokens_total") > 0


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(http, server):
    http.post("/pause")
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 3}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
    server.wait_until_idle()
    assert server.metric("requests_waiting") == 0


def test_a_paused_server_fills_its_queue_and_serves_it_later(http, server):
    http.post("/pause")
    assert http.get("/health").json()["status"] == "paused"
    with ThreadPoolExecutor(QUEUE) as threads:
        waiting = [threads.submit(completion, http) for _ in range(QUEUE)]
        wait_for(lambda: server.metric("requests_waiting") == QUEUE)
        late = completion(http)
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) >= 1
        assert "paused" in late.json()["error"]["message"]
        http.post("/resume")
        assert [answer.result().status_code for answer in waiting] == [200] * QUEUE


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
def test_pausing_ends_or_awaits_what_runs(http, server, mode, reason):
    fields = LONG | {"max_tokens": 1500 if mode == "abort" else 150, "return_token_ids": True}
    tokens, last = [], None
    with http.stream("POST", "/v1/completions", json=fields) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        tokens += json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        with ThreadPoolExecutor(1) as thread:
            pause = thread.submit(
                httpx.post,
                f"{server.url}/pause",
                json={"mode": mode},
                headers={"authorization": f"Bearer {TOKEN}"},
                timeout=60,
            )
            for line in lines:
                last = json.loads(line[6:])["choices"][0]
                tokens += last["token_ids"]
            assert pause.result().status_code == 200
    assert last["finish_reason"] == reason
    assert (len(tokens) < 1500) if mode == "abort" else (len(tokens) == 150)
    assert http.post("/pause", json={"mode": "sideways"}).status_code == 400


# Weights


@pytest.fixture
def restored(http, server):
    yield
    answer = http.post("/update_weights", json={"path": str(server.folder), "version": 0})
    assert answer.json() == {"version": 0}


def greedy(http):
    return completion(http, temperature=0, max_tokens=20, ignore_eos=True).json()["choices"][0]["text"]


@pytest.mark.usefixtures("restored")
def test_weights_from_a_folder_and_from_an_upload(http, server, tmp_path):
    before = greedy(http)
    assert http.post("/update_weights", json={"path": str(server.other)}).json() == {"version": 1}
    after = greedy(http)
    assert after != before
    raw = save(load_file(server.folder / "model.safetensors"))
    headers = {"content-type": "application/octet-stream"}
    answer = http.post("/update_weights?version=7", content=raw, headers=headers)
    assert answer.json() == {"version": 7}
    assert greedy(http) == before
    assert http.get("/health").json()["version"] == 7
    # A folder with other names, as a model without its head has them, is left to transformers.
    (tmp_path / "config.json").write_text((server.folder / "config.json").read_text())
    weights = {name.removeprefix("model."): value for name, value in load_file(server.other / FILE).items()}
    (tmp_path / FILE).write_bytes(save(weights, {"format": "pt"}))
    assert http.post("/update_weights", json={"path": str(tmp_path)}).json() == {"version": 8}
    assert greedy(http) == after
    # A file may repeat a tied weight.
    weights = load_file(server.folder / FILE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    assert http.post("/update_weights", content=save(weights), headers=headers).json() == {"version": 9}
    assert greedy(http) == before


def test_wrong_weights_are_refused_and_change_nothing(http, server, tmp_path):
    before, version = greedy(http), http.get("/health").json()["version"]
    weights = load_file(server.other / "model.safetensors")
    name = next(iter(weights))
    binary = {"content-type": "application/octet-stream"}
    for wrong, words in (
        ({key: value for key, value in weights.items() if key != name}, "never sent"),
        (weights | {"extra": torch.zeros(2)}, "no parameter 'extra'"),
        (weights | {name: torch.zeros(3)}, "has shape"),
    ):
        answer = http.post("/update_weights", content=save(wrong), headers=binary)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    for body in (b"", b"junk", b"\xff" * 100, save(weights)[:-50]):
        assert http.post("/update_weights", content=body, headers=binary).status_code == 400
    assert http.post("/update_weights", json={"path": str(tmp_path)}).status_code == 400
    assert http.post("/update_weights", json={"path": "/no/such/folder"}).status_code == 400
    assert http.post("/update_weights", json={"path": str(server.other), "version": -1}).status_code == 400
    assert http.post("/update_weights?version=one", content=save(weights), headers=binary).status_code == 400
    assert http.post("/update_weights", content=b"\0" * (8 << 20), headers=binary).status_code == 413
    assert greedy(http) == before
    assert http.get("/health").json()["version"] == version


@pytest.mark.usefixtures("restored")
def test_an_update_during_generation_changes_the_policy_from_the_next_token_on(http, server):
    fields = LONG | {"max_tokens": 600, "logprobs": 0, "return_token_ids": True, "seed": 4}
    tokens, log_probs, versions = [], [], []
    update = threading.Thread(
        target=lambda: httpx.post(
            f"{server.url}/update_weights",
            json={"path": str(server.other), "version": 1},
            headers={"authorization": f"Bearer {TOKEN}"},
            timeout=60,
        )
    )
    with http.stream("POST", "/v1/completions", json=fields) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            tokens += choice["token_ids"]
            log_probs += choice["logprobs"]["token_logprobs"]
            versions += choice["versions"]
            if len(tokens) >= 3 and update.ident is None:
                update.start()
    update.join()
    assert len(tokens) == 600
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    prompt = [3, 39, 4, 40]
    given, new = torch.tensor(log_probs), torch.tensor(versions) == 1
    for folder, mine in ((server.folder, ~new), (server.other, new)):
        hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = hf_model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (given - wanted)[mine].abs().max() < 1e-3
        assert (given - wanted)[~mine].abs().max() > 0.1
