"""The three answers of a report: what they say of runs made so that the answer is known."""

import random
import re

import pytest

from meshrl.telemetry.diagnosis import BAD, GOOD, OPEN, WATCH, health, learning, time_spent, verdicts


def run(count=50, **metrics):
    """Records whose metrics are functions of the step; `__` stands for the slash of a name."""
    return [
        {"step": step, **{name: f(step) if callable(f) else f for name, f in metrics.items()}}
        for step in range(1, count + 1)
    ]


def noisy(mean, noise=0.02, seed=0):
    rng = random.Random(seed)
    return lambda step: (mean(step) if callable(mean) else mean) + rng.gauss(0, noise)


SCORE, VALIDATION = "critic/score/mean", "val-core/sort/acc/mean@1"


def test_a_rising_reward_is_learning_and_rests_on_its_numbers():
    found = learning(run(**{SCORE: noisy(lambda step: step / 100)}))
    assert (found.level, found.answer) == (GOOD, "Yes")
    start, end = (float(x) for x in re.search(r"from ([\d.]+) .* to ([\d.]+)", found.text).groups())
    assert start == pytest.approx(0.055, abs=0.03)
    assert end == pytest.approx(0.455, abs=0.03)
    assert found.checks[0].metric == SCORE


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_not_learning(seed):
    assert learning(run(**{SCORE: noisy(0.5, seed=seed)})).level == WATCH


def test_a_falling_reward_is_not_learning():
    found = learning(run(**{SCORE: noisy(lambda step: 1 - step / 100)}))
    assert (found.level, found.answer) == (BAD, "No")
    assert "fell" in found.text


def test_a_constant_reward_is_not_learning():
    assert learning(run(**{SCORE: 0.0})).level == WATCH


def test_few_steps_are_too_few():
    found = learning(run(3, **{SCORE: lambda step: step}))
    assert (found.level, found.answer) == (OPEN, "Too early")
    assert "3 steps" in found.text


def test_a_validation_that_falls_while_the_reward_rises_is_named():
    records = run(**{SCORE: noisy(lambda step: step / 100)})
    records[0][VALIDATION], records[40][VALIDATION] = 0.5, 0.4
    found = learning(records)
    assert (found.level, found.answer) == (WATCH, "Only in training")
    assert "0.500 → 0.400" in found.text
    first = VALIDATION.replace("val-core/", "val-core/another_")
    records = [record | {first: float(record["step"])} if VALIDATION in record else record for record in records]
    records = [dict(sorted(record.items())) for record in records]
    assert "0.500 → 0.400" in learning(records).text
    records[40][VALIDATION] = 0.6
    assert learning(records).level == GOOD


def test_a_validation_that_rises_alone_is_a_perhaps():
    for mean, level, answer in ((0.5, OPEN, "Perhaps"), (lambda step: 1 - step / 100, WATCH, "Only on validation")):
        records = run(**{SCORE: noisy(mean)})
        records[0][VALIDATION], records[40][VALIDATION] = 0.3, 0.7
        found = learning(records)
        assert (found.level, found.answer) == (level, answer)
        assert "0.300 → 0.700" in found.text


def test_accuracy_is_better_when_it_is_higher_also_in_a_run_without_a_reward():
    records = run(**{"train/loss": noisy(lambda step: 2 - step / 50)})
    records[0][VALIDATION], records[40][VALIDATION] = 0.1, 0.3
    found = learning(records)
    assert (found.level, found.answer) == (GOOD, "Yes")
    records[40][VALIDATION] = 0.05
    assert (learning(records).level, learning(records).answer) == (WATCH, "Only in training")


def test_supervised_runs_are_judged_by_their_loss():
    assert learning(run(**{"train/loss": noisy(lambda step: 2 - step / 50)})).level == GOOD
    assert learning(run(**{"train/loss": noisy(lambda step: 1 + step / 50)})).level == BAD


HEALTHY = {
    "training/rollout_log_prob_diff_mean": 1e-7,
    "actor/entropy": lambda step: 1 - step / 100,
    "actor/ppo_kl": 1e-3,
    "actor/pg_clipfrac": 0.02,
    "training/zero_advantage_share": 0.4,
    "actor/grad_norm": noisy(1.0),
    "gates/warnings": 0.0,
    "critic/vf_explained_var": 0.3,
    "response_length/clip_ratio": 0.01,
}


def test_a_healthy_run_says_so_with_numbers():
    found = health(run(**HEALTHY))
    assert (found.level, found.answer) == (GOOD, "Yes")
    assert f"all {len(HEALTHY)} checks" in found.text
    assert "1.00e-07" in found.text
    assert {check.metric for check in found.checks} == set(HEALTHY)


