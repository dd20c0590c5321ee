"""What the two packages export, what importing them costs, and the presets."""

import subprocess
import sys

import pytest

import meshrl.algorithms
import meshrl.balance
from meshrl.algorithms import ADVANTAGE_ESTIMATORS, LOSS_AGG_MODES, POLICY_LOSSES, PRESETS, get_preset

PORTED_NAMES = [
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "agg_loss",
    "kl_penalty",
    "get_policy_loss_fn",
    "get_adv_estimator_fn",
    "register_policy_loss",
    "register_adv_est",
    "compute_value_loss",
    "AdaptiveKLController",
    "FixedKLController",
    "get_kl_controller",
    "apply_kl_penalty",
]


def test_exports() -> None:
    for package in (meshrl.algorithms, meshrl.balance):
        assert all(hasattr(package, name) for name in package.__all__)
    assert set(PORTED_NAMES) <= set(meshrl.algorithms.__all__)
    assert set(POLICY_LOSSES) >= {
        "vanilla",
        "gspo",
        "sapo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "geo_mean",
        "cispo",
        "dppo_tv",
        "dppo_kl",
        "dro",
        "decoupled",
        "icepop",
        "bypass_mode",
    }


def test_import_brings_nothing_heavy() -> None:
    """Beyond torch itself the import takes little and loads no library of the rest of the system."""
    program = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"
        "import meshrl.algorithms, meshrl.balance\n"
        "took = time.process_time() - start\n"
        "heavy = {'transformers', 'ray', 'tensordict', 'omegaconf', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not any(m.startswith('meshrl.data') for m in sys.modules)\n"
        "assert took < 1.0, took\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_presets_name_real_things() -> None:
    for name in PRESETS:
        preset = get_preset(name)
        assert preset["algorithm.adv_estimator"] in ADVANTAGE_ESTIMATORS
        assert preset["actor_rollout_ref.actor.policy_loss.loss_mode"] in POLICY_LOSSES
        assert preset["actor_rollout_ref.actor.loss_agg_mode"] in LOSS_AGG_MODES
    dr_grpo = get_preset("dr_grpo")
    assert dr_grpo["algorithm.norm_adv_by_std_in_grpo"] is False
    assert dr_grpo["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum-norm"
    dr_grpo.clear()
    assert get_preset("dr_grpo"), "a preset is a copy"
    with pytest.raises(ValueError, match="did you mean 'dapo'"):
        get_preset("dappo")
