"""Workers that raise, hang or die, on both backends."""

import os
import signal
import threading
import time

import pytest
from controller_workers import Probe, has_ended

from meshrl.controller import DeadlineError, Deadlines, GroupBrokenError, WorkerDied, WorkerError


def pids_of(group):
    return [told["pid"] for told in group.about()]


def test_an_error_on_one_rank_releases_those_that_wait_for_it(make_group):
    group = make_group(Probe, deadlines=Deadlines(start=240, call=60, release=1))
    group.all_reduce()
    pids = pids_of(group)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="bad sample 17") as caught:
        group.fail_before_collective(1)
    assert time.monotonic() - began < 10
    assert caught.value.rank == 1
    assert "ranks [0] had not returned 1 s later; the group was ended" in str(caught.value)
    with pytest.raises(GroupBrokenError, match="can no longer be called: fail_before_collective failed on rank 1"):
        group.about()
    assert not group.is_alive()
    assert all(has_ended(pid) for pid in pids)


def test_a_killed_worker_is_reported_at_once(make_group):
    group = make_group(Probe)
    pids = pids_of(group)
    running, queued = group.sleep_later(60), group.sleep_later(1)
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        running.get(20)
    assert time.monotonic() - began < 10
    error = caught.value
    assert (error.rank, error.role, error.method, error.pid) == (1, "actor", "sleep_later", pids[1])
    assert "while it ran sleep_later" in str(error)
    with pytest.raises(GroupBrokenError, match="sleep_later on 'actor' was lost: rank 1"):
        queued.get(5)
    with pytest.raises(GroupBrokenError, match="rank 1 of 'actor'"):
        group.about()
    assert all(has_ended(pid) for pid in pids)


def test_a_worker_killed_between_calls_is_noticed(make_group):
    group = make_group(Probe, world_size=1)
    assert group.is_alive()
    os.kill(pids_of(group)[0], signal.SIGKILL)
    until = time.monotonic() + 10
    while group.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(GroupBrokenError, match=r"rank 0 of 'actor' .* died between calls"):
        group.about()


def test_the_deadline_of_a_call_names_the_silent_ranks_and_their_stacks(make_group):
    group = make_group(Probe, deadlines=Deadlines(start=240, call=1.5))
    pids = pids_of(group)
    first, second = group.sleep_later(1.0), group.sleep_later(1.0)  # queued: each has its own 1.5 s
    second.get(20)
    assert first.done()
    began = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        group.sleep(60, ranks=[0])
    assert 1.4 < time.monotonic() - began < 10
    error = caught.value
    assert (error.method, error.answered, error.silent) == ("sleep", [1], [0])
    assert error.waited >= 1.5
    assert isinstance(error, TimeoutError)
    assert "ranks that have answered: [1], ranks that have not: [0]" in str(error)
    assert "controller_workers.py" in str(error)
    with pytest.raises(GroupBrokenError, match="can no longer be called: sleep on 'actor' has not finished"):
        group.about()
    assert all(has_ended(pid) for pid in pids)
