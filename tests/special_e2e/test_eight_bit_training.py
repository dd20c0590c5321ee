"""Runs that train with products of 8-bit floats: measured against the rollout, corrected, the same on two ranks."""

import pytest
from test_eight_bit_rollout import DIFFERENCE, EIGHT, RUN, differences

PRODUCTS = "actor_rollout_ref.actor.fsdp_config.mixed_precision.product_dtype=fp8"


def test_rollouts_in_16_bits_and_in_8(task, tmp_path):
    run = task.train(tmp_path / "eight", *RUN, PRODUCTS)
    first, *_, last = differences(run)
    assert 1e-4 < first < 0.1
    assert last < 3 * first
    rows = [row for row in run.metrics if DIFFERENCE in row]
    assert all(row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1) for row in rows)
    # The same start on two ranks: tokens, and how they are rounded.
    two = task.train(tmp_path / "two", *RUN, PRODUCTS, "trainer.n_gpus_per_node=2")
    assert differences(two)[0] == pytest.approx(first, rel=0.05)
    norms = [next(row["actor/grad_norm"] for row in made.metrics if DIFFERENCE in row) for made in (run, two)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    # Rollouts that round as well are nearly the trainer's policy, also after updates.
    both = task.train(tmp_path / "both", *RUN, PRODUCTS, EIGHT)
    assert max(differences(both)) < 0.1 * first


def test_a_reference_rounds_as_the_policy_does(task, tmp_path):
    """At the first step they are the same model: no divergence comes from rounding."""
    run = task.train(tmp_path, *RUN, PRODUCTS, "actor_rollout_ref.actor.use_kl_loss=true")
    first = next(row for row in run.metrics if "actor/kl_loss" in row)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
