"""Loading and calling of reward functions: for single samples, for batches, with time limits and as coroutines.

This module avoids heavy imports, because every process of a pool loads it.

* `RewardFunctionSpec`: a reward function as the config names it. `Failure`: a failed call.
* `call_one`, `call_many`, `call_within`: single calls of a function.
* `InTurn`, `AtOnce`: callers of ordinary functions, for one sample after the other or for all samples in one call.
* `Together`, `AtOnceAwaited`: the same for coroutine functions, on the event loop of a `LoopThread`.
"""

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

# An exception, a timeout, a dead process, a score that is not finite, a wrong number of scores, no score at all.
KINDS = ("raised", "timeout", "died", "nan", "length", "invalid")


@dataclass(frozen=True)
class Failure:
    """The failure of a call, in place of a result. `kind` is one of `KINDS`, `whole` marks a call for many samples."""

    kind: str
    text: str
    error: Exception | SystemExit | None = None
    whole: bool = False
    frames: tuple[str, ...] = ()  # the frames of the traceback in the user's code

    @staticmethod
    def of(error: Exception | SystemExit, whole: bool = False) -> Failure:
        """Build the failure of a call that raised `error`."""
        kind = "timeout" if isinstance(error, CallTimeoutError) else "raised"
        return Failure(kind, f"{type(error).__name__}: {error}", error, whole, tuple(own_frames(error)))


class CallTimeoutError(Exception):
    """The error of a reward function that exceeded its time limit."""


@dataclass(frozen=True)
class RewardFunctionSpec:
    """A reward function as the config names it: built-in, in a file or module at `path`, or given as `function`."""

    label: str
    weight: float = 1.0
    name: str | None = None  # the name of the function; None means the label
    path: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: RewardFunction | None = None

    @property
    def is_built_in(self) -> bool:
        """True for a built-in function, including a judge that asks a model of its own instead of a URL."""
        return self.path is None and (self.name or self.label) in BUILT_IN

    @property
    def scores_nothing(self) -> bool:
        """True for the built-in function `nothing`, which stands for the absence of a reward function."""
        return self.is_built_in and BUILT_IN[self.name or self.label] is nothing

    def load(self) -> RewardFunction:
        """Load the function and bind its keyword arguments. Raise `ValueError` if it is missing or cannot be called."""
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
    """Raise `ValueError` if a function does not accept the keyword arguments, or requires more arguments."""
    if problem := argument_problem(function, kwargs, label):
        raise ValueError(problem)


def extras_of(function: RewardFunction) -> list[str]:
    """Return the parameters of `ON_DEMAND` that the function's signature has, in singular or plural form."""
    try:
        named = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
    return [name for name, plural in ON_DEMAND.items() if {name, plural} & named]


def call_one(function: RewardFunction, sample: Sample, extras: Sequence[str]) -> Any:
    """Call the function for one sample, with the columns that all functions get and those in `extras`."""
    return function(**{name: sample[name] for name in (*PLURALS, *extras)})


def call_many(function: RewardFunction, samples: Sequence[Sample], extras: Sequence[str]) -> Any:
    """Call the function once for all samples, with a list for each column, under the column's plural name."""
    names = {name: plural for name, plural in (PLURALS | ON_DEMAND).items() if name in PLURALS or name in extras}
    return function(**{plural: [sample[name] for sample in samples] for name, plural in names.items()})


def call_within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """Run a call, and raise `CallTimeoutError` if it takes longer than `seconds`.

    The call then continues in its daemon thread, because Python cannot end a thread from outside. With `seconds` None,
    the call runs in the current thread without a limit.
    """
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
    """A caller that runs a function for one sample after the other, with a time limit for each call."""

    def __init__(self, function: RewardFunction, timeout: float | None):
        self.function, self.timeout, self.extras = function, timeout, extras_of(function)

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        return [self._answer(sample) for sample in samples]

    def _answer(self, sample: Sample) -> Any:
        try:
            return call_within(self.timeout, lambda: call_one(self.function, sample, self.extras))
        except (Exception, SystemExit) as error:  # from the user's code; exit() ends its call, not the run
            return Failure.of(error)


class AtOnce:
    """A caller that runs a function once for all samples. An exception in the returned list is one sample's failure."""

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


# Reward functions that are coroutines (`async def`): the calls of a batch run concurrently on a separate event loop.

_WAITING = object()


class LoopThread:
    """An event loop in a thread. All batches share the loop, so that connections of functions stay usable."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
        """Run the coroutine, and return its result or raise its error. After `seconds`, raise `CallTimeoutError`.

        After a timeout, the coroutine is cancelled and the loop abandoned. The loop's thread ends when all its tasks
        have reacted to their cancellation. The next call starts a new loop.
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
        """Cancel all tasks of the loop. The thread ends when all tasks have reacted to their cancellation."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(), self._loop)
            self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _end() -> None:
    """Cancel all other tasks of the loop, wait for their end, and stop the loop."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()


async def _caught(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Await the coroutine, and return (True, result) or (False, error).

    Errors are returned, because a SystemExit that leaves a task would end the loop without a report.
    """
    try:
        return True, await coroutine
    except (Exception, SystemExit) as error:
        return False, error
    except BaseException as error:  # for example CancelledError, if an inner task was cancelled
        return False, RuntimeError(f"it ended with {type(error).__name__}")


class Together:
    """A caller that runs a coroutine function for each sample, with at most `at_once` concurrent calls."""

    def __init__(self, function: RewardFunction, timeout: float | None, at_once: int):
        self.function, self.timeout, self.at_once = function, timeout, at_once
        self.extras, self.loop = extras_of(function), LoopThread()

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        answers: list[Any] = [_WAITING] * len(samples)
        # A coroutine that blocks the loop also delays the timeouts of all others. The bound for the whole batch is
        # therefore the time of all rounds of `at_once` calls, plus one round.
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
        """End the thread of the event loop when all its tasks are cancelled."""
        self.loop.close()


class AtOnceAwaited(AtOnce):
    """A caller that awaits a coroutine function once for all samples."""

    def __init__(self, function: RewardFunction, timeout: float | None):
        super().__init__(function, timeout)
        self.loop = LoopThread()

    def _ask(self, samples: Sequence[Sample]) -> Any:
        return self.loop.run(call_many(self.function, samples, self.extras), self.timeout)

    def close(self) -> None:
        """End the thread of the event loop when all its tasks are cancelled."""
        self.loop.close()
