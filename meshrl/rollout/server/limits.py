"""What keeps the server standing: bodies of limited size and time, few requests at once, a short queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from meshrl.config.names import count
from meshrl.rollout.server.errors import ApiError

LONGEST_RETRY = 60
# How much the newest request counts in the mean time of a request.
NEWEST = 0.1


class Slots:
    """Lets `concurrency` requests run and `queue` wait, first come first served; while shut none starts."""

    def __init__(self, concurrency: int, queue: int):
        self.concurrency, self.queue = concurrency, queue
        self.running = 0
        self.is_shut = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises if a request that came now would be refused."""
        if not self._has_room() and len(self._waiting) >= self.queue:
            state = "paused" if self.is_shut else f"busy with {count(self.running, 'request')}"
            raise ApiError(
                503,
                f"the server is {state} and {len(self._waiting)} more wait, the most that may: try again later",
                retry_after=self.retry_after(),
            )

    def retry_after(self) -> int:
        """Seconds until the queue has probably moved on."""
        expected = self._mean_seconds * (1 + len(self._waiting) / self.concurrency)
        return min(max(math.ceil(expected), 1), LONGEST_RETRY)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Inside, the caller holds a slot; raises at once if even the queue is full."""
        self.check()
        if self._has_room():
            self.running += 1
        else:
            await self._wait()
        started = time.monotonic()
        try:
            yield
        finally:
            self._mean_seconds += NEWEST * (time.monotonic() - started - self._mean_seconds)
            self._release()

    def shut(self, is_shut: bool) -> None:
        """Closes or opens the way for those that wait."""
        self.is_shut = is_shut
        self._admit()

    def _has_room(self) -> bool:
        return not self.is_shut and self.running < self.concurrency

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came just then
                self._release()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _release(self) -> None:
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self.running += 1
                turn.set_result(None)


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body, if it has at most `limit` bytes and comes within `seconds`."""
    body = bytearray()
    async for part in _parts(request, limit, seconds):
        body += part
    return bytes(body)


async def save_body(request: Request, file: BinaryIO, limit: int, seconds: float) -> int:
    """Writes the body to a file under the same conditions; returns its size."""
    size = 0
    async for part in _parts(request, limit, seconds):
        size += await asyncio.to_thread(file.write, part)
    return size


async def _parts(request: Request, limit: int, seconds: float) -> AsyncIterator[bytes]:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise ApiError(413, f"the body has {length} bytes, more than the {limit} allowed")
    size = 0
    stream = request.stream()
    end = asyncio.get_running_loop().time() + seconds
    try:
        while True:
            async with asyncio.timeout_at(end):
                part = await anext(stream, None)
            if part is None:
                return
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body has more than the {limit} bytes allowed")
            yield part
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the body ended early") from error
