"""What `RemoteRollout` makes of an engine that answers at moments chosen by the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from meshrl.rollout.remote import EngineClient, ModelFacts, Piece, RemoteRollout
from meshrl.rollout.requests import Chunk, Completion, Request, SamplingParams, gather
from meshrl.rollout.weight_files import FileWeights


class NoWeights(FileWeights):
    """Of a model that has none."""

    def __init__(self) -> None:
        self.shapes, self._others = {}, {}


class Scripted(EngineClient):
    """Says of each answer one token at once, and the rest when its name is let go or aborted."""

    facts = ModelFacts(vocabulary=100, context=64, weights=NoWeights())
    start_seconds = 10.0

    def __init__(self, *, ends_before_the_abort: bool = False):
        self.ends_before_the_abort = ends_before_the_abort
        self.moments: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()
        self.paused = False

    async def start(self) -> None: ...
    async def begin(self) -> None: ...
    async def update(self, bucket: Sequence[object]) -> None: ...
    async def end(self, version: int | None) -> None: ...
    async def flush(self) -> None: ...
    async def release(self, tags: Sequence[str]) -> None: ...
    async def take_back(self, tags: Sequence[str]) -> None: ...
    async def close(self) -> None: ...

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    def refusal(self, request: Request) -> str | None:
        return None

    async def generate(self, name: str, request: Request, index: int) -> AsyncIterator[Piece]:
        self.moments[name] = asyncio.Event()
        yield Piece([5], [-0.5])
        await self.moments[name].wait()
        if name in self.aborted and not self.ends_before_the_abort:
            yield Piece([], [], finish_reason="abort")
        else:
            rest = request.params.max_tokens - 1
            yield Piece([6] * rest, [-0.25] * rest, finish_reason="length")

    async def abort(self, names: Sequence[str]) -> None:
        self.aborted.update(names)
        for name in names:
            self.moments[name].set()


@pytest.fixture
def scripted(request):
    client = Scripted(ends_before_the_abort=getattr(request, "param", False))
    rollout = RemoteRollout(client, pad_token_id=0)
    rollout.update_weights([], 3)
    yield client, rollout
    rollout.close()


def asked(count: int, max_tokens: int = 4) -> list[Request]:
    return [Request(f"r{i}", (2, 3), SamplingParams(max_tokens=max_tokens), i) for i in range(count)]


@pytest.mark.parametrize(
    ("scripted", "reason", "length"), [(True, "length", 4), (False, "abort", 1)], indirect=["scripted"]
)
@pytest.mark.parametrize("stop", ["abort", "pause"])
def test_an_answer_that_ended_before_the_abort_is_not_called_aborted(scripted, reason, length, stop):
    _, rollout = scripted
    (question,) = asked(1)

    async def abort_after_the_first_token() -> list[Completion]:
        chunks: list[Chunk] = []
        async for chunk in rollout.generate([question]):
            if not chunks:
                await asyncio.to_thread(*((rollout.abort,) if stop == "abort" else (rollout.pause, "abort")))
            chunks.append(chunk)
        return gather([question], chunks)

    (answer,) = asyncio.run(abort_after_the_first_token())
    assert (answer.finish_reason, len(answer.token_ids)) == (reason, length)
    assert answer.error is None
    assert set(answer.versions) == {3}


def test_answers_are_handed_out_in_the_order_they_end(scripted):
    client, rollout = scripted
    requests = asked(5)
    answers = rollout.as_they_end(requests)
    order = [3, 0, 4, 1, 2]

    async def all_began() -> None:
        while len(client.moments) < 5:
            await asyncio.sleep(0.001)

    async def end_in_order() -> None:
        await all_began()
        for number in order:
            running = len(rollout._answers)
            client.moments[f"r{number}/0"].set()
            while len(rollout._answers) == running:
                await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(end_in_order(), rollout._loop)
    assert [answer.request_id for answer in answers] == [f"r{number}" for number in order]


async def collect(rollout: RemoteRollout, requests: list[Request]) -> list[Chunk]:
    return [chunk async for chunk in rollout.generate(requests)]


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.filterwarnings("error")
def test_a_closed_rollout_answers_at_once(scripted):
    _, rollout = scripted
    rollout.close()
    started = time.monotonic()
    calls = [
        lambda: rollout.complete(asked(1)),
        lambda: next(rollout.as_they_end(asked(1))),
        lambda: asyncio.run(collect(rollout, asked(1))),
        lambda: rollout.pause("wait"),
        lambda: rollout.resume(),
        lambda: rollout.update_weights([], 4),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="is closed"):
            call()
    rollout.abort()
    rollout.close()
    assert time.monotonic() - started < 10


def test_an_abort_right_behind_a_request_ends_it_with_a_reason(scripted):
    _, rollout = scripted
    chunks: list[Chunk] = []

    async def at_once() -> None:
        await rollout._submit(asked(3), chunks.append)
        await rollout._abort(["r0", "r2"])

    rollout._call(at_once())
    assert [(chunk.request_id, chunk.finish_reason) for chunk in chunks if chunk.finish_reason] == [
        ("r0", "abort"),
        ("r2", "abort"),
    ]
    assert set(rollout._answers) == {("r1", 0)}


def test_leaving_while_the_requests_come_in_leaves_nothing_behind(scripted):
    _, rollout = scripted

    async def leave() -> None:
        rollout._loop.call_soon_threadsafe(time.sleep, 0.2)
        asking = asyncio.create_task(collect(rollout, asked(2)))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(leave())
    assert not rollout._answers


def begin_one(client, rollout) -> tuple[threading.Thread, list[Completion]]:
    """Asks for one answer in a thread, until the engine has begun it; the list gets what comes."""
    found: list[Completion] = []
    asking = threading.Thread(target=lambda: found.extend(rollout.complete(asked(1))))
    asking.start()
    wait_for(lambda: "r0/0" in client.moments)
    return asking, found


def test_a_pause_that_waits_lets_kept_answers_end(scripted):
    client, rollout = scripted
    asking, found = begin_one(client, rollout)
    rollout.pause("keep")
    assert client.paused
    pausing = threading.Thread(target=rollout.pause, args=("wait",))
    pausing.start()
    wait_for(lambda: not client.paused)
    assert not rollout._open.is_set()  # new ones wait
    rollout._loop.call_soon_threadsafe(client.moments["r0/0"].set)
    pausing.join(20)
    asking.join(20)
    assert client.paused
    assert found[0].finish_reason == "length"
    rollout.resume()
    assert not client.paused


def test_a_pause_does_not_wait_for_answers_that_cannot_end(scripted):
    client, rollout = scripted
    asking, _ = begin_one(client, rollout)
    rollout.release(["kv_cache"])
    with pytest.raises(RuntimeError, match="mode 'abort'"):
        rollout.pause("wait")
    assert client.paused
    rollout.pause("abort")
    asking.join(20)
    assert not asking.is_alive()


def test_a_name_that_is_taken_does_not_end_whoever_has_it(scripted):
    client, rollout = scripted
    asking, found = begin_one(client, rollout)
    with pytest.raises(ValueError, match="already running"):
        rollout.complete(asked(1))
    rollout._loop.call_soon_threadsafe(client.moments["r0/0"].set)
    asking.join(20)
    assert (found[0].finish_reason, client.aborted) == ("length", set())


def test_closing_ends_the_engine_also_where_it_cannot_abort(scripted, monkeypatch):
    client, rollout = scripted
    answers = rollout.as_they_end(asked(1))

    def ask() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            next(answers)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: "r0/0" in client.moments)
    ended = []

    async def unreachable(names: Sequence[str]) -> None:
        raise ConnectionError("no answer")

    async def close() -> None:
        ended.append(True)

    monkeypatch.setattr(client, "abort", unreachable)
    monkeypatch.setattr(client, "close", close)
    with pytest.raises(ConnectionError, match="no answer"):
        rollout.close()
    assert ended == [True]
    asking.join(20)
    assert not asking.is_alive()


@pytest.mark.parametrize("late", [False, True], ids=["noted", "noted_too_late"])
def test_closing_ends_what_other_threads_ask_for(scripted, monkeypatch, late):
    client, rollout = scripted
    asked, closed = threading.Event(), threading.Event()
    calls, found = [], []

    class Asked(set):
        """The other thread notes its last call, after the gate's and the flush's, only when the rollout is closed."""

        def add(self, future):
            if threading.current_thread() is asking:
                calls.append(future)
                if late and len(calls) == 3:
                    assert closed.wait(10)
            super().add(future)

    async def never(tags: Sequence[str]) -> None:
        asked.set()
        await asyncio.sleep(600)

    def release() -> None:
        with pytest.raises(RuntimeError, match="the rollout is closed"):
            rollout.release()
        found.append("told")

    monkeypatch.setattr(client, "release", never)
    monkeypatch.setattr(rollout, "_asked", Asked())
    asking = threading.Thread(target=release)
    asking.start()
    assert asked.wait(10)
    rollout.close()
    closed.set()
    asking.join(10)
    assert found == ["told"]


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)


def test_many_requests_are_entered_and_aborted_without_comparing_all_names(scripted):
    _, rollout = scripted
    names = [Counted(f"many{i}") for i in range(300)]
    requests = [Request(name, (2, 3), SamplingParams(max_tokens=4), 0) for name in names]
    answers = rollout.as_they_end(requests)
    threading.Timer(0.05, rollout.abort, [names]).start()
    assert len(list(answers)) == 300
    assert Counted.compared < 20_000
