"""When a call is late: its time begins when it is its turn, for calls beside the queue as well."""

import pytest

from meshrl.controller import Deadlines
from meshrl.controller.calls import CallBook
from meshrl.controller.errors import DeadlineError
from meshrl.controller.futures import Future


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("meshrl.controller.calls.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("direct", [False, True])
def test_the_wait_behind_an_older_call_does_not_count(clock, direct):
    book = CallBook("rollout", Deadlines(call=10), lambda: None, lambda ranks: "")
    first, second = Future(), Future()
    numbers = [book.open("begin_sequences", [0], future, direct=direct) for future in (first, second)]
    clock[0] += 9
    book.tick()
    book.answer(numbers[0], 0, "done")
    clock[0] += 9  # 18 s since it was asked for, 9 s of its own
    book.tick()
    assert not second.done()
    clock[0] += 2
    book.tick()
    with pytest.raises(DeadlineError, match=r"after 11.0 s \(deadline: 10 s\)"):
        second.get(1)


def test_direct_calls_of_other_methods_do_not_wait_for_each_other(clock):
    book = CallBook("rollout", Deadlines(call=10), lambda: None, lambda ranks: "")
    begun, asked = Future(), Future()
    book.open("begin_sequences", [0], begun, direct=True)
    clock[0] += 1
    number = book.open("generate_sequences", [0], asked, direct=True)
    clock[0] += 8
    book.answer(number, 0, "done")
    clock[0] += 2  # the answer to the other method has not put this one off
    book.tick()
    with pytest.raises(DeadlineError):
        begun.get(1)
