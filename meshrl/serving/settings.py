"""Settings of the HTTP server: access, limits and timeouts."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.config.web_access import own_names


@dataclass(frozen=True)
class Settings:
    """Name, access rules, limits (requests, bytes) and timeouts (seconds) of the HTTP server.

    Without a `token`, the routes that pause the server or update weights are closed. Without an `api_key`, any client
    may generate.
    """

    name: str
    token: str | None = None
    api_key: str | None = None
    max_concurrency: int = 256
    max_queue: int = 1024
    max_request_bytes: int = 4 << 20
    max_upload_bytes: int | None = None
    max_answers: int = 128
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    # Accepted host names for a server without an API key; "*" accepts any name.
    names: frozenset[str] = own_names("127.0.0.1")

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "max_request_bytes", "max_answers", "request_seconds", "body_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_queue < 0:
            raise ValueError(f"max_queue must be 0 or more, got {self.max_queue}")
