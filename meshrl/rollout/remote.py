"""A rollout whose engine runs outside this process or behind asynchronous calls, driven by an event loop in a thread.

Requests wait here while the rollout is paused, has released memory or lacks weights. A weight update pauses the engine,
streams the buckets and drops the caches. Running completions then continue under the new version.

Parts: `RemoteRollout`, the interface `EngineClient` that each engine implements, and `Bystander` for ranks of a replica
that do not hold its engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshrl.rollout.base import NO_WEIGHTS, PAUSE_MODES, TAGS, Rollout, known_tags
from meshrl.rollout.requests import Chunk, Completion, Request, gather
from meshrl.rollout.weight_files import FileWeights, buckets, checked, noted

T = TypeVar("T")
Deliver = Callable[[Chunk], None]
POLL_SECONDS = 1.0
# How long, in seconds, an aborted completion may take to end by itself, and the engine to close.
ABORT_SECONDS = 2.0
CLOSE_SECONDS = 30.0
CLOSED = "the rollout is closed: its engine can be asked for nothing any more"


class RemoteRollout(Rollout):
    """The `Rollout` of an `EngineClient`. `deadline` limits every single call to the engine, in seconds.

    `replica_ranks` is the number of trainer ranks that share the engine. This rank is the first of them. The other
    ranks have a `Bystander`.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        pad_token_id: int,
        bucket_bytes: int = 512 << 20,
        max_concurrency: int = 256,
        deadline: float = 600.0,
        replica_ranks: int = 1,
    ):
        self.replica_ranks, self.takes_adapters, self._has_base = replica_ranks, client.takes_adapters, False
        self.client, self.pad_token_id, self.bucket_bytes, self.deadline = client, pad_token_id, bucket_bytes, deadline
        self.version = -1
        self._answers: dict[tuple[str, int], _Answer] = {}
        self._paused = self._lacks_weights = False
        self._closed = threading.Event()
        self._released: set[str] = set()
        self._asked: set[Future[Any]] = set()  # calls on which some thread waits
        self._tokens = self._relabelled = 0
        self._one_at_a_time = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-rollout", daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(max_concurrency)
        self._open = asyncio.Event()
        self._open.set()
        try:
            self._call(client.start(), deadline=client.start_seconds + CLOSE_SECONDS)
        except BaseException:
            self.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T], deadline: float | None = None) -> T:
        """Run a coroutine on the event loop and block until it returns."""
        future = self._post(work)
        limit = deadline or self.deadline
        try:
            return future.result(limit)
        except CancelledError as error:
            raise RuntimeError(CLOSED) from error
        except TimeoutError as error:
            if future.done():
                raise  # a timeout raised by the engine's own code
            future.cancel()
            raise TimeoutError(f"the rollout's engine did not answer within {limit:.0f} s") from error

    def _post(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed.is_set():  # the loop has stopped and would never run the coroutine
            work.close()
            raise RuntimeError(CLOSED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        if self._closed.is_set():  # `close` may have run in the meantime without seeing this future
            future.cancel()
        return future

    # Requests

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        place = {request.request_id: number for number, request in enumerate(requests)}
        return sorted(self.as_they_end(requests), key=lambda answer: (place[answer.request_id], answer.index))

    def as_they_end(self, requests: Sequence[Request]) -> Iterator[Completion]:
        final: dict[tuple[str, int], list[int]] = {}
        chunks: dict[str, list[Chunk]] = {request.request_id: [] for request in requests}
        ended: queue.SimpleQueue[asyncio.Task[None]] = queue.SimpleQueue()
        waiting: dict[asyncio.Task[None], Request] = {}

        async def begin() -> None:
            await self._submit(requests, lambda chunk: chunks[chunk.request_id].append(chunk))
            # Watch the requests before any completion can end.
            for request in requests:
                task = self._watch(request, final)
                waiting[task] = request
                task.add_done_callback(ended.put)

        self._call(begin())  # if an id is refused, it belongs to another caller's request, so there is nothing to abort
        try:
            while waiting:
                # No deadline, because a pause may last. A failure of the engine ends every completion.
                try:
                    task = ended.get(timeout=POLL_SECONDS)
                    is_closed = task.cancelled()
                except queue.Empty:
                    is_closed = self._closed.is_set()
                    if not is_closed:
                        continue
                if is_closed:
                    raise RuntimeError("the rollout was closed while requests were running") from None
                request = waiting.pop(task)
                task.result()
                for answer in gather([request], chunks.pop(request.request_id)):
                    answer.versions = final.get((answer.request_id, answer.index), answer.versions)
                    yield answer
        finally:
            if waiting:
                self.abort([request.request_id for request in waiting.values()])

    def _wait_for(self, future: Future[None]) -> None:
        # No deadline, because a pause may last. A failure of the engine ends every completion.
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if self._closed.is_set():
                    raise RuntimeError("the rollout was closed while requests were running") from None

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk] = asyncio.Queue()
        unfinished = sum(request.params.n for request in requests)

        def deliver(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunk)

        # A consumer that leaves before `_submit` has run has still submitted its requests.
        entering = asyncio.wrap_future(self._post(self._submit(requests, deliver)))
        try:
            await asyncio.shield(entering)
            while unfinished:
                try:
                    chunk = await asyncio.wait_for(arrived.get(), POLL_SECONDS)
                except TimeoutError:
                    if self._closed.is_set():
                        raise RuntimeError("the rollout was closed while requests were running") from None
                    continue
                unfinished -= chunk.finish_reason is not None
                yield chunk
        finally:
            if unfinished:
                await asyncio.wait([entering], timeout=ABORT_SECONDS)
                # else these names belong to another caller's requests
                if entering.done() and entering.exception() is None:
                    await asyncio.to_thread(self.abort, [request.request_id for request in requests])

    async def _submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        names = [request.request_id for request in requests]
        known = {name for name, _ in self._answers}
        for name in names:
            if name in known:
                raise ValueError(f"request id '{name}' is already running: every request needs an id of its own")
            known.add(name)
        for request in requests:
            problem = NO_WEIGHTS if self.version < 0 else self.client.refusal(request)
            for index in range(request.params.n):
                if problem is not None:
                    deliver(Chunk(request.request_id, index, [], [], [], "error", problem))
                    continue
                answer = _Answer(self, request, index, deliver)
                self._answers[request.request_id, index] = answer
                answer.task = asyncio.create_task(answer.run())

    def _watch(self, request: Request, final: dict[tuple[str, int], list[int]]) -> asyncio.Task[None]:
        """Return a task that ends when all completions of a request have ended.

        The task stores in `final` the versions that the engine reported at the end.
        """
        keys = ((request.request_id, index) for index in range(request.params.n))
        answers = {key: self._answers[key] for key in keys if key in self._answers}

        async def until_ended() -> None:
            await asyncio.gather(*(answer.task for answer in answers.values() if answer.task is not None))
            final.update((key, answer.versions) for key, answer in answers.items() if answer.versions is not None)

        return asyncio.create_task(until_ended())

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if not self._closed.is_set():  # `close` has ended all requests
            self._call(self._abort(request_ids))

    async def _abort(self, request_ids: Sequence[str] | None) -> None:
        names = None if request_ids is None else set(request_ids)
        wanted = [a for (name, _), a in self._answers.items() if names is None or name in names]
        if not wanted:
            return
        # A task that is cancelled before its first step never runs, so it would neither deliver its last chunk nor
        # remove itself from `_answers`.
        await asyncio.sleep(0)
        for answer in wanted:
            answer.aborted = True
            if not answer.sent and answer.task is not None:
                answer.task.cancel()
        sent = [answer for answer in wanted if answer.sent]
        if sent:
            await self.client.abort([answer.name for answer in sent])
        tasks = [answer.task for answer in wanted if answer.task is not None]
        _, late = await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    # Pauses

    def pause(self, mode: str = "keep") -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"unknown pause mode '{mode}': use one of {', '.join(PAUSE_MODES)}")
        with self._one_at_a_time:
            if mode == "abort":
                self._paused = True
                self._call(self._gate())
                self.abort()
            elif mode == "wait":
                self._wait_for(self._post(self._drain()))
            self._paused = True
            self._call(self._gate())

    async def _drain(self) -> None:
        """Hold new requests back and wait for the running ones."""
        self._open.clear()
        running = [answer.task for answer in self._answers.values() if answer.sent and answer.task is not None]
        if not running:
            return
        if self._released or self._lacks_weights:
            raise RuntimeError(
                "answers are running that cannot end, since the rollout has released memory or lacks weights: resume "
                "what was released and update the weights first, or pause with mode 'abort'"
            )
        if self._engine_paused:  # by an earlier pause, in which the running completions could never end
            await self.client.resume()
            self._engine_paused = False
        await asyncio.wait(running)

    async def _gate(self) -> None:
        """Open or close the gate for requests, here and in the engine, according to the current state."""
        shut = self._paused or self._lacks_weights or bool(self._released)
        if shut and (self._open.is_set() or not self._engine_paused):
            self._open.clear()
            await self.client.pause()
            self._engine_paused = True
        elif not shut:
            if self._engine_paused:
                await self.client.resume()
                self._engine_paused = False
            self._open.set()

    _engine_paused = False

    def resume(self, tags: Sequence[str] | None = None) -> None:
        with self._one_at_a_time:
            if tags is None:
                self._paused = False
            else:
                wanted = known_tags(tags) & self._released
                if wanted:
                    self._call(self.client.take_back(sorted(wanted)))
                self._released -= wanted
            self._call(self._gate())

    def release(self, tags: Sequence[str] = TAGS) -> None:
        with self._one_at_a_time:
            given = known_tags(tags) - self._released
            if not given:
                return
            self._released |= given
            self._lacks_weights |= "weights" in given
            self._call(self._gate())
            self._call(self.client.flush())
            self._call(self.client.release(sorted(given)))

    # Weights

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._one_at_a_time:
            if "weights" in self._released:
                raise RuntimeError("the rollout has released its weights: resume(['weights']) before an update")
            self._lacks_weights = True  # until all weights have arrived
            self._has_base = False
            self._call(self._gate())
            self._call(self.client.begin())
            try:
                # In this thread and not on the loop, because gathering the tensors may be a collective of the caller's
                # threads.
                expected = self.client.facts.weights
                named = expected.renamed(checked(weights, expected.shapes))
                for bucket in buckets(named, self.bucket_bytes):
                    self._call(self.client.update(bucket))
            except BaseException as error:
                with noted(error, "nor could the engine end the update"):
                    self._call(self.client.end(None))
                raise
            self._call(self.client.end(version))
            if "kv_cache" not in self._released:
                self._call(self.client.flush())
            self.version, self._lacks_weights, self._has_base = version, False, True
            self._call(self._gate())

    def update_adapter(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> None:
        """Load a LoRA adapter onto the base weights that the engine keeps.

        `config` is peft's, and `tensors` have peft's names.
        """
        with self._one_at_a_time:
            if not self._has_base:
                raise RuntimeError("the rollout has no weights that an adapter could change: update_weights first")
            if "weights" in self._released:
                raise RuntimeError("the rollout has released its weights: resume(['weights']) before an update")
            self._lacks_weights = True  # until the adapter has arrived
            self._call(self._gate())
            self._call(self.client.adapt(config, tensors, version))
            if "kv_cache" not in self._released:
                self._call(self.client.flush())
            self.version, self._lacks_weights = version, False
            self._call(self._gate())

    def stats(self) -> dict[str, float]:
        answers = list(self._answers.values())
        return {
            "running": float(sum(answer.sent for answer in answers)),
            "waiting": float(sum(not answer.sent for answer in answers)),
            "generated_tokens": float(self._tokens),
            # Streamed tokens that the engine later reported under another version than the one they were delivered
            # with.
            "relabelled_tokens": float(self._relabelled),
            "version": float(self.version),
        }

    def close(self) -> None:
        if self._closed.is_set():
            return
        try:
            try:
                self._call(self._abort(None), deadline=CLOSE_SECONDS)
            finally:  # the server must not outlive an engine that no longer responds
                self._call(self.client.close(), deadline=CLOSE_SECONDS)
        finally:
            self._closed.set()
            for future in list(self._asked):  # else other threads would wait for their deadline
                future.cancel()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)

    def count(self, tokens: int, relabelled: int = 0) -> None:
        """Add to the counters of generated and relabelled tokens. Called by each `_Answer`."""
        self._tokens += tokens
        self._relabelled += relabelled


