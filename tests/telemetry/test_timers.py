import time

import pytest

from meshrl.telemetry.time_ledger import PhaseTimer


class Clock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_other_sum_to_the_step():
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 1
    with timer.phase("gen"):
        clock.now += 4
    with timer.phase("reward"):
        clock.now += 2
    clock.now += 0.5
    with timer.phase("gen"):
        clock.now += 3
    metrics = timer.metrics()
    assert metrics == {
        "timing_s/gen": 7.0,
        "timing_s/reward": 2.0,
        "timing_s/other": 1.5,
        "timing_s/step": 10.5,
    }


def test_an_inner_phase_takes_its_seconds_from_the_outer_one():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("update_actor"):
        clock.now += 1
        with timer.phase("sync"):
            clock.now += 5
        clock.now += 2
    metrics = timer.metrics()
    assert metrics["timing_s/update_actor"] == 3
    assert metrics["timing_s/sync"] == 5
    assert metrics["timing_s/step"] == 8


def test_a_phase_that_raises_is_charged_and_closed():
    clock = Clock()
    timer = PhaseTimer(clock)

    def generate():
        with timer.phase("gen"):
            clock.now += 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        generate()
    clock.now += 1
    assert timer.metrics() == {"timing_s/gen": 2.0, "timing_s/other": 1.0, "timing_s/step": 3.0}


def test_reset_starts_the_next_step_and_metrics_may_be_read_inside_a_phase():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("gen"):
        clock.now += 2
        assert timer.metrics()["timing_s/gen"] == 2
        timer.reset()
        clock.now += 3
    assert timer.metrics() == {"timing_s/gen": 3.0, "timing_s/other": 0.0, "timing_s/step": 3.0}


def test_the_listener_hears_the_current_phase():
    heard: list[str] = []
    timer = PhaseTimer(Clock(), on_change=heard.append)
    with timer.phase("gen"), timer.phase("sync"):
        pass
    assert heard == ["gen", "sync", "gen", ""]


@pytest.mark.parametrize("name", ["step", "other"])
def test_names_of_the_timer_itself_are_refused(name):
    with pytest.raises(ValueError, match=name), PhaseTimer().phase(name):
        pass


def test_the_real_clock_measures_seconds():
    timer = PhaseTimer()
    before = time.monotonic()
    with timer.phase("gen"):
        time.sleep(0.03)
    metrics = timer.metrics()
    assert 0.03 <= metrics["timing_s/gen"] <= metrics["timing_s/step"] <= time.monotonic() - before + 0.01
