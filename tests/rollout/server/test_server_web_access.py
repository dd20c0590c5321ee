"""Heads of requests are bounded in bytes, number and time, and no web page can ask the server anything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import uvicorn
from served import TOKEN

from meshrl.config.web_access import MOST_HEADER_BYTES, MOST_HEADERS, own_names, refusal
from meshrl.rollout.engine_server import VARIABLE, OwnerOnly
from meshrl.serving.bounded_http import BoundedProtocol

BODY = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 3}).encode()


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer_of(raw):
    """Everything that comes until the server closes; its status, and what its error says."""
    found = b""
    try:
        while part := raw.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return (int(found.split()[1]), found) if found else (None, found)


def ask(server, *headers, body=BODY, method="POST", path="/v1/completions", version="1.1"):
    lines = [f"{method} {path} HTTP/{version}", *headers, "Connection: close", f"Content-Length: {len(body)}"]
    with connect(server) as raw:
        raw.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        return answer_of(raw)


JSON, HOST = "Content-Type: application/json", "Host: localhost"

HEADS = {
    "one endless header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 4096),
    "endless headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-Some-Name: and a value\r\n" * 64),
    "an endless name": (b"GET /health HTTP/1.1\r\n", b"x" * 4096),
    "an endless address": (b"GET /", b"a" * 4096),
}


@pytest.mark.parametrize("kind", HEADS)
def test_endless_heads_are_refused_while_others_are_served(server, kind):
    start, more = HEADS[kind]
    sent = 0
    with connect(server) as raw, ThreadPoolExecutor(1) as threads:
        raw.sendall(start)
        other = threads.submit(httpx.get, f"{server.url}/health", timeout=20)
        try:
            for _ in range((150 << 20) // len(more)):  # as many as once held the server for 86 s
                raw.sendall(more)
                sent += len(more)
        except (ConnectionError, TimeoutError):
            pass
        assert other.result().status_code == 200
        assert sent < 32 << 20  # what fits between them: the server reads no more of it, and hangs up
    with connect(server) as raw:
        raw.sendall(start + more * (2 * MOST_HEADER_BYTES // len(more)))
        status, found = answer_of(raw)
    assert status == 431
    assert b"headers" in found
    assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200


@pytest.mark.parametrize(("number", "status"), [(MOST_HEADERS - 4, 200), (MOST_HEADERS + 1, 431)])
def test_only_so_many_headers(server, number, status):
    assert ask(server, HOST, JSON, *(f"X-{n}: y" for n in range(number)))[0] == status


@pytest.mark.parametrize(("size", "status"), [(MOST_HEADER_BYTES - 400, 200), (MOST_HEADER_BYTES + 1, 431)])
def test_only_so_many_bytes_of_headers_and_a_body_beside_them(server, size, status):
    assert ask(server, HOST, JSON, "X: " + "y" * size)[0] == status
    with httpx.Client(base_url=server.url, timeout=60) as http:  # many on one connection, with bodies
        for _ in range(20):
            found = http.post("/v1/completions", content=BODY, headers={"content-type": "application/json"})
            assert found.status_code == 200


TRAILERS = {
    "a trailer": b"0\r\nX: " + b"y" * 4 * MOST_HEADER_BYTES,
    "trailers": b"0\r\n" + b"X: y\r\n" * 1000,
    "a chunk's extension": b"1;" + b"x" * 8 * MOST_HEADER_BYTES,
}


@pytest.mark.parametrize("kind", TRAILERS)
def test_what_comes_between_and_behind_a_body_is_bounded_too(server, kind):
    with connect(server) as raw:
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\n{HOST}\r\n{JSON}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(1000):
                raw.sendall(TRAILERS[kind])
        except ConnectionError:
            return
        assert answer_of(raw)[0] in (None, 400, 431)


def test_requests_behind_one_another_and_in_pieces_are_served(server):
    """The control: the bounds are of one head, not of a connection."""
    one = f"GET /health HTTP/1.1\r\n{HOST}\r\nX: {'y' * 30_000}\r\n\r\n".encode()
    with connect(server) as raw:
        raw.sendall(one * 8)
        for place in range(0, len(one), 5000):
            raw.sendall(one[place : place + 5000])
        raw.sendall(one.replace(b"X: ", b"Connection: close\r\nX: "))
        assert answer_of(raw)[1].count(b"HTTP/1.1 200") == 10


class Hurried(BoundedProtocol):
    head_seconds = 0.4


@pytest.fixture
def hurried():
    """uvicorn with the protocol and less patience, in a thread; answers with the bytes of a body."""

    async def app(scope, receive, send):
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        await asyncio.sleep(0.6 if scope["path"] == "/slow" else 0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"%8d" % size})

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Hurried, ws="none", lifespan="off", log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: running.run(sockets=[listening]))
    thread.start()
    yield listening.getsockname()
    running.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_a_head_has_to_come_in_time(hurried):
    with socket.create_connection(hurried, timeout=20) as raw:
        started = time.monotonic()
        try:
            for byte in b"GET / HTTP/1.1\r\nX: " + b"y" * 1000:  # slower than the limit, and never silent
                raw.sendall(bytes([byte]))
                time.sleep(0.01)
        except ConnectionError:
            pass
        status, found = answer_of(raw)
        assert status in (408, None)
        assert time.monotonic() - started < 15
    with socket.create_connection(hurried, timeout=20) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHo")
        status, found = answer_of(raw)
        assert status == 408
        assert b"did not come within 0.4 s" in found
    with socket.create_connection(hurried, timeout=20) as raw:
        assert answer_of(raw) == (None, b"")  # who says nothing at all is told nothing


def test_a_slow_answer_and_a_slow_body_are_no_late_head(hurried):
    with socket.create_connection(hurried, timeout=20) as raw:
        raw.sendall(b"POST /slow HTTP/1.1\r\nContent-Length: 3\r\n\r\na")
        time.sleep(0.6)
        raw.sendall(b"bc")
        assert b"       3" in raw.recv(4096)
        raw.sendall(b"GET /slow HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert answer_of(raw)[0] == 200
    big = b"x" * (3 << 20)
    with httpx.Client(base_url="http://{}:{}".format(*hurried), timeout=60) as http:
        assert int(http.post("/", content=big).text) == len(big)
        assert int(http.post("/", content=iter([big[:7], big])).text) == len(big) + 7  # in chunks


OWN = ("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "[::1]")


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("port", ["", ":8000"])
def test_the_servers_own_names_are_answered(server, name, port):
    assert ask(server, f"Host: {name}{port}", JSON)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "",
        "evil@127.0.0.1", "127.0.0.1/x", "localhost:8000:1", "localhost:x", "[::2]",
        "127.0.0.1 evil.example", "0.0.0.0",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/health")])
def test_a_page_that_takes_a_name_of_its_own_for_the_address_is_refused(server, host, method, path):
    """DNS rebinding: the page's own name, which its browser sends as the host, leads to this machine."""
    status, found = ask(server, f"Host: {host}", JSON, method=method, path=path)
    assert status in (400, 403)
    assert b"tiny" not in found.partition(b"\r\n\r\n")[2]


