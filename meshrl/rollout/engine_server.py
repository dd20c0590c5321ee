"""An engine's server that a rollout starts: its process, the token that only its run knows, and JSON over HTTP."""

from __future__ import annotations

import asyncio
import atexit
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# A server started for a rollout: a process group with a log, that ends with us.

# The server ends when the pipe to us closes, however we may have ended; its exit code is the shell's.
WATCHED = 'exec 3<&0; "$@" </dev/null & server=$!; { read -r _ <&3; kill -TERM 0; } & wait "$server"'
LAST_LINES = 20
STOP_SECONDS = 20.0


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class ServerProcess:
    """Starts a command in a process group of its own; what it prints goes to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                ["sh", "-c", WATCHED, "server", *command],
                env=os.environ | dict(environment),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)

    async def until(self, is_up: Callable[[], Awaitable[bool]], deadline: float) -> None:
        """Waits until the server answers; raises with the end of its log when it died or took too long."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + deadline
        while not await is_up():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.last_lines()}")
            if loop.time() > limit:
                raise TimeoutError(f"the server did not come up within {deadline:.0f} s:\n{self.last_lines()}")
            await asyncio.sleep(0.2)

    def last_lines(self) -> str:
        """The end of what the server printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def stop(self) -> None:
        """Ends the whole group: politely, then for good."""
        atexit.unregister(self.stop)
        assert self.process.stdin is not None
        self.process.stdin.close()
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                break
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(STOP_SECONDS)


# JSON over HTTP to an engine's server, with streams of server-sent events.


class Http:
    """One connection pool to one server; made and used on the rollout's event loop."""

    def __init__(self, url: str, token: str | None = None):
        import aiohttp

        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Answers take as long as they take; the rollout bounds every other call.
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            # A connection for each call: servers close idle ones just when they are wanted again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        self._failure = aiohttp.ClientError

    async def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        """The JSON answer to a POST; raises with the server's words when it refuses."""
        async with self._session.post(self.url + path, json=body, params=query) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"POST {path}: {answer.status} {text[:500]}")
            return json.loads(text) if text.startswith(("{", "[")) else text

    async def is_up(self, path: str) -> bool:
        """Whether a GET is answered with success."""
        try:
            async with self._session.get(self.url + path) as answer:
                return answer.status == 200
        except (self._failure, OSError):
            return False

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream of events, until `[DONE]`."""
        async with self._session.post(self.url + path, json=body) as answer:
            if answer.status >= 400:
                raise RuntimeError(f"POST {path}: {answer.status} {(await answer.text())[:500]}")
            # Lines may be longer than aiohttp's own limit for them.
            rest = b""
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        content = line[5:].strip()
                        if content == b"[DONE]":
                            return
                        yield json.loads(content)

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()


# What keeps others from an engine's server that we have started: a token, which the server and we alone know.
#
# It listens on this machine, and so for every user of it and every web page in a browser; its routes take weights and
# calls into the engine, some of them as pickles. vLLM loads `OwnerOnly` as middleware: its own key guards `/v1` alone.

# In the environment of the server, which other users cannot read, as they can a command line.
VARIABLE = "MESHRL_ENGINE_TOKEN"
MIDDLEWARE = f"{__name__}.OwnerOnly"


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_hex(32)  # no dash, which a command line would take for an option


class OwnerOnly:
    """An ASGI application that passes on what brings the token, and nothing else."""

    def __init__(self, app: Any):
        self.app = app
        if not (token := os.environ.get(VARIABLE)):
            raise ValueError(f"{MIDDLEWARE} needs {VARIABLE} in the environment")
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"this engine serves the run that started it"})
