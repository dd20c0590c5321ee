"""The pool of processes: order, time limits, and workers that hang or die and are replaced."""

import os
import signal
import struct
import subprocess
import time
from multiprocessing import Pipe
from pathlib import Path

import pool_functions
import pytest

from meshrl.data.batch import object_array
from meshrl.rewards.manager import RewardManager, ScoredParts
from meshrl.rewards.process_pool import WorkerPool, _Task, _Worker
from meshrl.rewards.results import RewardError
from meshrl.rewards.reward_calls import RewardFunctionSpec

SPECS = [RewardFunctionSpec("act", path=pool_functions.__file__)]


def manager(tokenizer, **options):
    options = {"on_error": "zero", "num_processes": 2, "timeout": 60.0} | options
    return RewardManager(options.pop("specs", SPECS), tokenizer, name="prime", **options)


def with_infos(data, *todo, **more):
    data.non_tensor_batch["extra_info"] = object_array([{"n": n, "do": t, **more} for n, t in enumerate(todo)])
    return data


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_answers_come_in_the_order_of_the_samples(data, tokenizer):
    specs = [*SPECS, RewardFunctionSpec("twice", 0.5, path=pool_functions.__file__)]
    with manager(tokenizer, specs=specs) as made:
        scores, extra, metrics = made(with_infos(data, "slow", "slow", "score", "slow"))
        workers = set(extra["act/process"].tolist())
        assert os.getpid() not in workers
        assert len(workers) <= 2
        assert scores.tolist() == [[1, 1, 0, 0], [2, 0, 0, 0], [1, 1, 1, 3], [3, 0, 0, 0]]
        assert metrics["reward/errors"] == 0
        parts = ScoredParts(made)
        for row in (2, 0, 3, 1):
            parts.add(data[[row]], [row])
        assert parts.collect(timeout=60).token_level.equal(scores)
    assert all(gone(worker) for worker in workers)


def test_two_samples_run_at_the_same_time(data, tokenizer, tmp_path):
    """Two of them wait for each other: one after the other they would never meet."""
    with manager(tokenizer) as made:
        _, extra, metrics = made(with_infos(data, "score", "meet", "meet", "score", folder=str(tmp_path)))
        assert metrics["reward/errors"] == 0
        assert extra["process"][1] != extra["process"][2]


def test_a_process_killed_from_outside_costs_nothing(data, tokenizer, tmp_path):
    """The sample that it worked on is asked again."""
    with manager(tokenizer, num_processes=2) as made:
        scores, _, metrics = made(with_infos(data, "score", "die_once", "score", "score", file=str(tmp_path / "died")))
        assert (tmp_path / "died").exists()
        assert scores.sum(1).tolist() == [0, 1, 2, 3]
        assert metrics["reward/errors"] == 0
        assert made._pool.replaced == 1


def test_bad_samples_cost_only_themselves(data, tokenizer, tmp_path):
    """One worker, so that every sample after a bad one needs a new worker."""
    with manager(tokenizer, num_processes=1, timeout=3.0) as made:
        scores, _, metrics = made(with_infos(data, "child", "die", "raise", "score", file=str(tmp_path / "child")))
        assert scores.sum(1).tolist() == [0, 0, 0, 3]
        assert metrics["reward/errors"] == 3
        assert [metrics[f"reward/errors/{kind}"] for kind in ("timeout", "died", "raised")] == [1, 1, 1]
        # One that is killed gets a second try, in another process.
        assert made._pool.replaced == 3
        assert gone(int((tmp_path / "child").read_text()))
        _, extra, metrics = made(with_infos(data, "exit", "unsendable", "score", "score"))
        assert [metrics[f"reward/errors/{kind}"] for kind in ("died", "raised")] == [1, 1]
        assert extra["process"][2] == extra["process"][3]
        _, extra, metrics = made(with_infos(data, "score", "leave", "score", "score"))
        assert metrics["reward/errors/raised"] == 1
        assert extra["process"][0] == extra["process"][3]


