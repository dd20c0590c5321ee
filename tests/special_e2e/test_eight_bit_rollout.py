"""Runs whose rollouts have products of 8-bit floats: measured, corrected, and rounded anew after every update."""

import pytest
import torch

from meshrl.config.keys import ConfigError
from meshrl.models.fp8 import Fp8Projection

EIGHT = "actor_rollout_ref.rollout.quantization=fp8"
RUN = (
    "trainer.total_training_steps=3",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.actor.optim.lr=0.003",
)
DIFFERENCE = "training/rollout_log_prob_diff_mean"


def differences(run):
    return [row[DIFFERENCE] for row in run.metrics if DIFFERENCE in row]


def test_the_difference_stays_that_of_rounding(task, tmp_path, monkeypatch):
    plain = task.train(tmp_path / "plain", *RUN)
    run = task.train(tmp_path / "eight", *RUN, EIGHT)
    assert max(differences(plain)) < 1e-4
    first, *_, last = differences(run)
    assert 1e-4 < first < 0.1
    assert last < 3 * first
    rows = [row for row in run.metrics if DIFFERENCE in row]
    assert all(row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1) for row in rows)
    assert not any("rollout_corr/rollout_is_mean" in row for row in plain.metrics)
    # Each rank of two has weights of its own, which arrive in parts.
    two = task.train(tmp_path / "two", *RUN, EIGHT, "trainer.n_gpus_per_node=2")
    assert differences(two)[0] == pytest.approx(first, rel=0.05)
    assert differences(two)[-1] < 3 * first
    # The control: weights that stay as they were are far from the trainer's after two steps.
    monkeypatch.setattr(Fp8Projection, "refresh", refreshed_once(Fp8Projection.refresh))
    stale = task.train(tmp_path / "stale", *RUN, EIGHT, "trainer.gates.log_prob_diff=off")
    assert differences(stale)[-1] > 3 * first


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_the_machine_lacks_is_said_before_an_earlier_run_is_moved(task, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for override in ("trainer.device=cuda", "actor_rollout_ref.rollout.kv_cache_dtype=fp8"):
        with pytest.raises(ConfigError, match=r"torch sees (0|none)"):
            task.train(tmp_path, *RUN, "trainer.device=auto", override)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def refreshed_once(refresh):
    """Gives a matrix the values it had when it was rounded for the first time."""
    first = {}

    def once(self):
        refresh(self)
        values, scale = first.setdefault(self._weights[0].data_ptr(), (self.values.clone(), self.scale.clone()))
        self.values.copy_(values)
        self.scale.copy_(scale)

    return once
