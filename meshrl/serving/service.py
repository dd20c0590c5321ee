"""State and services shared by all routes of the server.

Service:             the rollout with its tokenizer, pauses and weight updates
ApiError:            error responses in OpenAI's format
Metrics, Histogram:  counters in Prometheus' text format
Slots:               limits on running and queued requests
read_body, save_body: request bodies of limited size and time
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from torch import Tensor

from meshrl.config.keys import count
from meshrl.models.loading import load_model_config
from meshrl.rollout.build import Opened, tied_names
from meshrl.rollout.weight_files import checked, expected_shapes
from meshrl.serving.settings import Settings

T = TypeVar("T")
# Seconds that /metrics waits for an engine that is busy with a weight update.
STATS_SECONDS = 2.0


class Service:
    """A rollout being served, with its request slots, metrics and weight updates."""

    def __init__(self, opened: Opened, settings: Settings):
        self.opened, self.settings = opened, settings
        self.rollout, self.tokenizer = opened.rollout, opened.tokenizer
        self.slots = Slots(settings.max_concurrency, settings.max_queue)
        self.metrics = Metrics()
        self.failure: str | None = None  # error of the last request, if the rollout failed on it
        config = load_model_config(opened.path, trust_remote_code=opened.trust_remote_code)
        self.shapes, self.tied = expected_shapes(config), tied_names(config)
        # A single thread, because tokenizers change their settings while they work. The first call settles the
        # settings.
        self._encoder = ThreadPoolExecutor(1, "encode")
        self.tokenizer("0")
        self._changing = asyncio.Lock()
        self._stats: asyncio.Task[dict[str, float]] | None = None

    async def encode(self, work: Callable[[], T]) -> T:
        """Run a call that uses the tokenizer in the encoder thread, outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def upload_limit(self) -> int:
        """Return the largest upload of weights in bytes.

        By default this is the size of all weights in float64, plus 512 bytes per tensor and 1 MiB for the header.
        """
        if self.settings.max_upload_bytes is not None:
            return self.settings.max_upload_bytes
        total = 0
        for shape in self.shapes.values():
            size = 8
            for length in shape:
                size *= length
            total += size + 512
        return total + (1 << 20)

    async def stats(self) -> dict[str, float]:
        """Return the rollout's stats, or an empty dict if they take longer than `STATS_SECONDS`."""
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(asyncio.to_thread(self.rollout.stats))
        await asyncio.wait({self._stats}, timeout=STATS_SECONDS)
        return self._stats.result() if self._stats.done() else {}

    async def pause(self, mode: str) -> None:
        """Hold back new requests, then pause the rollout in the given mode (keep, abort or wait)."""
        self.slots.shut(True)
        await asyncio.to_thread(self.rollout.pause, mode)
        if not self.slots.is_shut:  # a client resumed while the pause waited for running requests
            await asyncio.to_thread(self.rollout.resume)

    async def resume(self) -> None:
        """Resume the rollout and admit waiting requests."""
        self.slots.shut(False)  # before the rollout, because a pause that ends now checks `is_shut`
        await asyncio.to_thread(self.rollout.resume)

    async def update(self, read: Callable[[], Mapping[str, Tensor]], version: int | None) -> int:
        """Load weights into the rollout as `version` (by default the next version) and return the version.

        Wrong names or shapes raise an `ApiError` before any weight is copied. If copying fails, the server is paused.
        """
        if self._changing.locked():
            raise ApiError(409, "another weight update is under way: try again later", retry_after=1)
        async with self._changing:
            weights = await asyncio.to_thread(read)
            if version is None:
                version = self.rollout.version + 1
            try:
                for _ in checked(weights.items(), self.shapes):
                    pass
            except ValueError as error:
                raise ApiError(400, str(error)) from error
            try:
                await asyncio.to_thread(self.rollout.update_weights, weights.items(), version)
            except Exception as error:
                # Some weights may be new and some old, so generation must stop.
                await self.pause("keep")
                raise ApiError(
                    500, f"the update failed and the server is paused; send the weights again, then resume: {error}"
                ) from error
            self.metrics.updates += 1
            return version

    def close(self) -> None:
        """Stop the encoder thread and close the rollout."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self.rollout.close()


# Error responses: an HTTP status, a sentence, and for overload the seconds after which to retry.

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that becomes an HTTP response in OpenAI's error format."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    def body(self) -> dict[str, Any]:
        """Return the error object for the body of a response or for an event of a stream."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        """Return the error as a complete HTTP response with its status and headers."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


