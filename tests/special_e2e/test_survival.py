"""Runs whose processes are killed end as if they had not been."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_resume import RUN, TWO, assert_equal, data  # noqa: F401

from meshrl.controller import WorkerDied
from meshrl.trainer.rl_trainer import PPOTrainer

SURVIVES = ("trainer.max_restarts=3", "trainer.restart_wait=0", "trainer.save_freq=2", TWO)


@pytest.fixture
def kill_during(monkeypatch):
    """Kills rank 1 of a role as soon as a method of the trainer is entered at a step, once."""

    def arrange(method, step, role="actor"):
        original, killed = getattr(PPOTrainer, method), []

        def kill_and_go_on(self, *args):
            if self.step == step and not killed:
                killed.append(getattr(self, role)._backend._ranks[-1].pid)
                os.kill(killed[0], signal.SIGKILL)
            return original(self, *args)

        monkeypatch.setattr(PPOTrainer, method, kill_and_go_on)
        return killed

    return arrange


@pytest.fixture(scope="module")
def unkilled(task, data, tmp_path_factory):  # noqa: F811
    return task.train(tmp_path_factory.mktemp("unkilled") / "run", *RUN, *data, TWO)


def assert_survived(run, unkilled, restarts):
    """Weights and metrics to the bit, every step once; what restarts have cost is in the metrics."""
    assert [row["step"] for row in run.metrics] == list(range(6))
    assert [row["restarts/count"] for row in run.metrics][-1] == restarts
    for row in run.metrics:
        row.pop("restarts/count"), row.pop("restarts/seconds_lost")
    assert_equal(unkilled, run)
    assert not list(run.path.glob("previous-*"))


def test_a_killed_trainer_rank_costs_nothing_but_time(task, data, unkilled, kill_during, tmp_path):  # noqa: F811
    """In the update of step 4, after the checkpoint of step 2."""
    killed = kill_during("update_actor", 4)
    assert_survived(task.train(tmp_path / "run", *RUN, *data, *SURVIVES), unkilled, 1)
    assert killed


def test_a_copy_in_memory_is_gone_on_from(task, data, unkilled, kill_during, tmp_path):  # noqa: F811
    """Copies after every step, no checkpoints but that of step 2: of step 4 no other step is taken again."""
    killed = kill_during("update_actor", 4)
    run = task.train(tmp_path / "run", *RUN, *data, *SURVIVES, "trainer.memory_copy_freq=1")
    assert killed
    log = (run.path / "restarts.jsonl").read_text()
    assert [json.loads(line).get("step") for line in log.splitlines()] == [None, 3]
    assert_survived(run, unkilled, 1)
    assert not (run.path / "memory_copies.json").exists()


def test_before_the_first_checkpoint_it_begins_anew(task, data, unkilled, kill_during, tmp_path):  # noqa: F811
    killed = kill_during("next_batch", 2)
    mode = "trainer.resume_mode=disable"
    assert_survived(task.train(tmp_path / "run", *RUN, *data, *SURVIVES, mode), unkilled, 1)
    assert killed


def test_without_a_budget_the_death_ends_the_run(task, data, kill_during, tmp_path):  # noqa: F811
    kill_during("update_actor", 1)
    with pytest.raises(WorkerDied):
        task.train(tmp_path / "run", *RUN, *data, TWO)


APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
)


@pytest.fixture(scope="module")
def apart(task, data, tmp_path_factory):  # noqa: F811
    return task.train(tmp_path_factory.mktemp("apart") / "run", *RUN, *data, *APART)


@pytest.mark.parametrize("method", ["begin_batches", "move_weights", "validate"])
def test_a_killed_rollout_is_replaced_within_the_step(task, data, apart, kill_during, tmp_path, method):  # noqa: F811
    """Its batch is asked again with the same seeds; the trainers keep what they have, so no step is taken twice."""
    killed = kill_during(method, 2, "rollout")
    run = task.train(tmp_path / "run", *RUN, *data, *APART, "trainer.max_restarts=3", "trainer.restart_wait=0")
    assert killed
    kinds = [json.loads(line).get("kind") for line in (run.path / "restarts.jsonl").read_text().splitlines()]
    assert kinds == ["rollout", None]
    assert "goes on after step" not in (run.path / "log.txt").read_text()
    for row in run.metrics:
        row.pop("restarts/count"), row.pop("restarts/seconds_lost")
    assert_equal(apart, run)


def test_a_batch_under_way_ahead_is_asked_again(task, data, kill_during, tmp_path):  # noqa: F811
    """Two batches are in the rollout's hands when it dies: none is lost and none is trained twice."""
    ahead = (*APART, "async_training.max_staleness=1", "trainer.max_restarts=3", "trainer.restart_wait=0")
    killed = kill_during("train_step", 2, "rollout")
    run = task.train(tmp_path / "run", *RUN, *data, *ahead, "trainer.rollout_data_dir=" + str(tmp_path / "samples"))
    assert killed
    assert [row["step"] for row in run.metrics] == list(range(6))
    for first in (1, 4):  # an epoch each, of three and of two batches
        steps = [tmp_path / "samples" / f"{step}.jsonl" for step in range(first, min(first + 3, 6))]
        prompts = [{json.loads(line)["prompt"] for line in file.read_text().splitlines()} for file in steps]
        assert len(set().union(*prompts)) == sum(map(len, prompts)) == 12 * len(steps)


def test_a_stall_is_named(task, data, tmp_path, monkeypatch):  # noqa: F811
    """A rank that sleeps before a collective: the report says which call, which ranks, and where they are."""
    original = PPOTrainer.update_actor

    def sleep_first(self, batch):
        if self.step == 2:
            os.kill(self.actor._backend._ranks[1].pid, signal.SIGSTOP)
            threading.Timer(3.5, os.kill, (self.actor._backend._ranks[1].pid, signal.SIGCONT)).start()
        return original(self, batch)

    monkeypatch.setattr(PPOTrainer, "update_actor", sleep_first)
    run = task.train(tmp_path / "run", *RUN, *data, TWO, "trainer.stall_timeout=1", "trainer.total_training_steps=2")
    pages = [file.read_text().splitlines() for file in run.path.glob("stall-*.txt")]
    page = next(page for page in pages if "step 2, update_actor" in page[0])
    assert "update_actor on 'actor_rollout_ref' has run for" in page[0]
    assert "ranks that have answered: [], ranks that have not: [0, 1]" in page[0]
    assert any("in update_actor" in line and "workers/actor.py" in line for line in page)


def sleeping_reward(data_source, solution_str, ground_truth, extra_info=None):
    marker = Path(os.environ["SLEPT_MARKER"])
    if not marker.exists():
        marker.touch()
        time.sleep(2.5)
    return 0.0


def test_a_reward_that_does_not_return_is_named(task, data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SLEPT_MARKER", str(tmp_path / "slept"))
    reward = (
        "reward.name=null",
        "custom_reward_function.path=" + __file__,
        "custom_reward_function.name=sleeping_reward",
    )
    options = ("trainer.stall_timeout=1", "trainer.total_training_steps=1", "trainer.val_before_train=false")
    run = task.train(tmp_path / "run", *RUN, *data, *reward, *options, "trainer.test_freq=-1")
    pages = [file.read_text() for file in sorted(run.path.glob("stall-*.txt"))]
    assert any("step 1, reward" in page.splitlines()[0] for page in pages)
    assert any("sleeping_reward" in page for page in pages)
