"""Gaps between tokens: idle time does not count, steps without tokens do."""

import threading

import pytest

from meshrl.rollout import in_process_rollout
from meshrl.rollout.in_process_rollout import SteppingRollout, TokenGaps
from meshrl.rollout.requests import Chunk, Request, SamplingParams


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for `clock.append(seconds)`."""
    ticks = [100.0]

    class Time:
        @staticmethod
        def perf_counter():
            return sum(ticks)

        @staticmethod
        def sleep(seconds):
            ticks.append(seconds)

    monkeypatch.setattr(in_process_rollout, "time", Time)
    return ticks


def test_the_largest_gap_with_work_counts(clock):
    gaps = TokenGaps()
    for wait, count, goes_on in (
        (1, 4, True),
        (2, 8, True),
        (3, 8, True),
        (1, 9, False),
        (50, 10, True),
        (0.5, 11, False),
    ):
        clock.append(wait)
        gaps.note(count, goes_on=goes_on)
    # Three seconds of a step without tokens and one more; the fifty were without work.
    assert gaps.longest() == pytest.approx(4)
    gaps.restart()
    clock.append(9)
    assert gaps.longest() == 0


def test_an_open_gap_counts_as_far_as_it_goes(clock):
    gaps = TokenGaps()
    gaps.note(1, goes_on=True)
    clock.append(7)
    assert gaps.longest() == pytest.approx(7)
    gaps.restart()
    clock.append(3)
    assert gaps.longest() == pytest.approx(3)
    assert gaps.settle(2.0) == pytest.approx(5, abs=0.01)  # no token comes
    gaps.note(2, goes_on=True)
    assert gaps.longest() == pytest.approx(5, abs=0.01)


def test_settle_waits_for_the_token():
    gaps = TokenGaps()
    gaps.note(1, goes_on=True)
    timer = threading.Timer(0.05, lambda: gaps.note(2, goes_on=False))
    timer.start()
    found = gaps.settle(20.0)
    timer.join()
    assert 0.04 < found < 15
    assert gaps.settle(20.0) == found


class Ahead(SteppingRollout):
    """Has always launched one step more than anybody has asked for."""

    release = update_weights = stats = None  # not asked for here

    def add(self, request):
        self.name = request.request_id

    def has_work(self):
        return True

    def step(self):
        return [Chunk(self.name, 0, [1], [0.0], [0], finish_reason="length")]

    def drop(self, request_ids):
        return [Chunk(name, 0, [], [], [], finish_reason="abort") for name in request_ids]


def test_an_engine_that_nobody_waits_for_has_no_open_gap(monkeypatch):
    """Neither after the last answer nor after the last request was taken back: there is no token to wait for."""
    waits = []
    monkeypatch.setattr(in_process_rollout.time, "sleep", waits.append)
    rollout = Ahead()
    rollout.complete([Request("a", [1], SamplingParams(1))])
    assert rollout.longest_gap() == 0.0
    rollout._enter([Request("b", [1], SamplingParams(1, n=2))], lambda chunk: None)
    rollout._advance()
    assert rollout.gaps.longest() > 0.0
    rollout.abort()
    assert rollout.longest_gap() == rollout.gaps._longest
    assert not waits
