"""HTTP connections whose requests have a head (first line and headers) of limited size, number and time.

uvicorn's own protocol on httptools takes heads without end, before anything asks for a key, and joins the pieces of a
header again and again. Here a request with too much of a head gets 431, one whose head does not come 408.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from meshrl.config.web_access import HEADER_SECONDS, MOST_HEADER_BYTES, MOST_HEADERS

# How long a refused client has to read the answer: closing at once, with bytes of its own unread, would reset it.
LINGER_SECONDS = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with these bounds; `head_seconds` and the others may be changed by subclasses."""

    head_bytes, head_count, head_seconds = MOST_HEADER_BYTES, MOST_HEADERS, HEADER_SECONDS

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._in_head = True
        self._bytes = 0  # of the head; within a body, those since the last of its content
        self._count = 0
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser no more of a head than it may have."""
        rest = memoryview(data)
        while rest and not self._is_refused and not self.transport.is_closing():
            if self._in_head and self._head_timer is None:
                self._start_timer()  # of the next request on this connection
            room = max(1, self.head_bytes + 1 - self._bytes)
            part, rest = rest[:room], rest[room:]
            self._bytes += len(part)
            super().data_received(bytes(part))
            if self._bytes > self.head_bytes:
                self._refuse(431, f"the request's headers have more than {self.head_bytes} bytes")
            elif self._count > self.head_count:
                self._refuse(431, f"the request has more than {self.head_count} headers")

    def on_message_begin(self) -> None:
        self._in_head, self._count = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1  # those after a body too
        if self._count <= self.head_count:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._bytes = False, 0
        self._stop_timer()
        if self._count <= self.head_count:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        if not self._is_refused and self._count <= self.head_count:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        """Note that a chunk of a body begins."""
        self._bytes = 0

    def on_message_complete(self) -> None:
        self._in_head, self._bytes = True, 0
        if self._count <= self.head_count:
            super().on_message_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_late(self) -> None:
        if self._bytes == 0:  # a connection that was only opened
            self.transport.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # a request before this one is being answered
            return
        self._refuse(408, f"the request's headers did not come within {self.head_seconds:g} s")

    def _refuse(self, status: int, words: str) -> None:
        """Answer, if no answer is under way, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        kind = "timeout_error" if status == 408 else "invalid_request_error"
        error = {"message": words, "type": kind, "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.flow.pause_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
