"""Responses in OpenAI's formats, complete or streamed, and the course of a generation request.

Transcript:   from the rollout's chunks to pieces of text and tokens
Shape:        from pieces to JSON objects (`CompletionShape`, `ChatShape`)
Generation:   the requests inside the rollout, with a reliable abort
Answering:    the ASGI response that waits for a slot, generates and sends
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.rollout.base import Rollout
from meshrl.rollout.in_process_rollout import SteppingRollout
from meshrl.rollout.requests import Chunk, Request
from meshrl.rollout.text import BROKEN, TextStream, token_text
from meshrl.serving.openai_requests import GenerationBody
from meshrl.serving.service import ApiError, Service

# Stands for a log-prob of minus infinity, because JSON has no infinity.
LOWEST = -9999.0


@dataclass
class Piece:
    """New text and tokens of completion `index` within an HTTP request, or a whole completion gathered from pieces."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: Piece) -> None:
        """Append the next piece of the same completion."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.log_probs += other.log_probs
        self.versions += other.versions
        self.tops += other.tops
        self.finish_reason = other.finish_reason


class Transcript:
    """A converter from the chunks of all completions of an HTTP request to pieces with text; it also counts tokens.

    With `continues`, the text of a completion is decoded as a continuation of its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[Request], continues: bool = False):
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = 0
        self.answers = sum(request.params.n for request in requests)
        self._ends = requests[0].params.stop_token_ids
        self._first: dict[str, int] = {}
        self._texts: list[TextStream] = []
        for request in requests:
            params, before = request.params, request.prompt_token_ids if continues else ()
            self._first[request.request_id] = len(self._texts)
            self._texts += [TextStream(tokenizer, params.stop, params.min_tokens, before) for _ in range(params.n)]

    def piece(self, chunk: Chunk) -> Piece:
        """Convert a chunk of the rollout into a piece with its decoded text."""
        if any(math.isnan(value) for value in chunk.log_probs):
            raise ApiError(500, "the model gave NaN: its weights or the sampling parameters are broken")
        self.completion_tokens += len(chunk.token_ids)
        index = self._first[chunk.request_id] + chunk.index
        stream, visible = self._texts[index], chunk.token_ids
        stopped = chunk.finish_reason == "stop"
        if stopped and visible and visible[-1] in self._ends:
            visible = visible[:-1]
        text = stream.push(visible)
        if chunk.finish_reason is not None:
            text += stream.finish(stopped)
        return Piece(
            index,
            text,
            chunk.token_ids,
            chunk.log_probs,
            chunk.versions,
            chunk.top_log_probs or [],
            chunk.finish_reason,
        )

    def usage(self) -> dict[str, int]:
        """Return the token counts of prompts and completions in OpenAI's `usage` format."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class Shape(ABC):
    """The JSON format of the response to one HTTP request: the envelope and its choices."""

    prefix: str
    whole_object: str
    part_object: str
    continues: bool  # whether a completion's text continues that of its prompt

    def __init__(self, body: GenerationBody, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]):
        self.body, self.tokenizer, self.prompts = body, tokenizer, prompts
        self._streams: dict[int, TextStream] = {}
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def envelope(self, choices: list[dict[str, Any]], usage: dict[str, int] | None, part: bool) -> dict[str, Any]:
        """Return the JSON object of a whole response, or with `part` of one event of a stream."""
        name = self.part_object if part else self.whole_object
        outer = {"id": self.id, "object": name, "created": self.created, "model": self.body.model, "choices": choices}
        if usage is not None:
            outer["usage"] = usage
        return outer

    def says_something(self, piece: Piece) -> bool:
        """Return whether a stream has to send this piece, because it has text, a finish reason or wanted tokens."""
        wants_tokens = self.body.wants_log_probs or self.body.return_token_ids
        return bool(piece.text or piece.finish_reason or (piece.token_ids and wants_tokens))

    @abstractmethod
    def part(self, piece: Piece) -> dict[str, Any]:
        """Return the `choices` entry of a stream event for this piece."""

    @abstractmethod
    def whole(self, piece: Piece) -> dict[str, Any]:
        """Return the `choices` entry of a whole response for this completion."""

    def ids(self, piece: Piece, with_prompt: bool) -> dict[str, Any]:
        """Return the token ids and weight versions of a piece if the request wants them, for clients that train."""
        if not self.body.return_token_ids:
            return {}
        found: dict[str, Any] = {"token_ids": piece.token_ids, "versions": piece.versions}
        if with_prompt:
            found["prompt_token_ids"] = list(self.prompts[piece.index // self.body.n])
        return found

    def stream(self, index: int) -> TextStream:
        """Return the decoding state of completion `index` that gives the texts of single tokens."""
        if index not in self._streams:
            before = self.prompts[index // self.body.n] if self.continues else ()
            self._streams[index] = TextStream(self.tokenizer, prompt=before)
        return self._streams[index]

    def top(self, piece: Piece, at: int) -> list[tuple[int, float]]:
        """Return the likeliest (token id, log-prob) pairs at token `at` of a piece, best first."""
        return sorted(piece.tops[at].items(), key=lambda pair: -pair[1]) if piece.tops else []


class CompletionShape(Shape):
    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"
    continues = True

    def __init__(self, body: GenerationBody, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]):
        super().__init__(body, tokenizer, prompts)
        self._offsets: dict[int, int] = {}

    def whole(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, with_prompt=True)

    def part(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, with_prompt=piece.finish_reason is not None)

    def _choice(self, piece: Piece, with_prompt: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "text": piece.text, "finish_reason": piece.finish_reason}
        choice["logprobs"] = self._log_probs(piece) if self.body.wants_log_probs else None
        return choice | self.ids(piece, with_prompt)

    def _log_probs(self, piece: Piece) -> dict[str, Any]:
        """Build the `logprobs` object of a piece.

        Token strings concatenate to the completion's text, and `text_offset` indexes into that text. Special tokens
        have a string but contribute no text.
        """
        stream, offset = self.stream(piece.index), self._offsets.get(piece.index, 0)
        tokens: list[str] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for at, token in enumerate(piece.token_ids):
            top = self.top(piece, at)
            others = stream.token_texts([other for other, _ in top])
            text = stream.push([token])
            if piece.finish_reason is not None and at == len(piece.token_ids) - 1:
                text += stream.finish(stopped=False)
            # If a character takes several tokens, the last token has its text and the others have none.
            own = token_text(self.tokenizer, token) if token in stream.special_ids else text
            tokens.append(own)
            offsets.append(offset)
            offset += len(text)
            best: dict[str, float] = {}
            for other, (token_id, value) in zip(others, top, strict=True):
                best.setdefault(own if token_id == token else other, finite(value))
            tops.append(best | {own: finite(piece.log_probs[at])})  # even if it is not among the likeliest
        self._offsets[piece.index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [finite(value) for value in piece.log_probs],
            "top_logprobs": tops if self.body.top_log_probs else None,
            "text_offset": offsets,
        }


class ChatShape(Shape):
    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    continues = False

    def __init__(self, body: GenerationBody, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]):
        super().__init__(body, tokenizer, prompts)
        self._begun: set[int] = set()

    def whole(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, {"message": message}, with_prompt=True)

    def part(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            delta = {"role": "assistant", "content": piece.text}
        return self._choice(piece, {"delta": delta}, with_prompt=piece.finish_reason is not None)

    def _choice(self, piece: Piece, said: dict[str, Any], with_prompt: bool) -> dict[str, Any]:
        choice = {"index": piece.index, **said, "finish_reason": piece.finish_reason, "logprobs": None}
        if self.body.wants_log_probs:
            choice["logprobs"] = {"content": [self._token(piece, at) for at in range(len(piece.token_ids))]}
        return choice | self.ids(piece, with_prompt)

    def _token(self, piece: Piece, at: int) -> dict[str, Any]:
        stream, token, top = self.stream(piece.index), piece.token_ids[at], self.top(piece, at)
        own, *others = stream.token_texts([token, *(other for other, _ in top)])
        stream.push([token])
        tops = [self._entry(text, value) for text, (_, value) in zip(others, top, strict=True)]
        return self._entry(own, piece.log_probs[at]) | {"top_logprobs": tops}

    @staticmethod
    def _entry(text: str, value: float) -> dict[str, Any]:
        # The text of a token that is part of a character does not show the token's bytes.
        return {"token": text, "logprob": finite(value), "bytes": None if BROKEN in text else list(text.encode())}


def finite(log_prob: float) -> float:
    """Return the log-prob, raised to `LOWEST` if it is lower, because JSON has no infinity."""
    return max(log_prob, LOWEST)


# The course of one generation request: through the queue and the rollout to a client that may disconnect.

ABORT_AGAIN_SECONDS = 0.2
# Seconds for sending an error to a client whose request failed.
LAST_WORDS_SECONDS = 2.0
log = logging.getLogger(__name__)


class Generation:
    """A running generation of some requests; after `close`, none of them is left in the rollout."""

    def __init__(self, rollout: Rollout, requests: Sequence[Request]):
        self._rollout, self._requests = rollout, requests
        self._queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for chunk in self._rollout.generate(self._requests):
                self._queue.put_nowait(chunk)
        except Exception as error:  # raised again in `chunks`
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield the chunks as they arrive; raise the rollout's error if it fails."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        """Abort all requests that still run, and wait until the rollout has ended them.

        The abort is repeated, because a request may not have entered the rollout at the first abort.
        """
        names = [request.request_id for request in self._requests]
        while not self._task.done():
            await asyncio.to_thread(self._rollout.abort, names)
            await asyncio.wait({self._task}, timeout=ABORT_AGAIN_SECONDS)


class Answering(Response):
    """The response to a generation request: it waits for a slot, generates and sends, all in one task."""

    def __init__(self, service: Service, requests: Sequence[Request], shape: Shape):
        super().__init__()
        self.service, self.requests, self.shape = service, requests, shape
        self._started = time.monotonic()
        self._has_slot = False
        self._has_begun = False  # whether response headers were sent to the client

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
        except TimeoutError:  # the client has stopped reading; returning ends the connection
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
                # An in-process engine refuses requests that it cannot serve before the first token. Later errors are
                # failures of the engine.
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
    """Run `work`, cancel it once if the client disconnects, and return whether it ended by itself.

    In both cases `work` has ended on return.
    """
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
