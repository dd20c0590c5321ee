"""Reward functions that are coroutines (`async def`): the calls of a batch wait together, on a loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from meshrl.rewards.calling import (
    AtOnce,
    CallTimeoutError,
    Failure,
    RewardFunction,
    Sample,
    call_many,
    call_one,
    extras_of,
)

_WAITING = object()


class LoopThread:
    """An event loop in a thread, the same from batch to batch: what functions keep open stays usable."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
        """Its result, or what it raises; after `seconds` it is cancelled.

        Then the loop is left behind with its thread, which ends when what runs in it has let itself be cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(_caught(coroutine), self._running())
        try:
            done, value = future.result(seconds)
        except TimeoutError:
            future.cancel()
            self.close()
            raise CallTimeoutError(f"no answer within {seconds:g} s") from None
        if not done:
            raise value
        return value

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="reward-coroutines").start()
        return self._loop

    def close(self) -> None:
        """Ends the thread, as soon as what runs in it lets itself be cancelled."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(), self._loop)
            self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _end() -> None:
    """Stops the loop when everything else in it has ended."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()


async def _caught(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Whether it came to its end, and its result or error: exit() in a task would end the loop, unheard."""
    try:
        return True, await coroutine
    except (Exception, SystemExit) as error:
        return False, error
    except BaseException as error:  # also a part of it that was cancelled
        return False, RuntimeError(f"it ended with {type(error).__name__}")


class Together:
    """Asks a coroutine function for each sample, at most `at_once` at a time."""

    def __init__(self, function: RewardFunction, timeout: float | None, at_once: int):
        self.function, self.timeout, self.at_once = function, timeout, at_once
        self.extras, self.loop = extras_of(function), LoopThread()

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        answers: list[Any] = [_WAITING] * len(samples)
        # One that keeps the loop to itself holds up the others' times as well: so much for all, and one more.
        rounds = 1 + -(-len(samples) // self.at_once)
        try:
            self.loop.run(self._fill(answers, samples), None if self.timeout is None else rounds * self.timeout)
        except CallTimeoutError as error:
            return [Failure.of(error) if answer is _WAITING else answer for answer in answers]
        return answers

    async def _fill(self, answers: list[Any], samples: Sequence[Sample]) -> None:
        gate = asyncio.Semaphore(self.at_once)

        async def ask(at: int) -> None:
            async with gate:
                answers[at] = await self._answer(samples[at])

        await asyncio.gather(*map(ask, range(len(samples))))

    async def _answer(self, sample: Sample) -> Any:
        async with asyncio.timeout(self.timeout) as limit:
            done, value = await _caught(call_one(self.function, sample, self.extras))
        if limit.expired():
            return Failure.of(CallTimeoutError(f"no answer within {self.timeout:g} s"))
        return value if done else Failure.of(value)

    def close(self) -> None:
        """Ends its event loop."""
        self.loop.close()


class AtOnceAwaited(AtOnce):
    """Asks a coroutine function for all samples in one call."""

    def __init__(self, function: RewardFunction, timeout: float | None):
        super().__init__(function, timeout)
        self.loop = LoopThread()

    def _ask(self, samples: Sequence[Sample]) -> Any:
        return self.loop.run(call_many(self.function, samples, self.extras), self.timeout)

    def close(self) -> None:
        """Ends its event loop."""
        self.loop.close()
