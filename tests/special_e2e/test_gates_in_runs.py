"""Gates inside runs: silent while all is well, and each injected fault ends the run where it is asked to."""

import json

import pytest
import torch
from test_algorithms_by_hand import TWO_MICRO_BATCHES
from test_layouts import UNEVEN

from meshrl.data.batch import DataProto
from meshrl.trainer.health_checks import GateError
from meshrl.trainer.rl_trainer import PPOTrainer

OPTIONS = (*UNEVEN, *TWO_MICRO_BATCHES, "trainer.test_freq=-1", "trainer.val_before_train=false")
OLD = "algorithm.rollout_correction.bypass_mode=false"


def gates_of(run):
    return [{name: value for name, value in row.items() if name.startswith("gates/")} for row in run.metrics]


@pytest.mark.parametrize("more", [(), (OLD,)])
def test_a_healthy_run_has_no_findings(task, tmp_path, more):
    run = task.train(tmp_path, *OPTIONS, *more)
    assert gates_of(run) == [{"gates/warnings": 0.0}] * 3
    assert all(abs(row["actor/ppo_kl_before"]) < 1e-4 for row in run.metrics)
    assert any(abs(row["actor/ppo_kl"]) > 1e-7 for row in run.metrics)


def test_a_rollout_with_other_log_probs_is_found_at_once(task, tmp_path, monkeypatch):
    finish = PPOTrainer.finish

    def shifted(trainer, begun):
        batch, metrics = finish(trainer, begun)
        batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"] + 0.4
        return batch, metrics

    monkeypatch.setattr(PPOTrainer, "finish", shifted)
    run = task.train(tmp_path / "warns", *OPTIONS, OLD)
    assert [set(found) for found in gates_of(run)] == [
        {"gates/first_step", "gates/warnings"},
        {"gates/log_prob_diff", "gates/warnings"},
        {"gates/log_prob_diff", "gates/warnings"},
    ]
    assert "differ from the trainer's by 0.4" in (run.path / "log.txt").read_text()
    with pytest.raises(GateError, match="first step"):
        task.train(tmp_path / "stops", *OPTIONS, OLD, "trainer.gates.first_step=stop")
    rows = [json.loads(line) for line in (tmp_path / "stops" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["gates/first_step"] == 1.0


def test_nan_among_the_rewards_leaves_a_dump(task, tmp_path, monkeypatch):
    score = PPOTrainer.score

    def broken(trainer, batch):
        metrics = score(trainer, batch)
        if trainer.step == 2:
            batch.batch["token_level_scores"][5, 0] = torch.nan
        return metrics

    monkeypatch.setattr(PPOTrainer, "score", broken)
    with pytest.raises(GateError, match="token_level_scores: 1 values, first in sample 5"):
        task.train(tmp_path, *OPTIONS)
    kept = DataProto.load_from_disk(tmp_path / "dumps" / "step_2" / "batch.dataproto")
    assert torch.isnan(kept.batch["token_level_scores"]).nonzero().tolist() == [[5, 0]]


def test_rewards_that_never_differ_end_the_run(task, tmp_path):
    options = ("reward.name=format_match", "reward.kwargs.pattern='x'", "trainer.gates.patience=2")
    with pytest.raises(GateError, match="every sample has the reward 0 for 2 steps"):
        task.train(tmp_path, *OPTIONS, *options, "trainer.gates.equal_rewards=stop")
