"""Estimators and losses of RL post-training as pure tensor functions."""

from meshrl.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    compute_advantage,
    compute_distillation_advantage,
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    estimator_takes,
    get_adv_estimator_fn,
    register_adv_est,
)
from meshrl.algorithms.aggregation import LOSS_AGG_MODES, agg_loss
from meshrl.algorithms.covariance_losses import (
    COVARIANCE_LOSSES,
    add_covariance_stats,
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    compute_policy_loss_m2po,
)
from meshrl.algorithms.entropy import compute_entropy_loss, entropy_from_logits
from meshrl.algorithms.group_advantages import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from meshrl.algorithms.groups import group_metrics, informative_samples
from meshrl.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    compute_kl_loss,
    get_kl_controller,
    kl_penalty,
)
from meshrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from meshrl.algorithms.off_policy_losses import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_decoupled,
    compute_policy_loss_icepop,
    compute_policy_loss_topr,
)
from meshrl.algorithms.policy_config import PolicyLossConfig
from meshrl.algorithms.policy_losses import (
    POLICY_LOSSES,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    is_zero_where_advantage_is_zero,
    log_ratio,
    reduce_policy_loss,
    register_policy_loss,
)
from meshrl.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    compute_answer_scores,
    compute_kto_loss,
    compute_preference_loss,
)
from meshrl.algorithms.presets import PRESETS, get_preset
from meshrl.algorithms.rollout_correction import (
    ROLLOUT_RS_MODES,
    RolloutCorrectionConfig,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from meshrl.algorithms.stats import BatchStats, CovarianceStats
from meshrl.algorithms.token_baselines import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from meshrl.algorithms.trust_region_losses import (
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_sapo,
)
from meshrl.algorithms.value_loss import compute_value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "COVARIANCE_LOSSES",
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "PRESETS",
    "ROLLOUT_RS_MODES",
    "AdaptiveKLController",
    "BatchStats",
    "CovarianceStats",
    "FixedKLController",
    "KLController",
    "PolicyLossConfig",
    "RolloutCorrectionConfig",
    "add_covariance_stats",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_answer_scores",
    "compute_distillation_advantage",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_kl_loss",
    "compute_kto_loss",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_offpolicy_metrics",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_decoupled",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_icepop",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_m2po",
    "compute_policy_loss_sapo",
    "compute_policy_loss_topr",
    "compute_policy_loss_vanilla",
    "compute_preference_loss",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_value_loss",
    "entropy_from_logits",
    "estimator_takes",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_preset",
    "group_metrics",
    "informative_samples",
    "is_zero_where_advantage_is_zero",
    "kl_penalty",
    "log_ratio",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "reduce_policy_loss",
    "register_adv_est",
    "register_policy_loss",
]
