"""PPO with a critic, and reward models: the same on one process and on two, and right in the small."""

import numpy as np
import pytest
import torch
from test_layouts import SHORT, UNEVEN, compare
from transformers import AutoModelForTokenClassification

from meshrl.algorithms import compute_gae_advantage_return
from meshrl.data.batch import DataProto
from meshrl.workers.scoring import on_last_tokens, with_end

PPO = (
    *UNEVEN,
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.9",
    "critic.model.enable_gradient_checkpointing=false",
    "critic.ppo_max_token_len_per_gpu=90",
    "critic.fsdp_config.mixed_precision.param_dtype=fp32",
    "critic.optim.lr=1e-3",
)


@pytest.fixture(scope="module")
def one_process(task, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("ppo"), *PPO)


def test_the_critic_learns_and_is_measured(one_process):
    steps = [row for row in one_process.metrics if "critic/vf_loss" in row]
    assert len(steps) == 2
    assert steps[0]["critic/vpred_mean"] != 0  # after the first of two optimizer steps it is no longer all zero
    for row in steps:
        assert row["critic/grad_norm"] > 0
        assert row["critic/vf_explained_var"] <= 1
        assert 0 <= row["critic/vf_clipfrac"] <= 1
    # Before any learning the values are zero, so they explain nothing of the returns.
    assert steps[0]["critic/vf_explained_var"] == pytest.approx(0, abs=1e-3)


def test_two_processes_equal_one(task, one_process, tmp_path):
    compare(one_process, task.train(tmp_path / "two", *PPO, "trainer.n_gpus_per_node=2"), 1e-5)


def test_the_policy_waits_for_the_critic(task, one_process, tmp_path):
    warmed = task.train(tmp_path / "warm", *PPO, "trainer.critic_warmup=2")
    assert all("actor/pg_loss" not in row for row in warmed.metrics)
    start = AutoModelForTokenClassification.from_pretrained(task.model, num_labels=1).state_dict()
    for name, weight in warmed.weights.items():
        if name in start:
            assert torch.equal(weight, start[name])
    assert any(not torch.equal(one_process.weights[n], w) for n, w in warmed.weights.items())


def test_advantages_are_those_of_zero_values_at_first(task, tmp_path):
    """With values of zero and lambda 1, the advantage before whitening is the reward to come."""
    run = task.train(
        tmp_path / "first", *PPO, "algorithm.lam=1.0", "trainer.total_training_steps=1", "trainer.test_freq=-1"
    )
    (row,) = [row for row in run.metrics if "critic/advantages/mean" in row]
    rewards = torch.zeros(2, 3)
    rewards[0, 2], mask = 1.0, torch.ones(2, 3)
    advantages, returns = compute_gae_advantage_return(rewards, torch.zeros(2, 3), mask, 1.0, 1.0)
    assert torch.equal(returns, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert row["critic/returns/mean"] == pytest.approx(row["critic/score/mean"], abs=0.2)
    assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)
    assert advantages.mean() == pytest.approx(0, abs=1e-6)


def test_a_reward_model_adds_its_score(task, reward_model, tmp_path):
    folder, _ = reward_model
    options = (
        *UNEVEN,
        "reward_model.enable=true",
        f"reward_model.model.path={folder}",
        "reward_model.fsdp_config.mixed_precision.param_dtype=fp32",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    one = task.train(tmp_path / "one", *options)
    halved = task.train(tmp_path / "half", *options, "reward_model.weight=0.5")
    without = task.train(tmp_path / "without", *UNEVEN, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    (first, half, plain) = (run.metrics[-1] for run in (one, halved, without))
    mean = first["reward/rm_score_mean"]
    assert abs(mean) > 1e-3
    assert first["critic/score/mean"] == pytest.approx(plain["critic/score/mean"] + mean, abs=1e-5)
    assert half["critic/score/mean"] == pytest.approx(plain["critic/score/mean"] + mean / 2, abs=1e-5)
    two = task.train(tmp_path / "two", *options, "trainer.n_gpus_per_node=2")
    compare(one, two, 1e-5)


def test_the_added_token_reads_the_last_one(reward_model):
    """What the worker asks of the engine, written out: the number at the last token of the unpadded sample."""
    data = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 3, 4, 5, 0], [2, 3, 4, 5, 6]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
            "response_mask": torch.tensor([[1, 0], [1, 1]]),
        }
    )
    asked = with_end(data).batch
    kept = [row[mask.bool()].tolist() for row, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True)]
    assert [row[:-1] for row in kept] == [[3, 4, 5], [2, 3, 4, 5, 6]]
    assert asked["response_mask"].tolist() == [[1], [1]]
    scores = on_last_tokens(torch.tensor([2.0, -1.0]), data.batch["response_mask"])
    assert np.array_equal(scores.numpy(), [[2.0, 0.0], [0.0, -1.0]])
    nothing = on_last_tokens(torch.tensor([2.0]), torch.zeros(1, 3))
    assert nothing.sum() == 0


def test_correcting_an_exact_rollout_changes_nothing(task, tmp_path):
    """The embedded rollout is the trainer's policy to rounding: its importance weights are 1."""
    off = "algorithm.rollout_correction.bypass_mode=false"
    plain = task.train(tmp_path / "plain", *SHORT, off)
    corrected = task.train(tmp_path / "corrected", *SHORT, off, "algorithm.rollout_correction.rollout_is=token")
    icepop = task.train(tmp_path / "icepop", *SHORT, off, "actor_rollout_ref.actor.policy_loss.loss_mode=icepop")
    row = corrected.metrics[-1]
    assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
    assert row["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-3)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(corrected.weights[name], weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(icepop.weights[name], weight, rtol=1e-4, atol=1e-5)
