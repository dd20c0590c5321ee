"""The sections of the trained and scoring models of `meshrl train`.

* `actor_rollout_ref.actor.*`: the policy's update.
* `actor_rollout_ref.ref.*`: the reference model (or teacher).
* `critic.*`: the value model of PPO.
* `reward_model.*`: a model that scores responses.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from meshrl.config.engine import (
    BY_SAMPLES,
    BY_TOKENS,
    STRATEGIES,
    CheckpointConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    OwnDevices,
)
from meshrl.config.keys import (
    ACTOR,
    MODEL,
    MOST_RANKS,
    MOST_ROWS,
    MOST_STEPS,
    MOST_TOKENS,
    REF,
    above,
    all_of,
    any_of,
    equals,
    fact,
    key,
    section,
)
from meshrl.registry import POLICY_LOSSES as REGISTERED_LOSSES

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
POLICY_LOSSES = (
    "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro",
    "decoupled", "icepop", "m2po", "topr", "bypass_mode",
)  # fmt: skip
# Holds if the run needs reference log-probs: for a KL term, or for distillation from a teacher.
COMPARED = any_of(
    equals(f"{ACTOR}.use_kl_loss", True),
    equals("algorithm.use_kl_in_reward", True),
    equals("algorithm.adv_estimator", "distillation"),
    above("algorithm.distillation_coef", 0),
)
HAS_REFERENCE_MODEL = all_of(
    COMPARED,
    fact(
        f"a reference beside the policy: `{REF}.model.path`, or a policy without adapters (`{MODEL}.lora_rank`=0)",
        (f"{REF}.model.path", f"{MODEL}.lora_rank"),
        lambda config: (
            config.actor_rollout_ref.ref.model.path is not None or not config.actor_rollout_ref.model.has_adapters
        ),
    ),
)
# Keys directly under `ref` that set a layout for the reference; the others are in its FSDP and Megatron sections.
OWN_SIZES = ("strategy", "ulysses_sequence_parallel_size", "context_parallel_size")
OWN = "As the actor's key, for a reference on devices of its own; null: what that says."
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
REPLAY_MODES = ("disabled", "R2", "R3")
KL_CHOICES = KL_ESTIMATORS + tuple(f"{name}+" for name in KL_ESTIMATORS)


@dataclass
class PolicyLossConfig:
    loss_mode: str = key(
        "vanilla",
        "Policy loss; one of your own as file.py:name, or a name that model.external_lib registers.",
        choices=POLICY_LOSSES,
        registry=REGISTERED_LOSSES,
    )
    loss_kwargs: dict[str, Any] = key({}, "Keyword arguments of a loss of your own.")
    tau_pos: float = key(1.0, "sapo: temperature of the gate at positive advantages.", low=0, high=1000)
    tau_neg: float = key(1.05, "sapo: temperature of the gate at negative advantages.", low=0, high=1000)
    clip_cov_ratio: float = key(0.0002, "clip_cov: share of tokens taken out of the gradient.", low=0, high=1)
    clip_cov_lb: float = key(1.0, "clip_cov: lower bound of the covariance of such tokens.", low=-1e6, high=1e6)
    clip_cov_ub: float = key(5.0, "clip_cov: upper bound of the covariance of such tokens.", low=-1e6, high=1e6)
    kl_cov_ratio: float = key(0.0002, "kl_cov: share of tokens that get a KL penalty.", low=0, high=1)
    ppo_kl_coef: float = key(1.0, "kl_cov: weight of that penalty.", low=0, high=1e6)
    dro_beta: float = key(0.1, "dro: weight of the quadratic penalty.", low=0, high=1e6)
    icepop_low: float = key(0.5, "icepop: tokens whose trainer-to-rollout ratio is below are masked.", low=0, high=1e6)
    icepop_high: float = key(5.0, "icepop: tokens whose trainer-to-rollout ratio is above are masked.", low=0, high=1e6)
    behaviour_weight_cap: float = key(5.0, "decoupled: upper bound of the behaviour weights.", low=0, high=1e6)
    m2_threshold: float = key(
        0.04, "m2po: bound of the mean squared log of the trainer-to-rollout ratio.", low=0, high=1000
    )


@dataclass
class RouterReplayConfig:
    mode: str = key(
        "disabled",
        "Mixtures of experts: updates send tokens where the rollout did (R3) or the pass for old log-probs (R2).",
        choices=REPLAY_MODES,
    )


@dataclass
class ActorConfig(EngineConfig):
    ppo_mini_batch_size: int = key(
        256, "Prompts per optimizer step, over all ranks; samples are this times rollout.n.", low=1, high=MOST_ROWS
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward/backward on one rank, unless use_dynamic_bsz.",
        low=1,
        high=MOST_ROWS,
        only_if=BY_SAMPLES,
        noted=True,
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by samples.")
    ppo_max_token_len_per_gpu: int = key(
        16384,
        "Most tokens of a micro-batch on one rank, with use_dynamic_bsz.",
        low=1,
        high=MOST_TOKENS,
        only_if=BY_TOKENS,
        noted=True,
    )
    clip_ratio: float = key(0.2, "PPO's clip range on both sides.", low=0, high=100)
    clip_ratio_low: float | None = key(None, "Clip range below 1.", low=0, follows=f"{ACTOR}.clip_ratio", high=100)
    clip_ratio_high: float | None = key(None, "Clip range above 1.", low=0, follows=f"{ACTOR}.clip_ratio", high=100)
    clip_ratio_c: float | None = key(
        None,
        "Dual clip: bound of the ratio at negative advantages; null: the loss's own (3.0, dppo_* 20.0).",
        low=1,
        high=10_000,
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "Which policy loss, and its parameters.")
    loss_agg_mode: str = key("token-mean", "How token losses become one number.", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = key(
        None, "Divisor of seq-mean-token-sum-norm; null: the longest response.", low=0, high=1e12
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.", low=-100, high=100)
    use_kl_loss: bool = key(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of that KL, with use_kl_loss.", low=0, high=100)
    kl_loss_type: str = key("low_var_kl", "Estimator of that KL; + takes k2's gradient.", choices=KL_CHOICES)
    ppo_epochs: int = key(1, "Passes over one batch of samples.", low=1, high=10_000)
    shuffle: bool = key(False, "Shuffle the samples before cutting mini-batches.")
    skip_zero_advantage: bool = key(
        True, "Don't compute samples whose advantage is zero, where the loss gives them no gradient."
    )
    router_replay: RouterReplayConfig = section(RouterReplayConfig, "Replay of routes through experts.")
    optim: OptimConfig = section(OptimConfig, "Optimizer of the policy.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What checkpoints hold of the policy.")


@dataclass
class RefFSDPConfig:
    param_offload: bool = key(
        False, "Keep the reference in host memory between phases.", only_if=HAS_REFERENCE_MODEL, noted=True
    )
    fsdp_size: int | None = key(None, OWN, low=-1, high=MOST_RANKS)


@dataclass
class RefMegatronConfig:
    tensor_model_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    pipeline_model_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    virtual_pipeline_model_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    context_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    expert_model_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    expert_tensor_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)


@dataclass
class RefModelConfig:
    path: str | None = key(
        None, "Folder of the reference's own weights, of the policy's tokenizer; null: the policy's."
    )


@dataclass
class RefConfig(OwnDevices):
    model: RefModelConfig = section(RefModelConfig, "Weights of the reference.")
    update_every: int | None = key(
        None, "The reference becomes the present policy every so many steps; null: never.", low=1, high=MOST_STEPS
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward on one rank.",
        low=1,
        follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        high=MOST_ROWS,
        only_if=all_of(COMPARED, equals(".log_prob_use_dynamic_bsz", False)),
        noted=True,
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Cut micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz", only_if=COMPARED, noted=True
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of a micro-batch on one rank.",
        low=1,
        follows=f"{ACTOR}.ppo_max_token_len_per_gpu",
        high=MOST_TOKENS,
        only_if=all_of(COMPARED, equals(".log_prob_use_dynamic_bsz", True)),
        noted=True,
    )
    strategy: str | None = key(None, OWN, choices=STRATEGIES)
    ulysses_sequence_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    context_parallel_size: int | None = key(None, OWN, low=1, high=MOST_RANKS)
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, "Where it rests, and its shards on devices of its own.")
    megatron: RefMegatronConfig = section(
        RefMegatronConfig, "Its layout on devices of its own, with strategy=megatron."
    )

    def engine(self, actor: ActorConfig) -> ActorConfig:
        """Return the engine config of the reference model.

        The result is the actor's config. If the reference has its own devices, layout keys set under `ref` override it.
        """
        if not self.has_own_devices:
            return actor
        return replace(
            actor,
            **_said({name: getattr(self, name) for name in OWN_SIZES}),
            fsdp_config=replace(actor.fsdp_config, **_said({"fsdp_size": self.fsdp_config.fsdp_size})),
            megatron=replace(actor.megatron, **_said(vars(self.megatron))),
        )


# The layout keys that the reference may override. Their dotted names are the same under `ref` and under `actor`.
OWN_LAYOUT = (*OWN_SIZES, "fsdp_config.fsdp_size", *(f"megatron.{field.name}" for field in fields(RefMegatronConfig)))


def _said(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the entries whose value is None."""
    return {name: value for name, value in values.items() if value is not None}


