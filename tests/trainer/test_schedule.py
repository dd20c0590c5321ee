"""Which samples are too old, and what is done about a stale rollout by default."""

import random

import pytest
import torch

from meshrl.config.rl import PPOConfig, correction_of
from meshrl.config.validate import check_config
from meshrl.data.batch import DataProto
from meshrl.trainer.rollout_source import Schedule


def aged_batch(rows):
    """A batch with these versions a token, -1 where there is none."""
    versions = torch.full((len(rows), max(map(len, rows))), -1)
    for i, row in enumerate(rows):
        versions[i, : len(row)] = torch.tensor(row)
    return DataProto.from_dict({"versions": versions, "response_mask": (versions >= 0).long()})


def test_samples_with_one_token_too_old_are_dropped_whole():
    rng = random.Random(3)
    rows = [sorted(rng.choices(range(4, 9), k=rng.randint(1, 5))) for _ in range(40)]
    batch = aged_batch(rows)
    before = batch.batch["response_mask"].clone()
    metrics = Schedule(batches_ahead=4, max_staleness=2).drop_stale(batch, version=8)
    ages = [[8 - version for version in row] for row in rows]
    dropped = [max(age) > 2 for age in ages]
    assert any(dropped)
    assert not all(dropped)
    assert metrics["training/stale_dropped"] == sum(dropped)
    assert metrics["training/staleness_max"] == max(max(age) for age in ages)
    flat = [a for age in ages for a in age]
    assert metrics["training/staleness_mean"] == pytest.approx(sum(flat) / len(flat))
    partial = [len(set(row)) > 1 for row in rows]
    assert metrics["training/partial_share"] == pytest.approx(sum(partial) / len(rows))
    for i, gone in enumerate(dropped):
        expected = torch.zeros_like(before[i]) if gone else before[i]
        assert torch.equal(batch.batch["response_mask"][i], expected)


def test_fresh_samples_are_left_alone():
    batch = aged_batch([[5, 5], [5]])
    metrics = Schedule().drop_stale(batch, version=5)
    assert metrics == {
        "training/staleness_mean": 0.0,
        "training/staleness_max": 0.0,
        "training/partial_share": 0.0,
        "training/stale_dropped": 0.0,
    }
    assert batch.batch["response_mask"].sum() == 3


def asynchronous(**fields):
    config = PPOConfig()
    config.actor_rollout_ref.hybrid_engine = False
    config.actor_rollout_ref.rollout.nnodes, config.actor_rollout_ref.rollout.n_gpus_per_node = 1, 2
    for name, value in fields.items():
        setattr(config.async_training, name, value)
    return config


def test_importance_weights_are_on_where_samples_may_be_stale():
    assert correction_of(PPOConfig()).rollout_is is None
    assert correction_of(asynchronous()).rollout_is is None
    assert correction_of(asynchronous(max_staleness=1)).rollout_is == "token"
    chosen = asynchronous(max_staleness=1)
    chosen.algorithm.rollout_correction.rollout_is = "sequence"
    assert correction_of(chosen).rollout_is == "sequence"
    chosen.algorithm.rollout_correction.rollout_is = "off"
    assert correction_of(chosen).rollout_is is None
    # The rollout's own log-probs are the old ones: the ratio of the loss corrects already.
    bypass = asynchronous(max_staleness=1)
    bypass.algorithm.rollout_correction.bypass_mode = True
    assert correction_of(bypass).rollout_is is None


def conversations_finished_first(config):
    config.async_training.partial_rollout = False
    config.actor_rollout_ref.rollout.multi_turn.enable = True


def finished_first_with_nothing_ahead(config):
    config.async_training.partial_rollout, config.async_training.max_staleness = False, 0


def adapters_on_fsdp1(config):
    config.actor_rollout_ref.actor.strategy, config.actor_rollout_ref.model.lora_rank = "fsdp", 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c.actor_rollout_ref, "hybrid_engine", True), "has no effect while actor and rollout share"),
        (lambda c: setattr(c.actor_rollout_ref.rollout, "nnodes", 0), "needs processes for the rollout"),
        (lambda c: setattr(c.actor_rollout_ref.rollout, "nnodes", 2), "needs trainer.backend=ray"),
        (lambda c: setattr(c.actor_rollout_ref.rollout, "calculate_log_probs", False), "calculate_log_probs=true"),
        (lambda c: setattr(c.reward_manager, "overlap", True), "scored while others generate anyway"),
        (lambda c: setattr(c.data, "gen_batch_size", c.data.train_batch_size * 2), "lets what is begun early grow old"),
        (conversations_finished_first, "cannot hold for conversations"),
        (finished_first_with_nothing_ahead, "nothing is begun early"),
        (adapters_on_fsdp1, "cannot feed rollouts on other devices"),
    ],
)
def test_what_does_not_go_together_is_refused(change, words):
    config = asynchronous(max_staleness=1)

    def problems():
        return [problem for problem in check_config(config, check_files=False) if words in problem]

    assert not problems()
    change(config)
    assert problems()
