"""One generation request on its way: through the queue, the rollout, and out to a client that may go away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from meshrl.rollout.base import Rollout
from meshrl.rollout.requests import Chunk, Request
from meshrl.rollout.server.answers import Piece, Shape, Transcript
from meshrl.rollout.server.errors import ApiError
from meshrl.rollout.server.service import Service
from meshrl.rollout.stepping import SteppingRollout

ABORT_AGAIN_SECONDS = 0.2
# How long a client may take to hear why its answer ends.
LAST_WORDS_SECONDS = 2.0
log = logging.getLogger(__name__)


class Generation:
    """The chunks of some requests, and the certainty that nothing of them is left in the rollout after `close`."""

    def __init__(self, rollout: Rollout, requests: Sequence[Request]):
        self._rollout, self._requests = rollout, requests
        self._queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for chunk in self._rollout.generate(self._requests):
                self._queue.put_nowait(chunk)
        except Exception as error:  # raised again where the chunks are read
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The chunks as they come."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        """Ends what still runs. It is aborted by name, and again if it had not entered the rollout the first time."""
        names = [request.request_id for request in self._requests]
        while not self._task.done():
            await asyncio.to_thread(self._rollout.abort, names)
            await asyncio.wait({self._task}, timeout=ABORT_AGAIN_SECONDS)


class Answering(Response):
    """The response to a generation request. It waits for its turn, generates and sends, all in one task."""

    def __init__(self, service: Service, requests: Sequence[Request], shape: Shape):
        super().__init__()
        self.service, self.requests, self.shape = service, requests, shape
        self._started = time.monotonic()
        self._has_slot = False
        self._has_begun = False  # whether the client has our headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await ended_before_client_left(receive, self._answer(scope, receive, send)):
            self.service.metrics.clients_gone += 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.service.settings.request_seconds):
                async with self.service.slots.taken():
                    self._has_slot = True
                    await self._generate(scope, receive, send)
            self.service.failure = None
        except TimeoutError:
            error = self._too_late()
        except ApiError as refusal:
            error = refusal
        except Exception as failure:
            log.exception("a request failed")
            self.service.failure = f"{type(failure).__name__}: {failure}"
            error = ApiError(500, "the rollout failed: see the server's log")
        else:
            return
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._say(error, scope, receive, send)
        except TimeoutError:  # it has stopped reading; returning ends the connection
            log.warning("a client does not read its answer: its connection is closed")

    def _too_late(self) -> ApiError:
        seconds = self.service.settings.request_seconds
        if self._has_slot:
            return ApiError(504, f"the answer was not complete after {seconds:g} s")
        retry_after = self.service.slots.retry_after()
        return ApiError(503, f"the request waited {seconds:g} s for its turn: try again later", retry_after=retry_after)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        transcript = Transcript(self.service.tokenizer, self.requests, self.shape.continues)
        generation = Generation(self.service.rollout, self.requests)
        try:
            pieces = self._pieces(generation, transcript)
            if self.shape.body.stream:
                await self._send_events(pieces, transcript, send)
            else:
                whole = [Piece(index) for index in range(transcript.answers)]
                async for piece in pieces:
                    whole[piece.index].add(piece)
                choices = [self.shape.whole(answer) for answer in whole]
                self._has_begun = True
                body = self.shape.envelope(choices, transcript.usage(), part=False)
                await JSONResponse(body)(scope, receive, send)
            self.service.metrics.request.observe(time.monotonic() - self._started)
        finally:
            await generation.close()
            self.service.metrics.completion_tokens += transcript.completion_tokens
            self.service.metrics.prompt_tokens += transcript.prompt_tokens

    async def _pieces(self, generation: Generation, transcript: Transcript) -> AsyncIterator[Piece]:
        first = True
        async for chunk in generation.chunks():
            if chunk.finish_reason == "error":
                # An engine in this process refuses at the door what it cannot serve; later errors are its own.
                came = transcript.completion_tokens or chunk.token_ids
                refused = isinstance(self.service.rollout, SteppingRollout) and not came
                raise ApiError(400 if refused else 500, chunk.error or "the rollout gave no reason")
            if first:
                self.service.metrics.first_token.observe(time.monotonic() - self._started)
                first = False
            yield transcript.piece(chunk)

    async def _send_events(self, pieces: AsyncIterator[Piece], transcript: Transcript, send: Send) -> None:
        async for piece in pieces:
            if not self._has_begun:
                await self._send_headers(send)
            if self.shape.says_something(piece):
                await _send_event(send, self.shape.envelope([self.shape.part(piece)], None, part=True))
        if self.shape.body.stream_options.include_usage:
            await _send_event(send, self.shape.envelope([], transcript.usage(), part=True))
        await self._send_end(send)

    async def _send_headers(self, send: Send) -> None:
        self._has_begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _say(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._has_begun:
            await error.response()(scope, receive, send)
        elif self.shape.body.stream:
            await _send_event(send, error.body())
            await self._send_end(send)


async def _send_event(send: Send, event: dict[str, Any]) -> None:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


async def ended_before_client_left(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` and cancels it, once, if the client goes away; either way it has ended on return."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if left := not task.done():
            task.cancel()
            await asyncio.wait({task})
    if not left:
        task.result()
    return not left


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
