"""Numeric gates: each hears its fault, in words that help, and is silent while all is well."""

import json
import math

import pytest
import torch

from meshrl.config.trainer import GatesConfig, limit_problems
from meshrl.data.batch import DataProto
from meshrl.trainer.health_checks import GateError, Gates, non_finite

HEALTHY = {
    "actor/ppo_kl_before": 0.0,
    "training/rollout_log_prob_diff_mean": 1e-4,
    "actor/entropy": 0.8,
    "critic/score/mean": 0.4,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "training/zero_advantage_share": 0.3,
    "actor/grad_norm": 1.5,
}


class Run:
    """Steps through metrics and keeps what was said."""

    def __init__(self, folder, **options):
        self.heard = []
        trainers = options.pop("old_is_trainers", True)
        self.gates = Gates(GatesConfig(**options), folder, say=self.heard.append, old_is_trainers=trainers)
        self.step = 0

    def go(self, **changes):
        self.step += 1
        metrics = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
        found = self.gates.after_step(self.step, metrics)
        self.gates.raise_if_stopped(self.step, metrics | found)
        return {name for name in found if name != "gates/warnings"}, found["gates/warnings"]


@pytest.fixture
def run(tmp_path):
    return lambda **options: Run(tmp_path, **options)


def test_a_healthy_run_is_silent(run):
    steps = run(limits={"actor/grad_norm": 10})
    for _ in range(20):
        assert steps.go() == (set(), 0.0)
    assert steps.heard == []


