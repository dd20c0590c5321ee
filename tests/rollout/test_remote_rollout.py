"""What `RemoteRollout` makes of an engine that answers at moments chosen by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from meshrl.rollout.remote.client import EngineClient, ModelFacts, Piece
from meshrl.rollout.remote.rollout import RemoteRollout
from meshrl.rollout.requests import Chunk, Completion, Request, SamplingParams, gather


class Scripted(EngineClient):
    """Says of each answer one token at once, and the rest when its name is let go or aborted."""

    facts = ModelFacts(vocabulary=100, context=64, shapes={})
    start_seconds = 10.0

    def __init__(self, *, ends_before_the_abort: bool = False):
        self.ends_before_the_abort = ends_before_the_abort
        self.moments: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()

    async def start(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def begin(self) -> None: ...
    async def update(self, bucket: Sequence[object]) -> None: ...
    async def end(self, version: int | None) -> None: ...
    async def flush(self) -> None: ...
    async def release(self, tags: Sequence[str]) -> None: ...
    async def take_back(self, tags: Sequence[str]) -> None: ...
    async def close(self) -> None: ...

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