def test_the_policy_is_to_stop_where_it_is(data, tokenizer):
    with manager(tokenizer, on_error="stop") as made:
        with pytest.raises(RewardError, match=r"sample 1 \(u1, answer '3'\): its process ended with exit code -9"):
            made(with_infos(data, "score", "die", "score", "score"))
        assert made(with_infos(data, "score", "score", "score", "score"))[0].sum(1).tolist() == [0, 1, 2, 3]


def test_functions_that_cannot_be_loaded_there_are_an_error_at_once(data, tokenizer):
    pool = WorkerPool([RewardFunctionSpec("gone", path="no_such_module")], 2, 5.0)
    with pytest.raises(RewardError, match=r"cannot load the reward functions.*no_such_module"):
        pool.submit(0, {}).result(timeout=60)
    pool.close()
    with pytest.raises(RewardError):
        pool.submit(0, {})
    local = [RewardFunctionSpec("lambda", function=lambda **_: 1.0)]
    with manager(tokenizer, specs=local) as made, pytest.raises(RewardError, match=r"[Pp]ickle"):
        made(with_infos(data, "score", "score", "score", "score"))


@pytest.mark.parametrize("times", [2, 3])
def test_processes_killed_as_they_start_are_started_again(monkeypatch, times):
    """Before they are told what to do; the third one in a row is one too many."""
    killed, start = [], subprocess.Popen

    def start_and_kill(*args, **kwargs):
        process = start(*args, **kwargs)
        if len(killed) < times:
            process.kill()
            process.wait(30)
            killed.append(process.pid)
        return process

    monkeypatch.setattr("meshrl.rewards.process_pool.subprocess.Popen", start_and_kill)
    pool = WorkerPool(SPECS, 1, timeout=60.0)
    try:
        answer = pool.submit(0, {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {"n": 3}})
        if times == 2:
            assert answer.result(60)["score"] == 3
        else:
            with pytest.raises(RewardError, match="end as they start, before they are told what to do"):
                answer.result(60)
    finally:
        pool.close()


def test_a_process_that_does_not_read_is_named_and_replaced():
    """Its sample is larger than what the system keeps for a process that does not read."""
    sample = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {"n": 3}}
    pool = WorkerPool(SPECS, 1, timeout=2.0)
    try:
        assert pool.submit(0, sample).result(60)["score"] == 3
        assert pool.waits() == []
        os.kill(pool._workers[0].process.pid, signal.SIGSTOP)
        large = pool.submit(0, sample | {"solution_str": "x" * 5_000_000})
        small = pool.submit(0, sample | {"extra_info": {"n": 4}})
        deadline = time.monotonic() + 30
        while not (lines := pool.waits()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "does not read its sample, its queue is full" in lines[0]
        assert lines[1] == "1 sample in line for one of 1 reward process"
        assert (large.result(60)["score"], small.result(60)["score"]) == (3, 4)
        assert pool.replaced == 1
    finally:
        pool.close()


def test_a_pool_needs_processes_and_time():
    with pytest.raises(ValueError, match="at least 1 process"):
        WorkerPool(SPECS, 0, 1.0)
    with pytest.raises(ValueError, match="timeout above 0"):
        WorkerPool(SPECS, 1, 0.0)


def test_a_process_that_stops_in_the_middle_of_its_answer_is_not_waited_for():
    pool = WorkerPool([], 1, 0.3)
    worker = object.__new__(_Worker)
    worker.connection, theirs = Pipe()
    worker.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    worker.ready, worker.task = True, None
    pool._workers.append(worker)
    task = _Task(0, {})
    worker.give(task, 0.3)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the first of a thousand bytes")
    began = time.monotonic()
    pool._hear(worker)
    assert time.monotonic() - began < 5
    assert task.future.result(0).kind == "timeout"
    assert worker.process.poll() is not None
    assert not pool._workers
