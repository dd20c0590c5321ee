"""Runs whose rollouts are cut over the trainer's ranks equal runs in which every rank is a rollout."""

import pytest
import torch
from test_layouts import UNEVEN, compare

SHORT = (
    *UNEVEN,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200",
    "actor_rollout_ref.rollout.max_num_seqs=20",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
)
TWO, FOUR = "trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node=4"
SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("whole"), *SHORT, TWO)


def compare_weights(left, right):
    for name, weight in left.weights.items():
        torch.testing.assert_close(right.weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [TWO, FOUR], ids=["one rollout of two", "two rollouts of two"])
def test_a_run_with_cut_rollouts_is_the_same_run(task, whole, tmp_path, size):
    cut = task.train(tmp_path / "cut", *SHORT, size, SPLIT)
    compare(whole, cut, 1e-5)
    if size == TWO:  # a part of the model arrives on each rank, not all of it
        bytes_of = "weight_sync/received_bytes"
        assert 0 < cut.metrics[-1][bytes_of] < 0.75 * whole.metrics[-1][bytes_of]


def test_scoring_beside_generation_works_with_cut_rollouts(task, whole, tmp_path):
    beside = task.train(tmp_path / "beside", *SHORT, TWO, SPLIT, "reward_manager.overlap=true")
    for ours, theirs in zip(whole.metrics, beside.metrics, strict=True):
        for name in ("critic/score/mean", "response_length/mean"):
            assert theirs.get(name) == pytest.approx(ours.get(name), abs=1e-6)
    compare_weights(whole, beside)


def test_cut_rollouts_on_devices_of_their_own(task, whole, tmp_path):
    own = ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1")
    apart = task.train(tmp_path / "apart", *SHORT, SPLIT, *own, "actor_rollout_ref.rollout.n_gpus_per_node=4")
    compare_weights(whole, apart)


def test_the_comparison_can_fail(task, whole, tmp_path):
    other = task.train(tmp_path / "off", *SHORT, TWO, SPLIT, "actor_rollout_ref.actor.clip_ratio_high=0.0001")
    with pytest.raises(AssertionError):
        compare(whole, other, 1e-5)


def test_a_run_whose_rollout_has_its_experts_on_two_ranks(task, tmp_path):
    model = task.model_with_experts(tmp_path / "model", num_experts=4, num_hidden_layers=2, initializer_range=0.1)
    spread = (model, "actor_rollout_ref.rollout.expert_parallel_size=2")
    # Nothing that it says is right, so the entropy alone moves its weights.
    more = ("actor_rollout_ref.actor.entropy_coeff=0.1", "algorithm.rollout_correction.bypass_mode=false")
    run = task.train(tmp_path / "run", *SHORT, TWO, *spread, *more)
    rows = [row for row in run.metrics if "training/rollout_log_prob_diff_max" in row]
    assert len(rows) == 2
    for row in rows:  # one rollout, with the weights that the trainer has in every step
        assert row["training/rollout_log_prob_diff_max"] < 1e-4
        assert row["weight_sync/received_bytes"] < 1.6 * sum(w.nbytes for w in run.weights.values()) / 2
        assert row["actor/grad_norm"] > 0