@pytest.mark.parametrize(
    ("name", "value", "level", "words"),
    [
        ("training/rollout_log_prob_diff_mean", 0.02, WATCH, "0.020 nats"),
        ("training/rollout_log_prob_diff_mean", 0.2, BAD, "0.200 nats, above 0.050"),
        ("actor/entropy", lambda step: 1.0 if step < 20 else 1e-4, WATCH, "hardly explores"),
        ("actor/entropy", lambda step: 0.5 if step < 20 else 3, WATCH, "it grows"),
        ("actor/ppo_kl", -0.5, BAD, "above 0.1"),
        ("actor/pg_clipfrac", 0.3, WATCH, "clip fraction 0.300"),
        ("training/zero_advantage_share", 0.95, WATCH, "0.950"),
        ("actor/grad_norm", lambda step: 90.0 if step == 45 else 1.0, WATCH, "90, usual 1"),
        ("gates/warnings", 2.0, WATCH, "numeric gates: 2"),
        ("critic/vf_explained_var", -0.2, WATCH, "-0.200"),
        ("response_length/clip_ratio", 0.6, BAD, "60%"),
        ("training/nonfinite_metrics", lambda step: float(step == 3), BAD, "NaN or infinite: 1"),
        ("reward/errors", 2.0, WATCH, "reward function failed"),
    ],
)
def test_each_illness_is_found_and_named(name, value, level, words):
    found = health(run(**{**HEALTHY, name: value}))
    assert found.level == level
    assert words in found.text
    assert found.checks[0].metric == name


def test_stale_samples_may_differ_more():
    name = "training/rollout_log_prob_diff_mean"
    for stale, difference, level in ((0.0, 0.03, WATCH), (0.8, 0.03, GOOD), (0.8, 0.08, WATCH), (0.8, 0.3, BAD)):
        found = health(run(**{**HEALTHY, name: difference, "training/staleness_mean": stale}))
        assert found.level == level
        assert any(("on stale samples" in check.text) == (stale > 0) for check in found.checks if check.metric == name)


def test_the_last_token_decides_whether_an_answer_was_cut():
    # Answers that end by themselves exactly at the maximum are not cut.
    records = run(**{**HEALTHY, "response_length/clip_ratio": 1.0})
    kept = [{"step": step, "finish": {"stop": 9, "length": 1}} for step in range(1, 51)]
    assert health(records).level == BAD
    found = health(records, kept)
    assert found.level == GOOD
    assert any("10% of the answers" in check.text for check in found.checks)


def test_time_names_the_largest_and_the_second():
    found = time_spent(run(**{"timing_s/gen": 3.0, "timing_s/update_actor": 1.0, "timing_s/step": 4.0}))
    assert (found.level, found.answer) == (GOOD, "Mostly gen")
    assert "75% of a step (3 of 4 s), then update_actor 25%" in found.text


def test_waiting_workers_and_gaps_of_the_ledger_are_named():
    names = {
        "ledger_s/controller/wait_rollout": 3.9,
        "ledger_s/controller/other": 0.1,
        "ledger_s/actor_rollout_ref/update_backward": 2.0,
        "ledger_s/actor_rollout_ref/wait_rollout": 2.0,
        "ledger/actor_rollout_ref/booked": 0.9,
    }
    found = time_spent(run(**names))
    assert found.level == WATCH
    assert "actor_rollout_ref waits for 50%" in found.text
    assert "sums to 90.0%" in found.text
    # That the controller waits is what it is for.
    assert "controller waits" not in found.text


def test_whoever_waits_least_sets_the_pace():
    names = {
        "ledger_s/actor_rollout_ref/update_backward": 1.0,
        "ledger_s/actor_rollout_ref/wait_rollout": 3.0,
        "ledger_s/rollout/generate": 3.5,
        "ledger_s/rollout/wait_controller": 0.5,
        "ledger_s/controller/wait_rollout": 4.0,
    }
    found = time_spent(run(**names))
    assert found.answer == "Mostly generate"
    assert "88% of a step of rollout (3.500 of 4 s)" in found.text


def test_steps_that_become_slower_are_named():
    times = {"timing_s/gen": 1.0}
    slow = run(**times, **{"perf/throughput": lambda step: 1000 if step < 25 else 500})
    assert "steps became slower" in time_spent(slow).text
    assert time_spent(run(**times, **{"perf/throughput": noisy(1000, 50)})).level == GOOD


def test_a_run_without_anything_leaves_all_open():
    assert [found.level for found in verdicts([])] == [OPEN] * 3
    assert [found.level for found in verdicts([{"step": 1, "foo": 1.0}])] == [OPEN] * 3
