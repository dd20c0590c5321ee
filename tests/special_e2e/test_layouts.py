"""The same seed gives the same run: one process, two FSDP2 processes, local or Ray."""

import pytest
import torch

UNEVEN = (
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=10",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
    # Two batches of unequal size, the first more than are generated at once.
    "data.val_max_samples=19",
    "data.val_batch_size=13",
)
WITH_REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.bypass_mode=false")
# What may differ between layouts: clocks, how samples are spread, and how weights travel.
OWN = ("timing_s/", "perf/", "time", "global_seqlen/", "weight_sync/", "ledger", "mfu/", "memory/")


def compare(left, right, tolerance):
    assert len(left.metrics) == len(right.metrics)
    for ours, theirs in zip(left.metrics, right.metrics, strict=True):
        for name, value in ours.items():
            if not name.startswith(OWN):
                assert theirs[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (ours["step"], name)
    assert left.weights.keys() == right.weights.keys()
    for name, weight in left.weights.items():
        torch.testing.assert_close(right.weights[name], weight, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def one_process(task, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("one"), *UNEVEN, *WITH_REFERENCE)


def test_two_fsdp_processes_equal_one(task, one_process, tmp_path):
    two = task.train(tmp_path / "two", *UNEVEN, *WITH_REFERENCE, "trainer.n_gpus_per_node=2")
    compare(one_process, two, 1e-5)


def test_without_balancing_two_processes_equal_one(task, one_process, tmp_path):
    two = task.train(
        tmp_path / "plain", *UNEVEN, *WITH_REFERENCE, "trainer.n_gpus_per_node=2", "trainer.balance_batch=false"
    )
    compare(one_process, two, 1e-5)


def test_the_comparison_can_fail(task, one_process, tmp_path):
    other = task.train(tmp_path / "off", *UNEVEN, *WITH_REFERENCE, "actor_rollout_ref.actor.clip_ratio_high=0.0001")
    with pytest.raises(AssertionError):
        compare(one_process, other, 1e-5)


def test_skipping_samples_without_advantage_changes_nothing(task, tmp_path):
    kept = task.train(tmp_path / "kept", *UNEVEN, "actor_rollout_ref.actor.skip_zero_advantage=false")
    skipped = task.train(tmp_path / "skipped", *UNEVEN)
    shares = [row["actor/computed_tokens_share"] for row in skipped.metrics if "actor/computed_tokens_share" in row]
    assert min(shares) < 1
    for name, weight in kept.weights.items():
        torch.testing.assert_close(skipped.weights[name], weight, rtol=1e-5, atol=1e-5)


# kl_cov picks the tokens of the highest covariance; where many are equal, the last bit of a log-prob decides.
LOSSES = ("gspo", "sapo", "gpg", "clip_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro", "topr")
SHORT = (*UNEVEN, "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_gives_the_same_step_on_two_ranks(task, tmp_path, loss):
    chosen = (f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",)
    if loss in ("gspo", "sapo", "geo_mean"):
        chosen += ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",)
    one = task.train(tmp_path / "one", *SHORT, *chosen)
    two = task.train(tmp_path / "two", *SHORT, *chosen, "trainer.n_gpus_per_node=2")
    compare(one, two, 1e-5)
    assert one.metrics[-1]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "estimator", ["grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg"]
)
def test_every_estimator_without_a_critic_trains(task, tmp_path, estimator):
    # Hot, so that the answers of a group differ: pass@k learns from groups with a single right one.
    hot = "actor_rollout_ref.rollout.temperature=1.5"
    run = task.train(tmp_path / "run", *SHORT, hot, f"algorithm.adv_estimator={estimator}")
    assert run.metrics[-1]["actor/grad_norm"] > 0
    assert run.metrics[-1]["actor/skipped_steps"] == 0


def test_m2po_leaves_out_what_is_furthest_from_the_rollout(task, tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss"
    three = (f"{loss}.loss_mode=m2po", "algorithm.rollout_correction.bypass_mode=false")
    one = task.train(tmp_path / "one", *SHORT, *three)
    two = task.train(tmp_path / "two", *SHORT, *three, "trainer.n_gpus_per_node=2")
    compare(one, two, 1e-5)
    assert one.metrics[-1]["actor/grad_norm"] > 0
    assert one.metrics[-1]["actor/rollout_masked_frac"] == 0
    # Few samples: processors without bfloat16 take hundreds of times as long for its products.
    few = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    rounded = (*few, "actor_rollout_ref.rollout.dtype=bfloat16", f"{loss}.m2_threshold=1e-7")
    off = task.train(tmp_path / "off", *SHORT, *three, *rounded)
    assert 0 < off.metrics[-1]["actor/rollout_masked_frac"] < 1


def test_kl_cov_trains_on_the_tokens_it_picks(task, tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss"
    run = task.train(tmp_path / "run", *SHORT, f"{loss}.loss_mode=kl_cov", f"{loss}.kl_cov_ratio=0.1")
    assert 0.05 < run.metrics[-1]["actor/cov_frac"] < 0.2
    assert run.metrics[-1]["actor/grad_norm"] > 0


def test_kl_in_the_reward_needs_and_uses_the_reference(task, tmp_path):
    run = task.train(
        tmp_path / "run", *SHORT, "algorithm.use_kl_in_reward=true", "algorithm.rollout_correction.bypass_mode=false"
    )
    # before the first update policy and reference are the same model
    assert run.metrics[-1]["actor/reward_kl_penalty"] == 0
    assert run.metrics[-1]["actor/reward_kl_penalty_coeff"] == 0.001
