"""What keeps others from an engine's server that we have started: a token, which the server and we alone know.

It listens on this machine, and so for every user of it and every web page in a browser; its routes take weights and
calls into the engine, some of them as pickles. vLLM loads `OwnerOnly` as middleware: its own key guards `/v1` alone.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any

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
