"""The deadline after SIGTERM, also beside code that handles errors and alarms of its own."""

import os
import signal
import time

import pytest

from meshrl.trainer.run_state import RunStoppedError, StopRequest


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_only_asks():
    stop = StopRequest(60.0)
    before = signal.getsignal(signal.SIGTERM)
    with stop.listening():
        ask()
        ask()
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_deadline_is_no_error_of_what_it_interrupts():
    def careless() -> None:
        try:
            time.sleep(30)
        except Exception as error:  # as those who call reward functions do
            raise AssertionError("it was taken for an error of the function") from error

    started = time.monotonic()
    with StopRequest(0.2).listening():
        ask()
        with pytest.raises(RunStoppedError, match=r"deadlines\.stop \(0\.2 s\)"):
            careless()
    assert time.monotonic() - started < 20


def test_an_alarm_of_a_reward_function_does_not_cancel_it():
    with StopRequest(0.3).listening():
        ask()
        signal.alarm(5)
        signal.alarm(0)
        with pytest.raises(RunStoppedError):
            time.sleep(30)


def test_nothing_comes_after_the_end():
    with StopRequest(0.2).listening():
        ask()
    time.sleep(0.5)