class _Answer:
    """One completion in progress, run by its own asyncio task."""

    def __init__(self, rollout: RemoteRollout, request: Request, index: int, deliver: Deliver):
        self.rollout, self.request, self.index, self.deliver = rollout, request, index, deliver
        self.name = f"{request.request_id}/{index}"
        self.task: asyncio.Task[None] | None = None
        self.sent = self.aborted = False
        self.versions: list[int] | None = None
        self._given: list[int] = []

    async def run(self) -> None:
        """Wait for a slot and for the open gate, then deliver tokens as they arrive.

        The last chunk has the only finish reason.
        """
        reason, error, routes = "error", "the engine ended the answer without a reason", None
        try:
            async with self.rollout._slots:
                await self.rollout._open.wait()
                self.sent = True
                async for piece in self.rollout.client.generate(self.name, self.request, self.index):
                    if piece.finish_reason is not None:
                        reason, error, routes = piece.finish_reason, piece.error or "", piece.routes
                    self._hand_out(piece)
        except asyncio.CancelledError:
            self.aborted = True
        except Exception as problem:  # only this completion fails, and its chunk reports the error
            reason, error = "error", f"{type(problem).__name__}: {problem}"
        finally:
            del self.rollout._answers[self.request.request_id, self.index]
        # A completion that had ended before the abort reached it was not truncated and keeps its finish reason.
        if self.aborted and reason not in ("stop", "length"):
            reason, error = "abort", ""
        tops: list[dict[int, float]] | None = [] if self.request.params.top_log_probs else None
        self.deliver(Chunk(self.request.request_id, self.index, [], [], [], reason, error or None, tops, routes))

    def _hand_out(self, piece: Piece) -> None:
        count = len(piece.token_ids)
        versions = [self.rollout.version] * count
        if piece.all_versions is not None:
            self.versions = piece.all_versions
            versions = piece.all_versions[len(self._given) :][:count]
            wrong = sum(a != b for a, b in zip(self._given, piece.all_versions, strict=False))
            self.rollout.count(0, wrong)
        self._given += versions
        if count:
            self.rollout.count(count)
            self.deliver(
                Chunk(
                    self.request.request_id,
                    self.index,
                    piece.token_ids,
                    piece.log_probs,
                    versions,
                    top_log_probs=piece.top_log_probs,
                )
            )


