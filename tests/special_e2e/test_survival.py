"""Runs whose processes are killed end as if they had not been."""

import os
import signal

import pytest
from test_resume import RUN, TWO, assert_equal, data, without_own  # noqa: F401

from meshrl.controller import WorkerDied
from meshrl.trainer.ppo import PPOTrainer

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


def test_before_the_first_checkpoint_it_begins_anew(task, data, unkilled, kill_during, tmp_path):  # noqa: F811
    killed = kill_during("next_batch", 2)
    mode = "trainer.resume_mode=disable"
    assert_survived(task.train(tmp_path / "run", *RUN, *data, *SURVIVES, mode), unkilled, 1)
    assert killed


def test_without_a_budget_the_death_ends_the_run(task, data, kill_during, tmp_path):  # noqa: F811
    kill_during("update_actor", 1)
    with pytest.raises(WorkerDied):
        task.train(tmp_path / "run", *RUN, *data, TWO)
