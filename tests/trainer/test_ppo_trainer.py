"""Single decisions of the trainer: what it sends to the actor, and what it does with batches that teach nothing."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from meshrl.algorithms import BatchStats, get_policy_loss_fn
from meshrl.config.rl import PPOConfig
from meshrl.data.batch import DataProto, object_array
from meshrl.trainer.rl_trainer import PPOTrainer, data_metrics


def batch_of(**columns):
    """Four samples: two tokens of prompt, three of response."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    tensors = {
        "input_ids": torch.ones(4, 5, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), mask], 1),
        "responses": torch.ones(4, 3, dtype=torch.long),
        "response_mask": mask,
        "rollout_log_probs": -torch.rand(4, 3),
        "versions": torch.where(mask.bool(), torch.tensor([[3], [2], [3], [1]]), -1),
        "token_level_scores": torch.tensor([[0, 0, 1.0], [0, 2.0, 0], [0, 0, 0], [0, 0, 3.0]]),
    }
    return DataProto.from_dict(tensors, columns)


def trainer(loss_mode="vanilla", mini_batches=1, bypass=False, **more):
    config = PPOConfig()
    config.actor_rollout_ref.actor.policy_loss.loss_mode = loss_mode
    units = SimpleNamespace(mini_batches_per_epoch=mini_batches, dp_size=1)
    fake = SimpleNamespace(config=config, units=units, loss_mode=loss_mode, step=1, version=3, **more)
    fake.bypasses_old_log_probs = bypass
    fake.balanced_order = lambda work, *_: torch.arange(len(work)).numpy()
    return fake


@pytest.mark.parametrize("bypass", [False, True])
def test_tokens_of_older_weights_are_not_compared_with_the_rollout(bypass):
    sent = []
    actor = SimpleNamespace(update_actor=lambda data: sent.append(data) or [{}])
    batch = batch_of()
    batch.batch["advantages"] = torch.ones(4, 3)
    if bypass:
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    PPOTrainer.update_actor(trainer(bypass=bypass, actor=actor), batch)
    (data,) = sent
    assert data.meta_info["compare_with"] == ("old_log_probs" if bypass else "rollout_log_probs")
    assert data.batch["fresh"].tolist() == [[True] * 3, [False] * 3, [True, False, False], [False] * 3]


@pytest.mark.parametrize("loss_mode", ["kl_cov", "clip_cov"])
def test_a_mini_batch_that_has_lost_its_samples_has_no_chosen_token(loss_mode):
    batch = batch_of()
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["advantages"] = torch.linspace(-1, 1, 12).view(4, 3)
    batch.batch["response_mask"][2:] = 0
    found = PPOTrainer.covariance_of_mini_batches(trainer(loss_mode, mini_batches=2), batch)
    part = batch[2:].batch
    stats = BatchStats(1, 1, 1, 3.0, covariance=found[1])
    log_prob = part["old_log_probs"] + 0.1
    loss, metrics = get_policy_loss_fn(loss_mode)(
        part["old_log_probs"], log_prob, part["advantages"], part["response_mask"], stats=stats
    )
    assert float(loss) == float(metrics["actor/cov_frac"]) == 0.0


def test_a_batch_that_is_rejected_as_a_whole_is_a_step_without_an_update(caplog):
    """Everything that would learn from it is not there."""
    heard, logged = [], []
    fake = trainer()
    fake.config.algorithm.rollout_correction.rollout_rs = "seq_sum_k1"
    fake.config.algorithm.rollout_correction.rollout_rs_threshold = "1.001_2.0"
    fake.correction = fake.config.algorithm.rollout_correction
    fake.order, fake.critic = SimpleNamespace(metrics=dict), None
    fake.phase = lambda name: nullcontext()
    fake.needs_old_log_probs = fake.corrects_rollout = True
    fake.needs_reference = False
    fake.refresh_reference_if_due = lambda: heard.append("reference")
    fake.updates = SimpleNamespace(update=heard.append)
    fake.samples = SimpleNamespace(log_training=lambda *_: logged.append(True))
    fake.reward = SimpleNamespace(decode=None)
    fake.pass_over = lambda batch: PPOTrainer.pass_over(fake, batch)

    def add_old_log_probs(batch):
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        return {}

    fake.add_old_log_probs = add_old_log_probs
    batch = batch_of()
    with caplog.at_level(logging.WARNING):
        metrics = PPOTrainer.train_step(fake, batch)
    assert metrics["training/rejected_batches"] == 1.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert metrics["critic/score/mean"] == 1.5
    assert "training/zero_advantage_share" not in metrics
    assert heard == ["reference", batch]
    assert logged == [True]
    assert "rollout_rs=seq_sum_k1 has rejected all samples" in caplog.text


def test_scores_are_of_the_samples_that_have_one():
    batch = batch_of(reward_dropped=object_array([False, False, True, False]))
    tensors = batch.batch
    tensors["response_mask"][2] = 0
    tensors["token_level_rewards"] = tensors["token_level_scores"]
    tensors["advantages"] = tensors["returns"] = torch.ones(4, 3)
    metrics = data_metrics(batch, PPOConfig())
    assert [metrics[f"critic/score/{name}"] for name in ("mean", "min", "max")] == [2.0, 1.0, 3.0]
    assert metrics["critic/rewards/min"] == 1.0
    assert metrics["response_length/mean"] == 2.25
