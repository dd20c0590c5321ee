"""`algorithm.*`: advantages, KL in the reward, and corrections between rollout and trainer."""

from dataclasses import dataclass

from meshrl.config.actor import KL_CHOICES
from meshrl.config.key import key, section

CORRECTION = "rollout correction inside the loss"
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
PENDING_ESTIMATORS = {
    "gdpo": "several rewards per sample",
    "remax": "greedy baseline rollouts",
    "optimal_token_baseline": "gradient norms per token",
    "tir_optimal_token_baseline": "gradient norms per token",
}


@dataclass
class KLCtrlConfig:
    type: str = key("fixed", "Keep the coefficient, or steer it to target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "Weight of the KL in the reward (at the start).", low=0)
    horizon: float = key(10000, "Samples over which adaptive control acts.", low=1)
    target_kl: float = key(0.1, "KL that adaptive control aims at.", low=0)


@dataclass
class FilterGroupsConfig:
    enable: bool = key(False, "Drop groups of equal reward and generate more (DAPO).")
    metric: str | None = key(None, "What must differ within a group.")
    max_num_gen_batches: int = key(0, "Most rounds of generation; 0: no limit.", low=0)


@dataclass
class RolloutCorrectionConfig:
    bypass_mode: bool = key(False, "Take the rollout's log-probs as the old ones instead of recomputing them.")
    rollout_is: str | None = key(
        None,
        "Importance weights of old_log_probs over the rollout's; null: token if samples may be stale, else off.",
        choices=("token", "sequence", "off"),
    )
    rollout_is_threshold: float = key(2.0, "Upper bound of those weights.", low=0)
    rollout_rs: str | None = key(None, "Rejection of samples far from the trainer's policy, such as seq_mean_k3.")
    rollout_rs_threshold: float | None = key(None, "Bound of that rejection.", low=0)
    loss_type: str = key("ppo_clip", "Loss with bypass_mode.", choices=("ppo_clip", "reinforce"), pending=CORRECTION)


@dataclass
class AlgorithmConfig:
    adv_estimator: str = key(
        "gae",
        "Advantage estimator.",
        choices=("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", *PENDING_ESTIMATORS),
        pending=PENDING_ESTIMATORS,
    )
    gamma: float = key(1.0, "Discount per token.", low=0, high=1)
    lam: float = key(1.0, "GAE's lambda.", low=0, high=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide GRPO's advantages by the group's standard deviation.")
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference from the reward.")
    kl_penalty: str = key("kl", "Estimator of that KL.", choices=KL_CHOICES)
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "Coefficient of that KL.")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling.", pending="dynamic sampling")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "What is done about differences between rollout and trainer."
    )
