"""HTTP connections with limits on the head of a request (request line and headers): bytes, header count and seconds.

uvicorn's own httptools protocol accepts heads of any length before the API key is checked, and it concatenates the
parts of a header over and over. `BoundedProtocol` answers 431 if a head is too large, and 408 if a head is too late.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from meshrl.config.web_access import HEADER_SECONDS, MOST_HEADER_BYTES, MOST_HEADERS

# Seconds that a refused client has to read the response. Closing at once, while bytes of the client are unread, would
# reset the connection.
LINGER_SECONDS = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a bounded request head.

    Subclasses may change `head_bytes`, `head_count` and `head_seconds`.
    """

    head_bytes, head_count, head_seconds = MOST_HEADER_BYTES, MOST_HEADERS, HEADER_SECONDS

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._in_head = True
        self._bytes = 0  # bytes of the head so far; within a body, bytes since the last content
        self._count = 0  # headers so far
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and refuse the request once its head exceeds the limits."""
        rest = memoryview(data)
        while rest and not self._is_refused and not self.transport.is_closing():
            if self._in_head and self._head_timer is None:
                self._start_timer()  # for the next request on this connection
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
        self._count += 1  # trailers after a body count as well
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
        """Reset the byte count, because a chunk of a body begins."""
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
        if self._bytes == 0:  # the client opened the connection and sent nothing
            self.transport.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request is still being answered
            return
        self._refuse(408, f"the request's headers did not come within {self.head_seconds:g} s")

    def _refuse(self, status: int, words: str) -> None:
        """Send an error response and close; if another response is under way, only close the connection."""
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
