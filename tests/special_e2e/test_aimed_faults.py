"""Faults aimed at moments: a seeded few of those in `benchmarks/faults.py`, which compares weights and processes.

Its attempts are forked from one process that has imported everything.
"""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 3


@pytest.fixture(scope="module")
def faults():
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["faults"]


@pytest.fixture(scope="module")
def bench(faults, task, tmp_path_factory):
    with faults.memory_cgroup() as cgroup:
        made = faults.Bench(tmp_path_factory.mktemp("faults"), task.model, task.files, cgroup)
        yield made
        made.server.close()


def few(rng, moments, words):
    """For each word one of the first few moments with it, in their order."""
    found = {rng.choice([aim for aim in moments if word in aim.event][:3]) for word in words}
    return sorted(found, key=moments.index)


WRITTEN = ("memory_copies", "config.yaml", "open-w memory", "rename memory", "tensors-#", "manifest", "out/model")


def test_kills_and_full_disks_at_files(faults, bench):
    """While config, copies, checkpoints and the model are written: seven moments of a run."""
    kind, rng = faults.KINDS["files"], random.Random(SEED)
    moments = faults.all_aims(bench, kind, rng)
    assert {aim.action for aim in moments} == {"kill", "full disk"}
    assert len({aim.event for aim in moments}) > 60
    attempts, missed = bench.chain(kind, "files-ci", few(rng, moments, WRITTEN))
    assert len(missed) <= 2  # what an attempt before has gone past
    assert {attempt.code for attempt in attempts} >= {-9, 0, 1}


@pytest.mark.parametrize(("source", "read"), [("resume-disk", "out/checkpoints"), ("resume-memory", "memory/")])
def test_kills_and_full_disks_while_a_run_goes_on(faults, bench, source, read):
    """From a checkpoint, and from a copy in memory: four moments each, all met, for nothing is lost in between."""
    kind, rng = faults.KINDS[source], random.Random(SEED)
    moments = faults.all_aims(bench, kind, rng)
    words = (f"open-r {read}", "metrics.jsonl", "trainer.json", "tensors-#")
    attempts, missed = bench.chain(kind, f"{source}-ci", few(rng, moments, words))
    assert missed == []
    # A disk that is full is no loss of a machine: the copies go with the attempt, and the checkpoint is what is left.
    ended_in_order = any(attempt.code == 1 for attempt in attempts)
    assert f"goes on after step {2 if ended_in_order else kind.opener - 1}" in attempts[-1].said


def test_kills_in_a_weight_sync_and_of_every_role(faults, bench):
    """Each end of a sync at a seeded part of it; the kernel's out-of-memory kill of each role; no memory left."""
    kind, sync, rng = faults.KINDS["roles"], faults.KINDS["sync"], random.Random(SEED)
    parts = [
        (who, event, number)
        for who, event, number in bench.events(kind)
        if event in ("send", "receive", "end of sync") and who.partition(":")[0] in sync.whom
    ]
    assert max(number for _, event, number in parts if event == "receive") >= 4  # so many buckets and words
    of = {role: [part for part in parts if part[0].startswith(role)] for role in sync.whom}
    aims = [faults.Aim(*rng.choice(of[role])) for role in (*sync.whom, *sync.whom)]
    aims += faults.all_aims(bench, kind, rng)[: len(faults.AT_WORK)]  # the last one is the controller
    aims.append(faults.Aim("actor_rollout_ref", "call update_actor", 1, "no memory"))
    attempts, missed = bench.chain(kind, "roles-ci", aims)
    assert missed == []
    # A worker that can still tell of it ends the run; one that aborts is replaced.
    codes = [attempt.code for attempt in attempts]
    assert codes in ([-9, 1, 0], [-9, 0])
    said = attempts[1].said
    assert "rank 0 of 'actor_rollout_ref'" in said or "rank 1 of 'actor_rollout_ref'" in said
    assert ("memory ran out in the worker that is named above" in said) == (len(codes) == 3)


def test_without_restarts_the_end_says_who_and_what_to_do(faults, bench):
    kind = faults.KINDS["roles"]
    alone = faults.Kind(kind.name, kind.overrides, kind.whom, kind.events, restarts=0)
    found = bench.attempt(alone, bench.folder / "alone", [faults.Aim("critic", "call update_critic")])
    assert found.code == 75
    said = found.said.partition("the run failed: ")[2]
    assert "rank 0 of 'critic'" in said
    assert "while it ran update_critic: ended by signal 9 (SIGKILL)" in said
    assert "the machine had no memory left (dmesg, and Out of memory in docs/troubleshooting.md)" in said
    assert "Traceback" not in found.said


def test_what_is_compared_can_differ(faults, bench):
    """The control: a run that was disturbed is told from one with another seed, and from one that left something."""
    kind = faults.KINDS["files"]
    bench.events(kind)
    other = faults.Kind(kind.name, (*kind.overrides, "trainer.seed=7"), kind.whom, kind.events)
    out = bench.folder / "other"
    assert bench.attempt(other, out, []).code == 0
    (out / "left.json.part").write_text("")
    problems = bench.problems(kind, out)
    assert any(problem.startswith("weight ") for problem in problems)
    assert problems[-1] == f"{out / 'left.json.part'} is left"


def test_a_killed_supervisor(faults, bench):
    """SIGKILL of the supervising command: its run ends with it, saved, and the same command goes on from there."""
    kind, out = faults.KINDS["files"], bench.folder / "supervised"
    bench.events(kind)
    mark, log = f"{os.getpid()}-supervised", bench.folder / "supervised.txt"
    train, *words = bench.words(kind, out)
    more = ("trainer.max_restarts=3", "trainer.save_freq=1")
    command = [sys.executable, "-m", "meshrl.cli", train, "--supervise", *words, *more]
    environment = {**os.environ, faults.MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        parent = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    until = time.monotonic() + 120
    while not list((out / "checkpoints").glob("global_step_1")):
        assert time.monotonic() < until, log.read_text()
        assert parent.poll() is None, log.read_text()
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    assert faults.wait_until_gone(mark) == []
    said = log.read_text()
    assert "the command that supervised this run has ended: the run ends with it" in said
    assert "stopped by SIGTERM after step" in said
    assert "the same command goes on from there" in said
    resumed = faults.Kind(kind.name, (*kind.overrides, *more), kind.whom, kind.events)
    found = bench.attempt(resumed, out, [])
    assert found.code == 0
    assert "goes on after step" in found.said
    assert bench.problems(kind, out) == []