def test_no_host_and_two_hosts(server):
    assert ask(server, JSON)[0] == 403
    assert ask(server, HOST, "Host: evil.example", JSON)[0] == 403
    assert ask(server, body=b"", method="GET", path="/health", version="1.0")[0] == 200  # no browser speaks so


SIMPLE = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain;a/json",
)


@pytest.mark.parametrize("kind", [*SIMPLE, "application/jsonp", None])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_posts_that_any_page_may_send_are_refused(server, kind, path):
    """Of these types a browser sends a request to another site without asking it, and of no type at all as well."""
    before = server.metric("requests_finished_total") if "meshrl_requests_finished_total" in server.metrics() else None
    status, found = ask(server, HOST, *([f"Content-Type: {kind}"] if kind else []), path=path)
    assert status == 415
    assert b"application/json" in found
    if before is not None:
        assert server.metric("requests_finished_total") == before
    with connect(server) as raw:
        chunked = f"POST {path} HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        raw.sendall(chunked.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert answer_of(raw)[0] == 415


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://"]
)
def test_pages_of_other_sites_are_refused_even_with_json(server, origin):
    port = server.url.rpartition(":")[2]
    status, found = ask(server, f"Host: localhost:{port}", JSON, f"Origin: {origin}")
    assert status == 403
    assert b"answers no web page" in found
    preflight = ask(
        server, f"Host: localhost:{port}", f"Origin: {origin}", "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: content-type", method="OPTIONS", body=b"",
    )  # fmt: skip
    assert preflight[0] in (403, 405)
    assert b"access-control-allow" not in preflight[1].lower()


def test_clients_that_are_programs_are_served(server):
    """The control: the openai client, curl's way, and a page of the server's own."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        assert client.completions.create(model="tiny", prompt="ab", max_tokens=3).usage.completion_tokens > 0
        chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "1"}], max_tokens=3)
        assert chat.usage.completion_tokens > 0
    assert ask(server, HOST, "Content-Type: application/json; charset=utf-8")[0] == 200
    port = server.url.rpartition(":")[2]
    assert ask(server, f"Host: localhost:{port}", JSON, f"Origin: http://localhost:{port}")[0] == 200
    with server.http() as http:  # the token's bearer, whose requests may have no body
        assert http.post("/pause").status_code == 200
        assert http.post("/resume").status_code == 200
        assert http.post("/pause", content=b'{"mode": "keep"}').status_code == 415
    assert TOKEN


def test_names_that_were_added_are_answered():
    names = own_names("0.0.0.0", ["gpu.cluster"])
    assert refusal(["gpu.cluster:80"], [], names) is None
    assert refusal([socket.gethostname()], [], names) is None
    assert refusal(["other.cluster"], [], names)
    assert refusal(["other.cluster"], ["http://x"], own_names("0.0.0.0", ["*"])) is None
    assert socket.gethostname().lower() not in own_names("127.0.0.1")


def test_an_engine_serves_nobody_but_the_run_that_started_it(monkeypatch):
    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})

    with pytest.raises(ValueError, match=VARIABLE):
        OwnerOnly(engine)
    monkeypatch.setenv(VARIABLE, "secret")

    async def ask_engine(*headers):
        transport = httpx.ASGITransport(OwnerOnly(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return (await http.post("/collective_rpc", headers=list(headers), json={})).status_code

    assert asyncio.run(ask_engine(("authorization", "Bearer secret"))) == 200
    for headers in ((), [("authorization", "Bearer secre")], [("authorization", "secret")]):
        assert asyncio.run(ask_engine(*headers)) == 401
    twice = [("authorization", "Bearer secret"), ("authorization", "Bearer secret")]
    assert asyncio.run(ask_engine(*twice)) == 401