# The interface of all engines outside this process: vLLM's server, SGLang's server and SGLang's engine.


@dataclass
class Piece:
    """New tokens of one completion, as an engine reports them.

    `all_versions` has the versions of all tokens of the completion so far, if the engine reports versions. `routes`
    come with the last piece, if the engine records them.
    """

    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    error: str | None = None
    all_versions: list[int] | None = None
    routes: np.ndarray | None = None


@dataclass
class ModelFacts:
    """The properties of the served model that are needed to check requests and to send weights."""

    vocabulary: int
    context: int
    weights: FileWeights = field(repr=False)


class EngineClient(ABC):
    """The client of one engine, which translates to the engine's calls. Runs on the event loop of `RemoteRollout`."""

    facts: ModelFacts
    start_seconds: float
    takes_adapters = False  # whether `adapt` is supported

    @abstractmethod
    async def start(self) -> None:
        """Wait until the engine responds; raise an error if it does not start within `start_seconds`."""

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Return why a request cannot be served, or None."""

    @abstractmethod
    def generate(self, name: str, request: Request, index: int) -> AsyncIterator[Piece]:
        """Generate completion `index` of a request under the engine's request id `name`.

        The last piece has a finish reason.
        """

    @abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """End the named completions with finish reason `abort`."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating after the current step. Running completions are kept."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue to generate after `pause`, with the completions that were running."""

    @abstractmethod
    async def begin(self) -> None:
        """Begin a weight update. The engine is paused."""

    @abstractmethod
    async def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a part of the weights, under the names in checkpoint files."""

    @abstractmethod
    async def end(self, version: int | None) -> None:
        """End a weight update under a version, or with None if the update has failed."""

    async def adapt(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> None:
        """Load a LoRA adapter in peft's format, which later completions use. The engine is paused."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    @abstractmethod
    async def flush(self) -> None:
        """Drop all cached keys and values. Running completions recompute theirs."""

    @abstractmethod
    async def release(self, tags: Sequence[str]) -> None:
        """Free the memory of the given tags. The engine is paused."""

    @abstractmethod
    async def take_back(self, tags: Sequence[str]) -> None:
        """Allocate again the memory of the given tags after `release`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection, and end the engine if this client started it."""


def span_versions(spans: Sequence[dict[str, object]]) -> list[int]:
    """Return the version of every token from an engine's list of (version, start, end).

    A version that is not a number becomes -1.
    """
    versions: list[int] = []
    for span in spans:
        label = str(span["version"])
        version = int(label) if label.lstrip("-").isdigit() else -1
        versions += [version] * (int(str(span["end"])) - int(str(span["start"])))
    return versions


# Placeholders on ranks that do not hold their replica's engine. An engine that spans several ranks belongs to the
# first.

ELSEWHERE = "the first rank of this replica has its engine and answers: ask that one"


class Bystander(Rollout):
    """A placeholder on a rank whose device is used by another rank's engine. It only tracks the version.

    `replica_ranks` is the number of ranks that share the engine. `takes_adapters` states whether the engine accepts
    adapters, which all ranks must agree on.
    """

    def __init__(self, *, pad_token_id: int, replica_ranks: int, takes_adapters: bool = False):
        self.version, self.pad_token_id, self.replica_ranks = -1, pad_token_id, replica_ranks
        self.takes_adapters = takes_adapters

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        raise RuntimeError(ELSEWHERE)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        raise RuntimeError(ELSEWHERE)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:  # gathering the weights may be a collective of all ranks
            pass
        self.version = version

    def update_adapter(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> None:
        """Record the version. The engine's own rank sends the same adapter to the engine."""
        self.version = version

    def abort(self, request_ids: Sequence[str] | None = None) -> None: ...

    def pause(self, mode: str = "keep") -> None: ...

    def release(self, tags: Sequence[str] = TAGS) -> None: ...

    def resume(self, tags: Sequence[str] | None = None) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"running": 0.0, "waiting": 0.0, "generated_tokens": 0.0, "version": float(self.version)}

    def close(self) -> None: ...
