"""Reward functions by name, and how one is called. Light: every process of a pool loads this."""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.config.keys import count
from meshrl.config.user_code import ON_DEMAND, PLURALS, argument_problem, load_function, own_frames
from meshrl.rewards.functions import BUILT_IN, nothing

RewardFunction = Callable[..., Any]
Sample = Mapping[str, Any]

# raised; hung; its process was killed; not finite; a wrong number of scores; no number at all
KINDS = ("raised", "timeout", "died", "nan", "length", "invalid")


@dataclass(frozen=True)
class Failure:
    """Instead of an answer: what went wrong, as one of `KINDS`. `whole`: it was a call for many samples."""

    kind: str
    text: str
    error: Exception | SystemExit | None = None
    whole: bool = False
    frames: tuple[str, ...] = ()  # where in the function's own code

    @staticmethod
    def of(error: Exception | SystemExit, whole: bool = False) -> Failure:
        """What a function raised."""
        kind = "timeout" if isinstance(error, CallTimeoutError) else "raised"
        return Failure(kind, f"{type(error).__name__}: {error}", error, whole, tuple(own_frames(error)))


class CallTimeoutError(Exception):
    """A reward function took longer than it may."""


@dataclass(frozen=True)
class RewardFunctionSpec:
    """A reward function as the config names it: a built-in one, one in a file or module, or the function itself."""

    label: str
    weight: float = 1.0
    name: str | None = None  # of the function; None: the label
    path: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: RewardFunction | None = None

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of ours, maybe with a model of its own to ask."""
        return self.path is None and (self.name or self.label) in BUILT_IN

    @property
    def scores_nothing(self) -> bool:
        """Whether it only stands for there being no function."""
        return self.is_built_in and BUILT_IN[self.name or self.label] is nothing

    def load(self) -> RewardFunction:
        """The function, with its keyword arguments bound; a `ValueError` says what is wrong."""
        name = self.name or self.label
        if self.function is not None:
            found = self.function
        elif self.path is not None:
            found = load_function(self.path, name)
        elif name in BUILT_IN:
            found = BUILT_IN[name]
        else:
            raise ValueError(f"there is no built-in reward function '{name}': use one of {', '.join(BUILT_IN)}")
        if not self.kwargs:
            check_arguments(found, {}, self.label)
            return found
        check_arguments(found, self.kwargs, self.label)
        return functools.partial(found, **self.kwargs)


def check_arguments(function: RewardFunction, kwargs: Mapping[str, Any], label: str) -> None:
    """Refuses keyword arguments that a function does not take, and finds those it needs and is not given."""
    if problem := argument_problem(function, kwargs, label):
        raise ValueError(problem)


def extras_of(function: RewardFunction) -> list[str]:
    """Which of `ON_DEMAND`'s parameters a function's signature names, in either form."""
    try:
        named = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
    return [name for name, plural in ON_DEMAND.items() if {name, plural} & named]


def call_one(function: RewardFunction, sample: Sample, extras: Sequence[str]) -> Any:
    """The function's answer to one sample."""
    return function(**{name: sample[name] for name in (*PLURALS, *extras)})


def call_many(function: RewardFunction, samples: Sequence[Sample], extras: Sequence[str]) -> Any:
    """The function's answer to all samples."""
    names = {name: plural for name, plural in (PLURALS | ON_DEMAND).items() if name in PLURALS or name in extras}
    return function(**{plural: [sample[name] for sample in samples] for name, plural in names.items()})


def call_within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """Calls, or gives up after so long: the thread is then left to itself, since none can be ended from outside."""
    if seconds is None:
        return call()
    box: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((True, call()))
        except BaseException as error:
            box.put((False, error))

    threading.Thread(target=run, daemon=True, name="reward").start()
    try:
        done, value = box.get(timeout=seconds)
    except queue.Empty:
        raise CallTimeoutError(f"no answer within {seconds:g} s") from None
    if not done:
        raise value
    return value


class InTurn:
    """Asks a function for one sample after the other."""

    def __init__(self, function: RewardFunction, timeout: float | None):
        self.function, self.timeout, self.extras = function, timeout, extras_of(function)

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        return [self._answer(sample) for sample in samples]

    def _answer(self, sample: Sample) -> Any:
        try:
            return call_within(self.timeout, lambda: call_one(self.function, sample, self.extras))
        except (Exception, SystemExit) as error:  # whatever a user's function does: exit() ends its call, not the run
            return Failure.of(error)


class AtOnce:
    """Asks a function for all samples in one call. An exception among its answers is that sample's failure."""

    def __init__(self, function: RewardFunction, timeout: float | None):
        self.function, self.timeout, self.extras = function, timeout, extras_of(function)

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        try:
            answers = self._ask(samples)
        except (Exception, SystemExit) as error:
            return [Failure.of(error, whole=True)] * len(samples)
        if not hasattr(answers, "__len__") or len(answers) != len(samples):
            got = count(len(answers), "score") if hasattr(answers, "__len__") else repr(answers)[:80]
            said = f"it returned {got} for {count(len(samples), 'sample')}: each needs one"
            return [Failure("length", said, whole=True)] * len(samples)
        return [Failure.of(answer) if isinstance(answer, Exception) else answer for answer in answers]

    def _ask(self, samples: Sequence[Sample]) -> Any:
        return call_within(self.timeout, lambda: call_many(self.function, samples, self.extras))


# Reward functions that are coroutines (`async def`): the calls of a batch wait together, on a loop of their own.

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
