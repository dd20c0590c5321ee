"""A user's own loss and estimator inside runs: a copy of a built-in one gives the same run, a changed one another."""

import json
from pathlib import Path

import pytest
import torch
from by_hand import Recorder
from test_layouts import SHORT, compare

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
# Registered by a file of the folder where the run is started.
NAMES = (
    "actor_rollout_ref.model.external_lib=own.py",
    f"{LOSS}=my_vanilla",
    "algorithm.adv_estimator=my_grpo",
)
CODE = '''
import json

import torch
from meshrl.algorithms import (
    compute_gae_advantage_return, compute_grpo_outcome_advantage, log_ratio, reduce_policy_loss, register_adv_est,
    register_policy_loss,
)
from meshrl.rewards.manager import RewardManager


@register_policy_loss("my_vanilla", zero_where_advantage_is_zero=True)
def copied(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, stats):
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_r.exp()
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    losses = torch.maximum(plain, clipped)
    ceiling = -advantages * 3.0
    beyond = (advantages < 0) & (losses > ceiling)
    metrics = {
        "actor/pg_clipfrac": clipped > plain,
        "actor/pg_clipfrac_lower": beyond,
        "actor/ppo_kl": -log_r,
    }
    losses = torch.where(beyond, ceiling, losses)
    return reduce_policy_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, stats, metrics)


def undeclared(**arguments):
    return copied(**arguments)


def scaled(factor, **arguments):
    """Its loss is its only metric, and that a plain number."""
    loss, _ = copied(**arguments)
    return loss * factor, {"actor/half": float(loss.detach()) / 2}


@register_adv_est("my_grpo")
def grpo(token_level_rewards, response_mask, index, power=1.0):
    advantages, returns = compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)
    return (advantages if power == 1.0 else advantages.sign() * advantages.abs() ** power), returns


class HalfScores(RewardManager):
    def score(self, data, again=False):
        scores = super().score(data, again)
        scores.token_level /= 2
        return scores


class Backwards:
    """The rows of the files, the last first."""

    def __init__(self, files, tokenizer, config):
        self.rows = [json.loads(line) for file in files for line in open(file)][::-1]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def gae(token_level_rewards, response_mask, values, gamma, lam, old_log_probs):
    assert old_log_probs.shape == values.shape
    return compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam)


def without_mask(token_level_rewards):
    return token_level_rewards.sum(-1), token_level_rewards.sum(-1)
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def built_in(task, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("built_in"), *SHORT)


def test_a_copy_by_file_is_the_built_in_loss_to_the_bit(task, code, built_in, tmp_path):
    own = task.train(tmp_path / "own", *SHORT, f"{LOSS}={code}:copied")
    compare(built_in, own, 0.0)
    assert own.metrics[-1]["actor/computed_tokens_share"] < 1  # as it was promised


def test_samples_without_advantage_count_unless_promised_otherwise(task, code, built_in, tmp_path):
    own = task.train(tmp_path / "own", *SHORT, f"{LOSS}={code}:undeclared")
    assert own.metrics[-1]["actor/computed_tokens_share"] == 1
    for name, weight in built_in.weights.items():
        torch.testing.assert_close(own.weights[name], weight, rtol=1e-5, atol=1e-5)


def test_a_changed_loss_differs_and_gets_its_arguments(task, code, built_in, tmp_path):
    kwargs = "actor_rollout_ref.actor.policy_loss.loss_kwargs.factor=-1"
    own = task.train(tmp_path / "own", *SHORT, f"{LOSS}={code}:scaled", kwargs)
    row = own.metrics[-1]
    assert row["actor/pg_loss"] == pytest.approx(-2 * row["actor/half"])
    assert any(not torch.equal(own.weights[name], weight) for name, weight in built_in.weights.items())


def test_an_estimator_of_ones_own(task, code, built_in, tmp_path):
    copied = task.train(tmp_path / "copied", *SHORT, f"algorithm.adv_estimator={code}:grpo")
    compare(built_in, copied, 0.0)
    changed = task.train(
        tmp_path / "changed", *SHORT, f"algorithm.adv_estimator={code}:grpo", "algorithm.adv_kwargs.power=2"
    )
    squared = built_in.metrics[-1]["critic/advantages/max"] ** 2
    assert changed.metrics[-1]["critic/advantages/max"] == pytest.approx(squared)


def test_an_estimator_of_ones_own_has_the_critic_and_the_old_log_probs_it_names(task, code, tmp_path):
    bare = (*SHORT, "algorithm.rollout_correction.bypass_mode=false", "actor_rollout_ref.actor.ppo_mini_batch_size=12")
    critic = "critic.fsdp_config.mixed_precision.param_dtype=fp32"
    built_in = task.train(tmp_path / "gae", *bare, critic, "algorithm.adv_estimator=gae")
    own = task.train(tmp_path / "own", *bare, critic, f"algorithm.adv_estimator={code}:gae", "critic.enable=true")
    assert own.metrics[-1]["critic/vf_loss"] == built_in.metrics[-1]["critic/vf_loss"]
    assert own.metrics[-1]["critic/advantages/max"] == built_in.metrics[-1]["critic/advantages/max"]
    assert "timing_s/old_log_prob" in own.metrics[-1]
    assert "timing_s/old_log_prob" not in built_in.metrics[-1]


def test_what_an_estimator_returns_is_looked_at(task, code, tmp_path):
    with pytest.raises(ValueError, match=r"must return \(advantages, returns\), both of response_mask's shape"):
        task.train(tmp_path / "run", *SHORT, f"algorithm.adv_estimator={code}:without_mask")


def test_registered_names_reach_two_processes(task, code, built_in, tmp_path, monkeypatch):
    """And those of Ray: `test_resume` has a run with these names on two of its processes."""
    monkeypatch.chdir(code.parent)
    local = task.train(tmp_path / "local", *SHORT, "trainer.n_gpus_per_node=2", *NAMES)
    for name, weight in built_in.weights.items():
        torch.testing.assert_close(local.weights[name], weight, rtol=1e-5, atol=1e-5)
    assert local.metrics[-1]["ledger/actor_rollout_ref/booked"] == pytest.approx(1, abs=0.01)


def test_rows_of_a_class_of_ones_own(task, code, built_in, tmp_path, monkeypatch):
    recorder = Recorder().watch(monkeypatch)
    custom = (f"data.custom_cls.path={code}", "data.custom_cls.name=Backwards", "data.shuffle=false")
    task.train(tmp_path / "own", *SHORT, *custom)
    lines = Path(task.files["prompts"]).read_text().splitlines()[::-1]
    assert list(recorder.batches[0]["raw_prompt"])[::4] == [json.loads(line)["prompt"] for line in lines[:12]]


def test_a_reward_manager_of_ones_own(task, code, built_in, tmp_path):
    own = task.train(tmp_path / "own", *SHORT, f"reward_manager.name={code}:HalfScores")
    score = built_in.metrics[-1]["critic/score/mean"]
    assert score > 0
    assert own.metrics[-1]["critic/score/mean"] == pytest.approx(score / 2)
