"""Servers of external engines: a process started by a rollout, JSON over HTTP, and the token that guards the server."""

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

# A server that a rollout starts. It is a process group with a log file and ends with this process.

# The shell ends the server when the pipe from this process closes, however this process ended. The shell exits with
# the server's exit code.
WATCHED = 'exec 3<&0; "$@" </dev/null & server=$!; { read -r _ <&3; kill -TERM 0; } & wait "$server"'
LAST_LINES = 20
STOP_SECONDS = 20.0


def free_port() -> int:
    """Return a TCP port of this machine on which nothing listens."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class ServerProcess:
    """A command that runs in its own process group. Its stdout and stderr go to the file `log`."""

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
        """Wait for the server: return once `is_up` returns true.

        Raises RuntimeError if the server has exited and TimeoutError after `deadline` seconds. The error has the log
        tail.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + deadline
        while not await is_up():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.last_lines()}")
            if loop.time() > limit:
                raise TimeoutError(f"the server did not come up within {deadline:.0f} s:\n{self.last_lines()}")
            await asyncio.sleep(0.2)

    def last_lines(self) -> str:
        """Return the last `LAST_LINES` lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def stop(self) -> None:
        """End the whole process group: first with SIGTERM, then with SIGKILL after `STOP_SECONDS`."""
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
    """A connection pool to one server, created and used on the rollout's event loop."""

    def __init__(self, url: str, token: str | None = None):
        import aiohttp

        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No total timeout, because a completion may take arbitrarily long. The rollout bounds every other call.
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            # A new connection for each call. A server may close an idle connection just when a call reuses it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        self._failure = aiohttp.ClientError

    async def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        """Send a POST and return the decoded JSON response; raise RuntimeError with the server's message on failure."""
        async with self._session.post(self.url + path, json=body, params=query) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"POST {path}: {answer.status} {text[:500]}")
            return json.loads(text) if text.startswith(("{", "[")) else text

    async def is_up(self, path: str) -> bool:
        """Return whether a GET of `path` succeeds with status 200."""
        try:
            async with self._session.get(self.url + path) as answer:
                return answer.status == 200
        except (self._failure, OSError):
            return False

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Send a POST and yield the JSON objects of its server-sent events until `[DONE]`."""
        async with self._session.post(self.url + path, json=body) as answer:
            if answer.status >= 400:
                raise RuntimeError(f"POST {path}: {answer.status} {(await answer.text())[:500]}")
            # Split lines here, because an event may be longer than aiohttp's limit for a line.
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
        await self._session.close()


# Access control for an engine's server that a rollout has started: a token that only the server and this run have.
#
# The server listens on this machine, so every local user and every web page in a browser can reach it. Its routes
# accept weights and calls into the engine, some as pickles. vLLM loads `OwnerOnly` as middleware, because vLLM's own
# API key guards `/v1` only.

# The token is passed in the server's environment. Other users can read a command line but not an environment.
VARIABLE = "MESHRL_ENGINE_TOKEN"
MIDDLEWARE = f"{__name__}.OwnerOnly"


def new_token() -> str:
    """Return a random token of 64 hexadecimal digits."""
    return secrets.token_hex(32)  # no dash, because a command line would parse it as an option


class OwnerOnly:
    """ASGI middleware that forwards requests with the bearer token and rejects all others with status 401."""

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
