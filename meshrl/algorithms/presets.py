"""Presets of known algorithms: the config values of estimator, loss, clip range and aggregation for each algorithm."""

from typing import Any

from meshrl.registry import unknown_name

_ACTOR = "actor_rollout_ref.actor"

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm.adv_estimator": "gae",
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.loss_agg_mode": "token-mean",
    },
    "grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{_ACTOR}.use_kl_loss": True,
        f"{_ACTOR}.kl_loss_type": "low_var_kl",
    },
    # arXiv:2503.20783: the gradient is scaled neither by the group's std nor by the response length.
    "dr_grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{_ACTOR}.use_kl_loss": False,
    },
    # arXiv:2503.14476: higher upper clip, token mean, no groups of equal reward, a penalty on long responses.
    "dapo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.filter_groups.enable": True,
        "algorithm.use_kl_in_reward": False,
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio_low": 0.2,
        f"{_ACTOR}.clip_ratio_high": 0.28,
        f"{_ACTOR}.clip_ratio_c": 10.0,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.use_kl_loss": False,
        "reward_manager.name": "dapo",
    },
    "gspo": {
        "algorithm.adv_estimator": "grpo",
        f"{_ACTOR}.policy_loss.loss_mode": "gspo",
        f"{_ACTOR}.clip_ratio_low": 3e-4,
        f"{_ACTOR}.clip_ratio_high": 4e-4,
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{_ACTOR}.use_kl_loss": False,
    },
    "gmpo": {
        "algorithm.adv_estimator": "grpo",
        f"{_ACTOR}.policy_loss.loss_mode": "geo_mean",
        f"{_ACTOR}.clip_ratio_low": 0.4,
        f"{_ACTOR}.clip_ratio_high": 0.4,
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{_ACTOR}.use_kl_loss": False,
    },
    "rloo": {
        "algorithm.adv_estimator": "rloo",
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.use_kl_loss": False,
    },
}


def get_preset(name: str) -> dict[str, Any]:
    """Return a copy of the preset `name`: config values of the algorithm by dotted keys."""
    if name not in PRESETS:
        raise unknown_name("algorithm preset", name, list(PRESETS))
    return dict(PRESETS[name])