ONE_REWARD = {"critic__score__max": 0.25, "critic__score__min": 0.25, "critic__score__mean": 0.25}
FAULTS = {
    "off policy": ({}, [{"actor__ppo_kl_before": 0.3}], "first_step", "from its own old log-probs"),
    "off policy by nan": ({}, [{"actor__ppo_kl_before": math.nan}], "first_step", "from its own old log-probs"),
    "wrong weights": ({}, [{"training__rollout_log_prob_diff_mean": 0.7}], "first_step", "on the first step"),
    "drifting apart": ({}, [{}, {"training__rollout_log_prob_diff_mean": 0.7}], "log_prob_diff", "rollout_is"),
    "collapse": ({"patience": 2}, [{}, *[{"actor__entropy": 0.03}] * 2], "entropy_collapse", "down from 0.8"),
    "one reward": (
        {"patience": 2},
        [ONE_REWARD | {"training__zero_advantage_share": 1.0}] * 2,
        "equal_rewards",
        "every sample has the reward 0.25",
    ),
    "failed rewards": (
        {"patience": 2},
        [ONE_REWARD | {"training__zero_advantage_share": 1.0, "reward__errors": 7.0}] * 2,
        "equal_rewards",
        "(7 calls of the reward function failed in the last step",
    ),
    "no group differs": (
        {"patience": 2},
        [{"training__zero_advantage_share": 1.0}] * 2,
        "equal_rewards",
        "no group's rewards differ for 2 steps",
    ),
    "a limit": ({"limits": {"actor/grad_norm": 10}}, [{"actor__grad_norm": 11.0}], "limits", "11, outside  to 10"),
    "a lower limit": (
        {"limits": {"critic/score/mean": {"min": 0.5}}},
        [{}],
        "limits",
        "critic/score/mean is 0.4, outside 0.5 to",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_heard_once_and_counted(run, fault):
    options, steps, gate, words = FAULTS[fault]
    watched = run(**options)
    found = [watched.go(**changes) for changes in steps]
    assert found[-1] == ({f"gates/{gate}"}, 1.0)
    assert all(before == (set(), 0.0) for before in found[:-1])
    (said,) = watched.heard
    assert said.startswith(f"warning ({gate}): step {len(steps)}: ")
    assert " ".join(words.split()) in " ".join(said.split())


@pytest.mark.parametrize("fault", [name for name in FAULTS if "limit" not in name])
@pytest.mark.parametrize("action", ["stop", "off"])
def test_the_config_decides_what_happens(run, tmp_path, fault, action):
    options, steps, gate, _ = FAULTS[fault]
    watched = run(**options, **{gate: action})
    for changes in steps[:-1]:
        watched.go(**changes)
    if action == "off":
        assert watched.go(**steps[-1]) == (set(), 0.0)
        return
    with pytest.raises(GateError, match=rf"Stopped by trainer.gates \({gate}\)"):
        watched.go(**steps[-1])
    said = json.loads((tmp_path / "dumps" / f"step_{len(steps)}" / "finding.json").read_text())
    assert said["gate"] == gate
    assert said["metrics"]["gates/" + gate] == 1.0


def test_a_limit_may_stop(run):
    watched = run(limits={"actor/grad_norm": {"max": 10, "then": "stop"}, "not/there": 1})
    watched.go()
    with pytest.raises(GateError, match="actor/grad_norm is inf"):
        watched.go(actor__grad_norm=math.inf)


def test_a_limit_that_is_to_stop_and_cannot_see_stops(run):
    watched = run(limits={"actor/grad_nrm": {"max": 10, "then": "stop"}})
    watched.go()  # as long as only the critic learns
    with pytest.raises(GateError, match=r"grad_nrm: this step has no such metric, but actor/grad_norm.*then: warn"):
        watched.go(actor__lr=1e-6)


def test_what_is_off_for_a_moment_is_let_pass(run):
    watched = run(patience=2)
    watched.go()
    for _ in range(4):
        assert watched.go(actor__entropy=0.01) == (set(), 0.0)
        assert watched.go() == (set(), 0.0)


def test_equal_rewards_that_still_teach_are_let_pass(run):
    """As with the KL in the reward, or a critic."""
    watched = run(patience=1)
    for _ in range(3):
        assert watched.go(**ONE_REWARD) == (set(), 0.0)


def test_steps_on_which_nothing_was_measured_say_nothing(run):
    measured = ("actor/ppo_kl_before", "training/rollout_log_prob_diff_mean", "actor/entropy")
    watched = run(patience=2)
    bare = {name: value for name, value in HEALTHY.items() if name not in measured}
    for step in range(3):
        assert watched.gates.after_step(step, bare) == {"gates/warnings": 0.0}
    # The first step that has numbers is the first one for the gates.
    assert watched.go(actor__ppo_kl_before=0.3) == ({"gates/first_step"}, 1.0)
    watched.go(actor__entropy=0.01)
    watched.gates.after_step(9, bare)
    assert watched.go(actor__entropy=0.01) == ({"gates/entropy_collapse"}, 2.0)


def test_rollout_log_probs_as_old_ones_are_not_held_to_zero(run):
    assert run(old_is_trainers=False).go(actor__ppo_kl_before=0.05) == (set(), 0.0)


def test_the_same_is_said_again_after_a_while_only(run):
    watched = run(repeat_every=5)
    for _ in range(11):
        watched.go(training__rollout_log_prob_diff_mean=1.0)
    # The first step's, then at steps 2 and 7.
    assert [said.split(":")[1].strip() for said in watched.heard] == ["step 1", "step 2", "step 7"]


def batch_of():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    names = ("token_level_scores", "advantages", "old_log_probs", "values")
    return DataProto.from_dict({"response_mask": mask, **{name: torch.zeros(2, 3) for name in names}})


def test_nan_where_it_counts_stops_with_the_batch(tmp_path):
    gates = Gates(GatesConfig(), tmp_path)
    batch = batch_of()
    batch.batch["values"][1, 2] = math.nan  # padding: does not matter
    gates.check_batch(batch, 3)
    batch.batch["advantages"][1, 0] = math.inf
    batch.batch["token_level_scores"][0, 2] = math.nan
    assert non_finite(batch) == {"token_level_scores": (1, 0), "advantages": (1, 1)}
    with pytest.raises(GateError, match="advantages: 1 values, first in sample 1"):
        gates.check_batch(batch, 4)
    kept = DataProto.load_from_disk(tmp_path / "dumps" / "step_4" / "batch.dataproto")
    assert math.isinf(kept.batch["advantages"][1, 0])


def test_nan_may_only_warn(tmp_path):
    heard = []
    gates = Gates(GatesConfig(non_finite="warn"), tmp_path, say=heard.append)
    batch = batch_of()
    batch.batch["advantages"][0, 0] = math.nan
    gates.check_batch(batch, 1)
    assert len(heard) == 1
    assert not (tmp_path / "dumps").exists()
    Gates(GatesConfig(non_finite="off"), tmp_path, say=heard.append).check_batch(batch, 1)
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("high", "needs a number"),
        ({"then": "stop"}, "needs a number"),
        ({"max": 1, "min": 2}, "is above max"),
        ({"max": 1, "then": "shout"}, "must be warn or stop"),
        ({"most": 1}, "has no most"),
    ],
)
def test_limits_that_say_nothing_are_refused(entry, words):
    (problem,) = limit_problems(GatesConfig(limits={"a/b": entry}))
    assert words in problem
    assert limit_problems(GatesConfig(limits={"a/b": 1, "c": {"min": -1.0, "then": "stop"}})) == []


def test_a_limit_of_no_metric_is_told_once_and_names_the_nearest(run):
    steps = run(limits={"actor/grad_nrm": 1, "val-core/x/acc/mean@1": {"min": 0.1, "then": "stop"}})
    assert steps.go() == (set(), 0.0)  # as long as only the critic learns
    assert steps.go(actor__lr=1e-6)[0] == {"gates/limits"}
    assert steps.go(actor__lr=1e-6)[0] == set()
    (heard,) = steps.heard
    assert "trainer.gates.limits.actor/grad_nrm: this step has no such metric, but actor/grad_norm" in heard
