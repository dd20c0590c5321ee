"""Reward functions that are coroutines: called together within a bound, timed and counted like any other."""

import asyncio
import threading
import time

import pytest
import torch
from reward_samples import ANSWERS

from meshrl.rewards.manager import RewardManager
from meshrl.rewards.results import RewardError

MANAGERS = ("naive", "dapo")


def manager(tokenizer, function, name="naive", **options):
    return RewardManager(function, tokenizer, name=name, **options)


def awaited(values, before=None):
    """A coroutine function that gives the i-th sample the i-th value (raising those that are exceptions)."""

    async def function(data_source, solution_str, ground_truth, extra_info):
        if before is not None:
            await before(extra_info["n"])
        value = values[extra_info["n"]]
        if isinstance(value, BaseException):
            raise value
        return value

    return function


@pytest.mark.parametrize("name", MANAGERS)
def test_the_calls_of_a_batch_meet(data, tokenizer, name):
    """Each waits until all four are there: one after the other they would wait for ever."""
    meeting = []

    async def all_here(n):
        meeting.append(n)
        while len(meeting) % 4:
            await asyncio.sleep(0.001)

    with manager(tokenizer, awaited([1.0, -2.0, {"score": 0.5, "acc": 1}, 3.0], all_here), name, timeout=60) as reward:
        scores, extra, metrics = reward(data)
        assert scores.sum(1).tolist() == [1.0, -2.0, 0.5, 3.0]
        assert extra["acc"].tolist() == [None, None, 1, None]
        assert metrics["reward/errors"] == 0.0
        assert sorted(meeting) == [0, 1, 2, 3]
        assert torch.equal(reward(data)[0], scores)


@pytest.mark.parametrize("most", [1, 2, 64])
def test_no_more_at_once_than_allowed(data, tokenizer, most):
    running, seen = 0, []

    async def count(n):
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.01)
        running -= 1

    with manager(tokenizer, awaited([0.0] * 4, count), max_concurrent_calls=most) as reward:
        reward(data)
    assert max(seen) == min(most, 4)


def test_what_is_kept_open_stays_usable_from_batch_to_batch(data, tokenizer):
    loops, threads = set(), set()

    async def note(n):
        loops.add(asyncio.get_running_loop())
        threads.add(threading.current_thread())

    with manager(tokenizer, awaited([0.0] * 4, note)) as reward:
        reward(data)
        reward(data)
    assert len(loops) == len(threads) == 1
    (thread,) = threads
    thread.join(10)
    assert not thread.is_alive()


def test_failures_are_those_of_their_samples(data, tokenizer):
    async def hang_one(n):
        if n == 2:
            await asyncio.sleep(60)

    values = [1.0, ValueError("no"), 0.0, float("nan")]
    with manager(tokenizer, awaited(values, hang_one), on_error="zero", timeout=0.3) as reward:
        scores, _, metrics = reward(data)
    assert scores.sum(1).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert metrics["reward/errors"] == 3.0
    assert [metrics[f"reward/errors/{kind}"] for kind in ("raised", "timeout", "nan")] == [1.0, 1.0, 1.0]
    with (
        manager(tokenizer, awaited(values), on_error="stop") as reward,
        pytest.raises(RewardError, match=r"sample 1 .*no"),
    ):
        reward(data)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), TimeoutError("its own")])
def test_whatever_one_raises_the_others_answer(data, tokenizer, error):
    with manager(tokenizer, awaited([error, 1.0, 2.0, 3.0]), on_error="zero") as reward:
        for _ in range(2):
            scores, _, metrics = reward(data)
            assert scores.sum(1).tolist() == [0.0, 1.0, 2.0, 3.0]
            assert metrics["reward/errors/raised"] == 1.0


def test_one_that_blocks_the_loop_is_given_up(data, tokenizer):
    async def block(n):
        if n == 0:
            await asyncio.sleep(0.05)  # those that need no time have answered
            time.sleep(30)

    with manager(tokenizer, awaited([1.0, 1.0, 1.0, 1.0], block), on_error="zero", timeout=0.5) as reward:
        scores, _, metrics = reward(data)
        assert scores.sum(1).tolist() == [0.0, 1.0, 1.0, 1.0]
        assert metrics["reward/errors/timeout"] == 1.0
        # The next batch has a loop of its own.
        assert reward.score(data.select_idxs([1, 2, 3]), again=True).token_level.sum(1).tolist() == [1.0, 1.0, 1.0]


def test_for_a_batch_in_one_call(data, tokenizer):
    async def function(solution_strs, **_):
        parts = await asyncio.gather(*(length(text) for text in solution_strs))
        return [*parts[:3], ValueError("none")]

    async def length(text):
        await asyncio.sleep(0)
        return float(len(text))

    with manager(tokenizer, function, "batch", on_error="zero", timeout=60) as reward:
        scores, _, metrics = reward(data)
    assert scores.sum(1).tolist() == [float(len(text)) for text in ANSWERS[:3]] + [0.0]
    assert metrics["reward/errors/raised"] == 1.0

    async def hangs(**_):
        await asyncio.sleep(60)

    before = set(threading.enumerate())
    with manager(tokenizer, hangs, "batch", on_error="zero", timeout=0.2) as reward:
        assert reward(data)[2]["reward/errors/timeout"] == 4.0
        assert reward(data)[2]["reward/errors/timeout"] == 4.0
    until = time.monotonic() + 10
    while any(thread.name == "reward-coroutines" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < until, "loops that were given up stay"
        time.sleep(0.01)


def test_processes_do_not_call_coroutines(tokenizer):
    with pytest.raises(ValueError, match="'reward' is a coroutine, which prime cannot call"):
        manager(tokenizer, awaited([]), "prime")
