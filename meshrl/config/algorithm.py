"""`algorithm.*`: advantages, KL in the reward, and corrections between rollout and trainer."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.actor import KL_CHOICES
from meshrl.config.conditions import equals
from meshrl.config.key import key, section
from meshrl.registry import ADVANTAGE_ESTIMATORS

GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
# These weigh each step by the squared length of the logits' gradient, which only the trainer's own pass knows.
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
ESTIMATORS = ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax", "distillation")


@dataclass
class KLCtrlConfig:
    type: str = key("fixed", "Keep the coefficient, or steer it to target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "Weight of the KL in the reward (at the start).", low=0, high=100)
    horizon: float = key(10000.0, "Samples over which adaptive control acts.", low=1, high=1e12)
    target_kl: float = key(0.1, "KL that adaptive control aims at.", low=0, high=100)


# Metrics of `filter_groups` that stand for the whole score.
WHOLE_SCORE = ("seq_reward", "seq_final_reward", "score")


@dataclass
class FilterGroupsConfig:
    enable: bool = key(False, "Drop groups whose samples are all alike and generate more (DAPO).")
    metric: str | None = key(
        None,
        "What must differ: seq_reward, or what the reward function returns; null: its acc, else seq_reward.",
    )
    max_num_gen_batches: int = key(
        0,
        "Most rounds of generation for one step, then the run stops; 0: as many as an epoch has.",
        low=0,
        high=1_000_000,
    )


@dataclass
class RolloutCorrectionConfig:
    bypass_mode: bool = key(False, "Take the rollout's log-probs as the old ones instead of recomputing them.")
    rollout_is: str | None = key(
        None,
        "Importance weights of old_log_probs over the rollout's; null: token where stale or in 8 bits.",
        choices=("token", "sequence", "off"),
    )
    rollout_is_threshold: float | int | str = key(
        2.0, "Upper bound of those weights; as 0.5_5.0 weights outside become 0.", low=0, high=1e6
    )
    rollout_is_batch_normalize: bool = key(False, "Scale those weights so that their mean over the batch is 1.")
    rollout_rs: str | None = key(None, "Rejection of samples far from the trainer's policy, such as seq_mean_k3.")
    rollout_rs_threshold: float | int | str | None = key(
        None, "Bound of that rejection; for k1 also as lower_upper, for several modes one each.", low=0, high=1e6
    )
    loss_type: str = key(
        "ppo_clip",
        "Loss with bypass_mode: the ratio to the rollout clipped, or the plain gradient (weighted by rollout_is).",
        choices=("ppo_clip", "reinforce"),
    )


@dataclass
class AlgorithmConfig:
    adv_estimator: str = key(
        "gae",
        "Advantage estimator; one of your own as file.py:name, or a name that model.external_lib registers.",
        choices=ESTIMATORS,
        registry=ADVANTAGE_ESTIMATORS,
    )
    adv_kwargs: dict[str, Any] = key({}, "Keyword arguments of an estimator of your own.")
    gamma: float = key(1.0, "Discount per token.", low=0, high=1)
    lam: float = key(1.0, "GAE's lambda.", low=0, high=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide GRPO's advantages by the group's standard deviation.")
    norm_adv_std_over: str = key(
        "group",
        "Whose standard deviation that is: that of the group's rewards, or of the whole batch's (grpo).",
        choices=("group", "batch"),
        only_if=equals(".norm_adv_by_std_in_grpo", True),
    )
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference from the reward.")
    kl_penalty: str = key("kl", "Estimator of that KL.", choices=KL_CHOICES)
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "Coefficient of that KL.")
    distillation_coef: float = key(
        0.0,
        "Weight of a teacher beside the rewards: its log-prob of a token less the policy's goes into the advantage.",
        low=0,
        high=100,
    )
    gdpo_reward_keys: list[str] = key(
        [],
        "gdpo: rewards to normalise one by one, among what the functions return; empty: each function's score.",
    )
    gdpo_reward_weights: list[float] = key(
        [], "gdpo: their weights; empty: 1, or the functions' own.", low=-1e6, high=1e6
    )
    mask_truncated_responses: bool = key(
        False, "Leave answers that the length limit cut off out of the losses; they still count in their groups."
    )
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling.")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "What is done about differences between rollout and trainer."
    )
