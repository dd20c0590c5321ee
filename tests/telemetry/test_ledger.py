"""The ledger: every second has one name, whatever is nested, fails or runs in other threads."""

import threading

import pytest

from meshrl.telemetry import time_ledger as ledger_module
from meshrl.telemetry.time_ledger import (
    IDLE,
    Ledger,
    booked,
    current_ledger,
    seconds_by_name,
    served_method,
    working_for,
)


class Clock:
    """A clock that goes on by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return Ledger(clock=clock)


def sums(page):
    return seconds_by_name(page.segments())


def test_inner_blocks_take_from_outer_ones_and_nothing_is_lost(ledger, clock):
    clock.now += 1
    with ledger.serving("update_actor"):
        clock.now += 2
        with booked("update_forward"):
            clock.now += 4
            with booked("wait_peers"):
                clock.now += 8
            clock.now += 16
        clock.now += 32
    clock.now += 64
    page = ledger.take()
    assert sums(page) == {IDLE: 65, "other": 34, "update_forward": 20, "wait_peers": 8}
    assert page.until - page.begin == sum(sums(page).values()) == 127
    assert page.counts == {"seconds/update_actor": 62}


def test_pages_follow_each_other_without_a_gap_in_the_middle_of_a_block(ledger, clock):
    with ledger.serving("f", "sync"):
        clock.now += 3
        first = ledger.take()
        clock.now += 5
    second = ledger.take()
    assert sums(first) == {"sync": 3}
    assert sums(second) == {"sync": 5}
    assert first.until == second.begin
    assert sums(ledger.take()) == {}


def test_outside_of_a_ledger_nothing_happens(ledger, clock):
    with booked("sync"):
        assert current_ledger() is None
        clock.now += 1
    assert sums(ledger.take()) == {IDLE: 1}


def test_a_function_can_be_booked_and_call_itself(ledger, clock):
    @booked("generate")
    def count_down(n):
        clock.now += 1
        return count_down(n - 1) if n else "done"

    with ledger.serving("f"):
        assert count_down(2) == "done"
        clock.now += 1
    assert sums(ledger.take()) == {"generate": 3, "other": 1}


def test_what_an_error_leaves_open_is_closed_with_the_call(ledger, clock):
    def fail():
        with ledger.serving("f"):
            booked("sync").__enter__()  # as by a timer that is never stopped
            clock.now += 1
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    clock.now += 2
    assert sums(ledger.take()) == {"sync": 1, IDLE: 2}
    assert current_ledger() is None


def test_a_call_inside_of_a_call_of_another_ledger(ledger, clock):
    controller = Ledger(idle="other", clock=clock)
    with controller.serving("fit"), booked("wait_actor"):
        clock.now += 1
        with ledger.serving("update"), booked("sync"):
            clock.now += 2
            assert served_method() == "update"
        clock.now += 4
        assert served_method() == "fit"
    assert sums(controller.take()) == {"wait_actor": 7}
    assert sums(ledger.take()) == {IDLE: 5, "sync": 2}


def in_thread(ledger, name, opened, go_on):
    def run():
        with working_for(ledger, "generate_sequences", name):
            opened.release()
            go_on.acquire()

    thread = threading.Thread(target=run)
    thread.start()
    opened.acquire()
    return thread


def test_work_of_any_thread_counts_before_waiting_and_the_latest_before_older(ledger, clock):
    opened, end_first, end_second = threading.Semaphore(0), threading.Semaphore(0), threading.Semaphore(0)
    first = in_thread(ledger, "generate", opened, end_first)
    clock.now += 1
    second = in_thread(ledger, "wait_controller", opened, end_second)
    clock.now += 2
    with ledger.serving("receive_weights", "sync"):
        clock.now += 4
    clock.now += 8
    end_first.release()
    first.join()
    clock.now += 16
    end_second.release()
    second.join()
    page = ledger.take()
    assert sums(page) == {"generate": 11, "sync": 4, IDLE: 16}
    assert "seconds/generate_sequences" not in page.counts  # the call that started the threads has its own


def test_changes_that_nobody_asks_for_do_not_pile_up(ledger, clock, monkeypatch):
    monkeypatch.setattr(ledger_module, "MOST_CHANGES", 10)
    for _ in range(50):
        with ledger.serving("f"):
            clock.now += 1
        clock.now += 1
    page = ledger.take()
    assert len(page.changes) <= 11
    assert page.begin > 100  # a page that has lost something says so


def test_spans_are_kept_only_where_they_are_wanted(ledger, clock):
    with ledger.serving("f"):
        clock.now += 1
    ledger.traces = True
    with ledger.serving("g"):
        clock.now += 1
    spans = ledger.take().spans
    assert [(span.track, span.name, span.start, span.end) for span in spans] == [("calls", "g", 101, 102)]


def test_counts_add_up_and_peaks_stay(ledger):
    ledger.add("flops/f", 2.0)
    ledger.add("flops/f", 3.0)
    ledger.raise_to("memory/gen/max_rss_gib", 5.0)
    ledger.raise_to("memory/gen/max_rss_gib", 4.0)
    page = ledger.take()
    assert (page.counts, page.peaks) == ({"flops/f": 5.0}, {"memory/gen/max_rss_gib": 5.0})
    assert ledger.take().counts == {}


class Event:
    """Stands in for a CUDA event: happens at a time of the device, which runs behind the host."""

    def __init__(self, at, happened=True):
        self.at, self.happened = at, happened

    def query(self):
        return self.happened

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_an_update_is_shared_out_as_the_device_says(ledger, clock, monkeypatch):
    # The host is through with the forward at once; the device computes it while the host waits in the backward.
    times = iter([0.0, 3.0, 3.0, 9.0, 9.0, 10.0])
    monkeypatch.setattr(ledger_module, "_mark_device", lambda: Event(next(times)))
    with ledger.serving("update_actor"):
        with booked("update_forward"):
            clock.now += 0.5
        with booked("update_backward"):
            clock.now += 19
        with booked("update_optimizer"):
            clock.now += 0.5
        with booked("log_prob"):  # not marked
            clock.now += 7
    page = ledger.take()
    assert page.device == {"update_forward": 3.0, "update_backward": 6.0, "update_optimizer": 1.0}
    found = seconds_by_name(page.segments(), page.device)
    assert found == pytest.approx(
        {"update_forward": 6.0, "update_backward": 12.0, "update_optimizer": 2.0, "log_prob": 7.0}
    )


def test_events_that_have_not_happened_are_not_waited_for(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "_mark_device", lambda: Event(0.0, happened=False))
    with ledger.serving("update_actor"), booked("update_forward"):
        pass
    assert ledger.take().device == {}


def test_ranges_are_pushed_and_popped_in_pairs(ledger, monkeypatch):
    seen = []
    monkeypatch.setattr(ledger_module, "_push_range", seen.append)
    monkeypatch.setattr(ledger_module, "_pop_range", lambda: seen.append("."))
    with ledger.serving("f"), booked("sync"), booked("wait_peers"):
        pass
    assert seen == ["sync", "wait_peers", ".", "."]