# `critic.*` and `reward_model.*`: the value model of PPO and the reward model.


@dataclass
class CriticConfig(OwnDevices, EngineConfig):
    enable: bool | None = key(None, "Train a critic; null: if the estimator needs one.")
    model: ModelConfig = section(ModelConfig, "Model the critic starts from; without a path: the policy's.")
    optim: OptimConfig = section(OptimConfig, "Optimizer of the critic.", lr=1e-5)
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts per optimizer step, over all ranks.",
        low=1,
        follows=f"{ACTOR}.ppo_mini_batch_size",
        high=MOST_ROWS,
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward/backward on one rank.",
        low=1,
        follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        high=MOST_ROWS,
        only_if=BY_SAMPLES,
        noted=True,
    )
    use_dynamic_bsz: bool | None = key(None, "Cut micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int = key(
        32768, "Most tokens of a micro-batch on one rank.", low=1, high=MOST_TOKENS, only_if=BY_TOKENS, noted=True
    )
    ppo_epochs: int | None = key(
        None, "Passes over one batch of samples.", low=1, follows=f"{ACTOR}.ppo_epochs", high=10_000
    )
    shuffle: bool | None = key(None, "Shuffle before cutting mini-batches.", follows=f"{ACTOR}.shuffle")
    cliprange_value: float = key(0.5, "Clip range of the value loss.", low=0, high=1e6)
    loss_agg_mode: str | None = key(
        None, "How token losses become one number.", choices=LOSS_AGG_MODES, follows=f"{ACTOR}.loss_agg_mode"
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What checkpoints hold of the critic.")


def uses_critic(critic: CriticConfig, adv_estimator: str) -> bool:
    """Return whether a run trains a critic: by `critic.enable` or, if that is null, only with the estimator `gae`."""
    return adv_estimator == "gae" if critic.enable is None else critic.enable


@dataclass
class RewardModelConfig(OwnDevices, EngineConfig):
    enable: bool = key(False, "Score responses with a model (a token or sequence classifier of one label).")
    model: ModelConfig = section(ModelConfig, "The scoring model; it must have the policy's tokenizer.")
    weight: float = key(1.0, "Weight of its score beside that of reward functions.", low=-1e6, high=1e6)
    use_dynamic_bsz: bool | None = key(None, "Cut micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz")
    forward_max_token_len_per_gpu: int = key(
        32768, "Most tokens of a micro-batch on one rank.", low=1, high=MOST_TOKENS, only_if=BY_TOKENS, noted=True
    )
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward on one rank.",
        low=1,
        follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        high=MOST_ROWS,
        only_if=BY_SAMPLES,
        noted=True,
    )
