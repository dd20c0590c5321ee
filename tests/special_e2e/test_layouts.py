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
    "data.val_batch_size=99",
)
WITH_REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.bypass_mode=false")
# What may differ between layouts: clocks, and how samples are spread.
OWN = ("timing_s/", "perf/", "time", "global_seqlen/")


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


def test_ray_equals_local_to_the_bit(task, tmp_path):
    pytest.importorskip("ray")
    local = task.train(tmp_path / "local", *UNEVEN, "trainer.n_gpus_per_node=2")
    remote = task.train(
        tmp_path / "ray", *UNEVEN, "trainer.n_gpus_per_node=2", "trainer.backend=ray", "ray_init.num_cpus=2"
    )
    compare(local, remote, 0.0)
