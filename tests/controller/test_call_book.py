"""When a call is late: its time begins when it is its turn, for calls beside the queue as well."""

import pytest

from meshrl.controller import Deadlines
from meshrl.controller.calls import CallBook, DeadlineError, Future, WorkerError
from meshrl.controller.dispatch import Failure


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


@pytest.mark.parametrize("direct", [False, True])
def test_answers_to_younger_calls_do_not_put_off_a_stuck_one(clock, direct):
    book = CallBook("rollout", Deadlines(call=10), lambda: None, lambda ranks: "")
    stuck = Future()
    book.open("generate_sequences", [0], stuck, direct=direct)
    for _ in range(3):
        clock[0] += 4
        book.answer(book.open("generate_sequences", [1], Future(), direct=direct), 1, "done")
    book.tick()
    with pytest.raises(DeadlineError, match=r"after 12.0 s \(deadline: 10 s\)"):
        stuck.get(1)


def test_the_time_to_return_after_a_failure_begins_when_the_others_come_to_the_call(clock):
    book = CallBook("actor", Deadlines(call=60, release=5), lambda: None, lambda ranks: "")
    first, second = Future(), Future()
    numbers = [book.open(method, [0, 1], future) for method, future in (("long", first), ("failing", second))]
    book.answer(numbers[0], 1, "done")
    book.answer(numbers[1], 1, Failure("ValueError", "bad value", "", 0.0))
    clock[0] += 30  # rank 0 is still in the first call
    book.tick()
    assert book.broken is None
    book.answer(numbers[0], 0, "done")
    clock[0] += 4
    book.tick()
    assert first.get(1) == ["done", "done"]
    assert book.broken is None
    clock[0] += 2
    book.tick()
    with pytest.raises(WorkerError, match=r"ranks \[0\] had not returned 5 s later"):
        second.get(1)


def test_a_failure_does_not_wait_for_older_calls_on_other_ranks(clock):
    book = CallBook("actor", Deadlines(call=60, release=5), lambda: None, lambda ranks: "")
    failing = Future()
    book.open("long", [2], Future())
    book.answer(book.open("failing", [0, 1], failing), 1, Failure("ValueError", "bad value", "", 0.0))
    clock[0] += 6
    book.tick()
    with pytest.raises(WorkerError, match="bad value"):
        failing.get(1)
