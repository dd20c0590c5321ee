"""JSON over HTTP to an engine's server, with streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any


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
