"""The books of a step, collected from real workers on both backends, with clocks that are far apart."""

import gzip
import json
import time

import pytest
from ledger_workers import Sleeper

from meshrl.controller import ResourcePool, WorkerError
from meshrl.telemetry.time_ledger import Span, booked
from meshrl.telemetry.timeline import TimelineFile, read_timeline
from meshrl.trainer.time_accounting import Bookkeeper

AHEAD = 5000.0


def timed(work):
    """Runs a step: when it began and ended, on the controller's clock."""
    begin = time.perf_counter()
    work()
    return begin, time.perf_counter()


def test_every_second_of_all_processes_is_booked_under_its_name(make_group, tmp_path):
    groups = {
        "actor_rollout_ref": make_group(Sleeper, ahead=AHEAD, role="actor_rollout_ref"),
        "critic": make_group(Sleeper, ahead=-AHEAD, world_size=1, role="critic"),
    }
    books = Bookkeeper(groups, TimelineFile(tmp_path / "timeline.json.gz", steps=[2]))
    found = {}

    def step():
        groups["actor_rollout_ref"].work("generate", [0.0, 0.5])  # rank 1 is slow
        with booked("reward"):
            time.sleep(0.2)  # and so is the reward
        groups["critic"].work("value", [0.15])

    with books.watching(first_step=1):
        for number in (1, 2):
            window = timed(step)
            found[number] = books.close_step(number, *window)
            seconds = window[1] - window[0]
            for who in ("controller", *groups):
                assert found[number][f"ledger/{who}/booked"] == pytest.approx(1, abs=0.01)
                booked_seconds = [v for k, v in found[number].items() if k.startswith(f"ledger_s/{who}/")]
                assert sum(booked_seconds) == pytest.approx(seconds, rel=0.01)
    metrics, doubt = found[2], max(clock.uncertainty(time.perf_counter()) for clock in books.clocks.values())
    # A sleep may take longer on a busy machine, but never less; and what was measured is known up to the clocks' doubt.
    actor = {k.rsplit("/", 1)[1]: v for k, v in metrics.items() if k.startswith("ledger_s/actor_rollout_ref/")}
    assert actor["generate"] >= 0.25
    assert actor["wait_peers"] >= 0.1  # the mean over both ranks: rank 0 waits 0.5 s for rank 1
    assert actor["wait_reward"] >= 0.2 - doubt
    assert actor["wait_critic"] >= 0.14 - doubt
    assert metrics["ledger_s/critic/value"] >= 0.15
    assert metrics["ledger_s/critic/wait_actor_rollout_ref"] >= 0.3 - doubt
    assert metrics["ledger_s/controller/reward"] >= 0.2
    assert metrics["ledger_s/controller/wait_critic"] >= 0.1
    with gzip.open(tmp_path / "timeline.json.gz", "rt") as file:
        events = json.load(file)  # whole JSON, once the run has ended
    check_aligned([event for event in events if event.get("ph") == "X"], doubt * 1e6 + 1)


def check_aligned(events, doubt):
    """The calls of all ranks lie inside of the step and beside the controller's wait, with clocks hours apart."""
    assert {event["args"]["step"] for event in events} == {2}
    step = next(event for event in events if event["cat"] == "steps")
    for event in events:
        assert event["ts"] >= step["ts"] - doubt
        assert event["ts"] + event["dur"] <= step["ts"] + step["dur"] + doubt
    waits = {event["name"]: event for event in events if event["pid"] == 0 and event["name"].startswith("wait_")}
    calls = {event["pid"]: event for event in events if event["cat"] == "calls" and event["pid"] != 0}
    assert [call["name"] for call in calls.values()] == ["work"] * 3
    for pid, name in ((1, "actor_rollout_ref"), (2, "actor_rollout_ref"), (3, "critic")):
        wait = waits[f"wait_{name}"]
        assert calls[pid]["ts"] + calls[pid]["dur"] <= wait["ts"] + wait["dur"] + doubt
    # The slow rank's call and the wait for it are at the same time.
    slow, wait = calls[2], waits["wait_actor_rollout_ref"]
    both = min(slow["ts"] + slow["dur"], wait["ts"] + wait["dur"]) - max(slow["ts"], wait["ts"])
    assert both > 0.2e6


