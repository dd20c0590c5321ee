"""Generation on devices of its own: synchronous runs give the numbers of colocated ones, others keep their bound."""

import pytest
import torch
from test_layouts import UNEVEN, WITH_REFERENCE, compare

SEPARATE = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
)
# Log-probs depend in their last bit on how many samples are computed at once: to the bit means one rollout for one.
ONE = (*SEPARATE, "actor_rollout_ref.rollout.n_gpus_per_node=1")
LONGER = (*UNEVEN, "trainer.total_training_steps=6", "trainer.test_freq=-1", "trainer.val_before_train=false")


def steps(run, name):
    return [row[name] for row in run.metrics if name in row]


@pytest.fixture(scope="module")
def together(task, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("together") / "run", *UNEVEN, *WITH_REFERENCE)


def test_without_staleness_separate_devices_equal_shared_ones(task, together, tmp_path):
    apart = task.train(tmp_path / "apart", *UNEVEN, *WITH_REFERENCE, *ONE)
    compare(together, apart, 0.0)
    assert max(steps(apart, "training/staleness_max")) == 0
    assert not steps(apart, "rollout_corr/rollout_is_mean")


def test_ray_runs_separate_devices_as_well(task, together, tmp_path):
    pytest.importorskip("ray")
    ray = ("trainer.backend=ray", "ray_init.num_cpus=2")
    apart = task.train(tmp_path / "apart", *UNEVEN, *WITH_REFERENCE, *ONE, *ray)
    compare(together, apart, 0.0)


def test_two_trainers_feed_two_rollouts_that_run_ahead(task, tmp_path):
    run = task.train(
        tmp_path / "run",
        *LONGER,
        *SEPARATE,
        "trainer.n_gpus_per_node=2",
        "async_training.max_staleness=2",
        "algorithm.rollout_correction.bypass_mode=false",
    )
    assert steps(run, "training/staleness_max")[0] == 0
    assert 1 <= max(steps(run, "training/staleness_max")) <= 2
    assert sum(steps(run, "training/stale_dropped")) == 0
    # Importance weights are on by themselves, and at the first step they have nothing to correct.
    weights = steps(run, "rollout_corr/rollout_is_mean")
    assert len(weights) == 6
    assert weights[0] == pytest.approx(1, abs=1e-4)
    assert max(abs(weight - 1) for weight in weights) > 1e-4
    assert all(torch.isfinite(weight).all() for weight in run.weights.values())
    for who in ("controller", "actor_rollout_ref", "rollout"):
        assert steps(run, f"ledger/{who}/booked") == pytest.approx([1.0] * 6, abs=0.01)
    # Rollouts that run ahead generate, and what they wait for has a name.
    assert max(steps(run, "ledger_s/rollout/generate")) > 0
    assert not [name for row in run.metrics for name in row if "wait_workers" in name]


def test_answers_that_are_finished_first_have_one_version(task, tmp_path):
    ahead = ("async_training.max_staleness=1", "actor_rollout_ref.rollout.max_num_seqs=2")
    run = task.train(tmp_path / "run", *LONGER, *SEPARATE, *ahead, "async_training.partial_rollout=false")
    assert max(steps(run, "training/staleness_max")) <= 1
    assert max(steps(run, "training/partial_share")) == 0


def test_what_became_too_old_is_dropped_and_counted(task, tmp_path):
    ahead = ("async_training.batches_ahead=2", "async_training.max_staleness=1")
    run = task.train(
        tmp_path / "run",
        *LONGER,
        *SEPARATE,
        *ahead,
        "async_training.partial_rollout=false",
        "trainer.total_training_steps=5",
    )
    # Batches 1, 2, 3 are begun with version 0; at step 3, with version 2, the third is too old and goes whole. How many
    # more do depends on when the rollout hears of them.
    assert max(steps(run, "training/staleness_max")) <= 1
    dropped = steps(run, "training/stale_dropped")
    assert sum(dropped) > 0
    assert set(dropped) <= {0, 48, 96}
    assert min(steps(run, "actor/grad_norm")) > 0
