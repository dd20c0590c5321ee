"""Runs of a mixture of experts that replay routes: those of the rollout (R3), or of the pass for old log-probs (R2)."""

import pytest

MODE = "actor_rollout_ref.actor.router_replay.mode"
RUN = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    # Nothing that it says is right, so the entropy alone moves its weights.
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "algorithm.rollout_correction.bypass_mode=false",
)
DIFFERENCE, CHANGED = "training/rollout_log_prob_diff_max", "actor/routes_changed"


@pytest.fixture(scope="module")
def experts(task, tmp_path_factory):
    """The override that names a model with experts whose scores are close."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    return task.model_with_experts(folder, num_experts=8, num_hidden_layers=3, initializer_range=0.3)


def steps(run):
    return [row for row in run.metrics if "actor/lr" in row]


def largest_difference(ours, theirs):
    return max(float((ours.weights[name] - weight).abs().max()) for name, weight in theirs.weights.items())


def test_a_rollout_that_rounds_is_followed(task, experts, tmp_path):
    """A rollout in bfloat16 chooses other experts than the trainer, here for 1 of 130 choices, and then says otherwise.

    Replayed, what is left of the difference is rounding.
    """
    rounds = (*RUN, "trainer.total_training_steps=1", "actor_rollout_ref.rollout.dtype=bf16")
    found = {}
    for mode in ("disabled", "R2", "R3"):
        run = task.train(tmp_path / mode, *rounds, experts, f"{MODE}={mode}")
        (found[mode],) = steps(run)
    assert found["R3"][DIFFERENCE] < 0.3 * found["disabled"][DIFFERENCE]
    assert found["R2"][DIFFERENCE] == pytest.approx(found["disabled"][DIFFERENCE], rel=1e-3)
    assert 0.001 < found["R3"][CHANGED] < 0.1
    assert found["R2"][CHANGED] < found["R3"][CHANGED]  # the trainer changes its own mind only after a step
    assert CHANGED not in found["disabled"]


def test_two_processes_equal_one_and_so_do_several_ways_to_generate(task, experts, tmp_path):
    """In float32 nobody disagrees before the first step; after it, choices differ and are replayed on every layout."""
    # So many samples that a small step changes some choices.
    many = (*RUN, "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    replayed = task.train(tmp_path / "one", *many, experts, f"{MODE}=R3")
    assert steps(replayed)[0][DIFFERENCE] < 1e-4
    assert steps(replayed)[1][CHANGED] > 0
    two = task.train(
        tmp_path / "two",
        *many,
        experts,
        f"{MODE}=R3",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.rollout.expert_parallel_size=2",
    )
    assert largest_difference(two, replayed) < 1e-5
    assert steps(two)[1][CHANGED] == pytest.approx(steps(replayed)[1][CHANGED], abs=1e-4)
    plain = task.train(tmp_path / "plain", *many, experts)
    assert largest_difference(plain, replayed) > 1e-7  # the control: routes made a difference
    # Answers that are rewarded as they end come another way.
    overlapped = task.train(tmp_path / "overlapped", *many, experts, f"{MODE}=R3", "reward_manager.overlap=true")
    assert largest_difference(overlapped, replayed) < 1e-5