def test_a_group_that_is_gone_is_left_out_and_a_new_one_is_met(make_group):
    group = make_group(Sleeper, ahead=AHEAD, world_size=1, role="rollout")
    books = Bookkeeper({"rollout": group})
    with books.watching(first_step=1):
        with pytest.raises(WorkerError):
            group.fail()
        group.restart()
        window = timed(lambda: group.work("generate", [0.1]))
        metrics = books.close_step(1, *window)
        assert metrics["ledger_s/rollout/generate"] >= 0.1
        assert metrics["ledger/rollout/booked"] == pytest.approx(1, abs=0.01)
        group.shutdown()
        window = timed(lambda: time.sleep(0.01))
        metrics = books.close_step(2, *window)
        assert metrics["ledger/controller/booked"] == pytest.approx(1, abs=0.01)
        assert metrics.get("ledger/rollout/booked", 0.0) < 1


def test_a_worker_in_the_controllers_own_process_has_a_ledger_of_its_own():
    from meshrl.controller import ClassWithInitArgs, create_worker_group

    pool = ResourcePool([1], use_gpu=False)
    with create_worker_group(pool, ClassWithInitArgs(Sleeper), role="actor_rollout_ref") as group:
        books = Bookkeeper({"actor_rollout_ref": group})
        with books.watching(first_step=1):
            metrics = books.close_step(1, *timed(lambda: (group.work("sync", [0.05]), time.sleep(0.03))))
    assert metrics["ledger_s/controller/wait_actor_rollout_ref"] >= 0.05
    assert metrics["ledger_s/controller/other"] >= 0.03
    assert metrics["ledger_s/actor_rollout_ref/sync"] >= 0.05
    assert metrics["ledger_s/actor_rollout_ref/wait_controller"] >= 0.03
    assert metrics["ledger/actor_rollout_ref/booked"] == pytest.approx(1, abs=0.01)


def test_a_cut_off_timeline_can_be_read_and_gone_on_with(tmp_path):
    path = tmp_path / "timeline.json.gz"
    first = TimelineFile(path)
    for step in (1, 2, 3):
        first.write(step, step, step + 1.0, {("controller", 0): [(step, step + 0.5, "reward")]}, {}, {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-15])  # killed while it wrote
    cut = [event for event in read_timeline(path) if event["ph"] == "X"]
    assert {event["args"]["step"] for event in cut} >= {1, 2}
    again = TimelineFile(path, last_step=2)
    again.write(3, 3.0, 4.0, {("controller", 0): [(3.0, 4.0, "other")]}, {}, {})
    again.close()
    with gzip.open(path, "rt") as file:
        names = [(e["args"]["step"], e["name"]) for e in json.load(file) if e.get("cat") == "ledger"]
    assert names == [(1, "reward"), (2, "reward"), (3, "other")]


def test_a_timeline_that_goes_on_keeps_its_tracks_apart(tmp_path):
    """Also where the first step after the stop has its tracks in another order, or a rank that is new."""
    path, rank, new = tmp_path / "timeline.json.gz", ("actor", 0), ("critic", 1)
    controller = {("controller", 0): [(0.0, 1.0, "other")]}
    calls, micro = Span("calls", "f", 0.0, 0.5), Span("micro", "forward 0", 0.0, 0.5)
    at_once = Span("calls", "g", 0.1, 0.4)
    first = TimelineFile(path)
    first.write(1, 0.0, 1.0, controller | {rank: [(0.0, 1.0, "sync")]}, {rank: [calls, at_once, micro]}, {})
    again = TimelineFile(path, last_step=1)
    later = controller | {new: [(0.0, 1.0, "sync")], rank: [(0.0, 1.0, "sync")]}
    again.write(2, 0.0, 1.0, later, {rank: [micro, calls, at_once]}, {})
    again.close()
    events = read_timeline(path)
    processes = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    tracks = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert sorted(processes) == [(0, "controller"), (1, "actor rank 0"), (2, "critic rank 1")]
    assert len({tid for _, tid, _ in tracks}) == len(tracks) == 7
    assert {(e["pid"], e["tid"], e["cat"]) for e in events if e["ph"] == "X"} == set(tracks)