# Counters and histograms in Prometheus' text format.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# Rollout stats that only grow and are exported as counters. All other stats are exported as gauges.
COUNTERS = {
    "generated_tokens",
    "finished",
    "steps",
    "seconds",
    "prompt_tokens",
    "cached_prompt_tokens",
    "preemptions",
    "relabelled_tokens",
}


class Histogram:
    """A histogram of durations over the bucket bounds `SECONDS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Add one observed duration in seconds to its bucket."""
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, text: str) -> list[str]:
        """Return the histogram as lines of Prometheus' text format, with cumulative buckets."""
        lines, total = _head(name, text, "histogram"), 0
        for bound, responses in zip((*map(repr, SECONDS), "+Inf"), self._counts, strict=True):
            total += responses
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum!r}", f"{name}_count {total}"]


class Metrics:
    """Counters and histograms of the server; `text` adds the rollout's own stats."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.completion_tokens = self.clients_gone = self.updates = 0
        self.first_token, self.request = Histogram(), Histogram()

    def text(self, running: int, waiting: int, stats: Mapping[str, float]) -> str:
        """Return all metrics in Prometheus' text format, including the rollout's `stats`."""
        name = "meshrl_http_responses_total"
        lines = _head(name, "Responses by route and status.", "counter")
        for (route, status), responses in sorted(self.responses.items()):
            lines.append(f'{name}{{route="{route}",status="{status}"}} {responses}')
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts served.", self.prompt_tokens),
            ("completion_tokens", "Tokens of answers sent.", self.completion_tokens),
            ("clients_gone", "Requests whose client went away.", self.clients_gone),
            ("weight_updates", "Weight updates taken.", self.updates),
        ):
            lines += _single(f"meshrl_{name}_total", text, "counter", value)
        lines += _single("meshrl_requests_running", "Requests being answered.", "gauge", running)
        lines += _single("meshrl_requests_waiting", "Requests in the queue.", "gauge", waiting)
        lines += self.first_token.lines("meshrl_first_token_seconds", "From request to first token.")
        lines += self.request.lines("meshrl_request_seconds", "From request to last token.")
        for name, number in sorted(stats.items()):
            counts = name in COUNTERS
            full = f"meshrl_rollout_{name}{'_total' if counts else ''}"
            text = f"The rollout's {name.replace('_', ' ')}."
            lines += _single(full, text, "counter" if counts else "gauge", number)
        return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _single(name: str, text: str, kind: str, value: float) -> list[str]:
    return [*_head(name, text, kind), f"{name} {value!r}"]


# Overload protection: limits on concurrent requests, on the queue, and on the size and time of request bodies.

LONGEST_RETRY = 60
# Weight of the newest request in the moving average of request times.
NEWEST = 0.1


class Slots:
    """A first-come, first-served limit of `concurrency` running requests and `queue` waiting requests.

    While it is shut, no request starts.
    """

    def __init__(self, concurrency: int, queue: int):
        self.concurrency, self.queue = concurrency, queue
        self.running = 0
        self.is_shut = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Number of requests in the queue that have no slot yet."""
        return len(self._waiting)

    def check(self) -> None:
        """Raise a 503 `ApiError` if a new request would find all slots taken and the queue full."""
        if not self._has_room() and len(self._waiting) >= self.queue:
            state = "paused" if self.is_shut else f"busy with {count(self.running, 'request')}"
            raise ApiError(
                503,
                f"the server is {state} and {len(self._waiting)} more wait, the most that may: try again later",
                retry_after=self.retry_after(),
            )

    def retry_after(self) -> int:
        """Return the expected seconds until a slot is free, between 1 and `LONGEST_RETRY`."""
        expected = self._mean_seconds * (1 + len(self._waiting) / self.concurrency)
        return min(max(math.ceil(expected), 1), LONGEST_RETRY)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold a slot for the `with` block, after waiting in the queue if necessary.

        Raise at once if the queue is full.
        """
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
        """Stop admitting requests, or admit waiting requests again."""
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
            if not turn.cancelled():  # its turn came just before the cancellation
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
    """Read the whole request body; raise an `ApiError` if it exceeds `limit` bytes or takes more than `seconds`."""
    body = bytearray()
    async for part in _parts(request, limit, seconds):
        body += part
    return bytes(body)


async def save_body(request: Request, file: BinaryIO, limit: int, seconds: float) -> int:
    """Write the request body to `file` and return its size in bytes.

    Raise an `ApiError` if the body exceeds `limit` bytes or takes more than `seconds`.
    """
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
