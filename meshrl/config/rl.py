"""`PPOConfig`: the whole config of `meshrl train`.

* `AlgorithmConfig` (`algorithm.*`): advantages, KL in the reward, dynamic sampling, rollout correction.
* `AsyncTrainingConfig` (`async_training.*`) and `async_problems`: generation ahead of training.
* `ActorRolloutRefConfig` (`actor_rollout_ref.*`) and `PPOConfig`: the tree of all sections.
* `places`, `ranks_of`, `pool_problems`: the devices of each role.
* `correction_of`, `uses_reference`, `has_teacher`: settings that follow from several keys.
"""

from dataclasses import dataclass, replace
from typing import Any

from meshrl.config.actor_critic import KL_CHOICES, ActorConfig, CriticConfig, RefConfig, RewardModelConfig
from meshrl.config.data import DataConfig
from meshrl.config.engine import ModelConfig, OwnDevices
from meshrl.config.keys import REF, changed_keys, differs, equals, key, section
from meshrl.config.reward import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.trainer import ProfilerConfig, RayInitConfig, TrainerConfig
from meshrl.registry import ADVANTAGE_ESTIMATORS

# `algorithm.*`: advantages, KL in the reward, and corrections between rollout and trainer.

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
# Estimators that weigh each step by the squared norm of the logits' gradient, which only the trainer's pass computes.
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
ESTIMATORS = ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax", "distillation")


@dataclass
class KLCtrlConfig:
    type: str = key("fixed", "Keep the coefficient, or steer it to target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "Weight of the KL in the reward (at the start).", low=0, high=100)
    horizon: float = key(10000.0, "Samples over which adaptive control acts.", low=1, high=1e12)
    target_kl: float = key(0.1, "KL that adaptive control aims at.", low=0, high=100)


# Values of `filter_groups.metric` that mean the whole score.
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


# `async_training.*`: how far generation may run ahead of training.

SEPARATE = "actor_rollout_ref.hybrid_engine=false"


@dataclass
class AsyncTrainingConfig:
    max_staleness: int = key(
        0,
        "Versions by which the oldest token of a sample may be behind the weights it trains; 0: synchronous.",
        low=0,
        high=10_000,
    )
    partial_rollout: bool = key(
        True, "Answers go on over an update of the weights; false: those begun are finished first."
    )
    batches_ahead: int | None = key(
        None,
        "Batches begun early; null: max_staleness. With more, what gets too old is dropped and counted.",
        low=0,
        high=10_000,
    )

    @property
    def num_ahead(self) -> int:
        """The number of batches whose generation begins before the present batch is trained."""
        return self.max_staleness if self.batches_ahead is None else self.batches_ahead


def async_problems(config: "PPOConfig") -> list[str]:
    """Return one message for each contradiction between placement (colocated or disaggregated) and staleness."""
    how, policy = config.async_training, config.actor_rollout_ref
    rollout, problems = policy.rollout, []
    ranks = rollout.nnodes * rollout.n_gpus_per_node
    if policy.hybrid_engine:
        if rollout.nnodes or rollout.n_gpus_per_node:
            problems.append(
                f"actor_rollout_ref.rollout.nnodes * n_gpus_per_node ({rollout.nnodes} * {rollout.n_gpus_per_node}) "
                f"has no effect while actor and rollout share their devices: set {SEPARATE}"
            )
        if how != AsyncTrainingConfig():
            problems.append(f"async_training needs devices of its own for the rollout: set {SEPARATE}")
        return problems
    problems += [
        f"{changed} is for devices that actor and rollout share, and {SEPARATE}: set PYTORCH_ALLOC_CONF instead"
        for changed in changed_keys(config, "actor_rollout_ref.expandable_segments")
    ]
    if not ranks:
        problems.append(
            f"{SEPARATE} needs processes for the rollout: set actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        )
    if rollout.nnodes > 1 and config.trainer.backend != "ray":
        problems.append(f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} needs trainer.backend=ray")
    problems += _combination_problems(config, how.num_ahead)
    if how.num_ahead and not rollout.calculate_log_probs:
        problems.append("async_training.max_staleness needs actor_rollout_ref.rollout.calculate_log_probs=true")
    return problems


def _combination_problems(config: "PPOConfig", ahead: int) -> list[str]:
    """Return one message for each setting that another setting of a disaggregated run would make ineffective."""
    how, policy, data = config.async_training, config.actor_rollout_ref, config.data
    problems = []
    if not how.partial_rollout and not ahead:
        problems.append("async_training.partial_rollout=false has no effect: nothing is begun early (max_staleness=0)")
    if not how.partial_rollout and policy.rollout.multi_turn.enable:
        problems.append(
            "async_training.partial_rollout=false cannot hold for conversations, which go on after a tool's answer: "
            "leave it true, or turn rollout.multi_turn off"
        )
    if ahead and config.reward_manager.overlap:
        problems.append(
            "reward_manager.overlap=true has no effect with batches that are begun early: they are scored while others "
            "generate anyway"
        )
    if ahead and (data.gen_batch_size or 0) > data.train_batch_size:
        problems.append(
            f"data.gen_batch_size ({data.gen_batch_size}) above data.train_batch_size ({data.train_batch_size}) lets "
            "what is begun early grow old while surplus groups are trained: lower it, or set max_staleness=0"
        )
    if policy.actor.strategy == "fsdp" and policy.model.lora_rank and config.trainer.world_size > 1:
        problems.append(
            "actor_rollout_ref.actor.strategy=fsdp with adapters cannot feed rollouts on other devices: use fsdp2"
        )
    return problems


@dataclass
class ActorRolloutRefConfig:
    hybrid_engine: bool = key(True, "Actor and rollout share their devices; false: rollout.nnodes and n_gpus_per_node.")
    expandable_segments: bool = key(
        False,
        "On GPUs: segments of memory that grow in place while training (fewer gaps), and not while generating.",
        only_if=differs("trainer.device", "cpu"),
    )
    memory_budget_gigabytes: float | None = key(
        None,
        "Most GiB that torch may allocate on a rank's GPU (on CPUs: of its process) in any phase; more is an error.",
        low=0.001,
        high=100_000,
    )
    model: ModelConfig = section(ModelConfig, "The policy's model.")
    actor: ActorConfig = section(ActorConfig, "How the policy is updated.")
    ref: RefConfig = section(RefConfig, "The frozen reference of a KL.")
    rollout: RolloutConfig = section(RolloutConfig, "How responses are generated.")

    @property
    def records_routes(self) -> bool:
        """True if the rollout records the experts that process its tokens (router replay R3)."""
        return self.actor.router_replay.mode == "R3"

    @property
    def memory_budget_bytes(self) -> int | None:
        """The largest number of bytes that torch may allocate on a rank in any phase, or None for no limit."""
        return None if self.memory_budget_gigabytes is None else int(self.memory_budget_gigabytes * 2**30)


@dataclass
class PPOConfig:
    data: DataConfig = section(DataConfig, "The prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "The policy in its three roles.")
    critic: CriticConfig = section(CriticConfig, "The value model of PPO.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "A model that scores.")
    reward: RewardConfig = section(RewardConfig, "Built-in rewards, and what to do when one fails.")
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, "A reward of your own.")
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "How rewards are computed for a batch.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages, KL and corrections.")
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig, "How far generation may run ahead of training.")
    trainer: TrainerConfig = section(TrainerConfig, "Processes, lengths of the run, logging.")
    ray_init: RayInitConfig = section(RayInitConfig, "How Ray is started, with trainer.backend=ray.")
    global_profiler: ProfilerConfig = section(ProfilerConfig, "Profiling of single steps.")


# The devices of each role: the policy's, or its own.

SECTIONS = {"ref": REF, "critic": "critic", "reward_model": "reward_model", "judge": "reward.judge"}


def ranks_of(config: "PPOConfig", place: OwnDevices) -> int:
    """Return the number of a role's ranks: its own processes if it has devices of its own, else the trainer's."""
    return sum(place.processes) if place.has_own_devices else config.trainer.world_size


def num_devices(config: "PPOConfig") -> int:
    """Return the number of processes of a run that have a device, over all roles."""
    rollout = config.actor_rollout_ref.rollout
    rollouts = 0 if config.actor_rollout_ref.hybrid_engine else rollout.nnodes * rollout.n_gpus_per_node
    return config.trainer.world_size + rollouts + sum(sum(place.processes) for place in places(config).values())


def places(config: "PPOConfig") -> dict[str, OwnDevices]:
    """Return the sections of the roles that may have their own devices, by role. `SECTIONS` has their dotted names."""
    return {
        "ref": config.actor_rollout_ref.ref,
        "critic": config.critic,
        "reward_model": config.reward_model,
        "judge": config.reward.judge,
    }


def roles_apart(config: "PPOConfig") -> set[str]:
    """Return the names of the roles that have devices of their own."""
    return {role for role, place in places(config).items() if place.has_own_devices}


def whose(place: OwnDevices, name: str) -> str:
    """Return the section whose `nnodes * n_gpus_per_node` is the number of a role's ranks: its own or `trainer`."""
    return name if place.has_own_devices else "trainer"


def pool_problems(config: "PPOConfig") -> list[str]:
    """Check the devices of each role: `nnodes` and `n_gpus_per_node` go together, and several machines need Ray."""
    problems = []
    for role, place in places(config).items():
        name = SECTIONS[role]
        if (place.nnodes > 0) != (place.n_gpus_per_node > 0):
            problems.append(
                f"{name}.nnodes * n_gpus_per_node ({place.nnodes} * {place.n_gpus_per_node}) gives it no devices: set "
                "both for devices of its own, or none to share the policy's"
            )
        if place.nnodes > 1 and config.trainer.backend != "ray":
            problems.append(f"{name}.nnodes={place.nnodes} needs trainer.backend=ray")
    return problems


# Settings that follow from several keys: the rollout correction, and the use of a reference.

# Losses that use the trainer-to-rollout ratio themselves and bound it in their own way.
RATIO_LOSSES = ("decoupled", "icepop", "m2po")


def correction_of(config: PPOConfig) -> RolloutCorrectionConfig:
    """Return the rollout correction with the default for `rollout_is` filled in.

    The default is `token` if samples may be stale, or if the rollout or the actor computes in FP8. There is no such
    default with bypass mode and with the losses in `RATIO_LOSSES`. The value `off` becomes None.
    """
    chosen = config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if chosen.rollout_is == "off":
        return replace(chosen, rollout_is=None)
    policy = config.actor_rollout_ref
    differs = config.async_training.num_ahead > 0 or policy.rollout.rounds or policy.actor.rounds
    if differs and chosen.rollout_is is None and not chosen.bypass_mode and loss_mode not in RATIO_LOSSES:
        return replace(chosen, rollout_is="token")
    return chosen


def uses_reference(config: PPOConfig) -> bool:
    """Return whether a run needs the log-probs of the reference: for a KL loss, a KL in the reward, or a teacher."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward or has_teacher(config)


def has_teacher(config: PPOConfig) -> bool:
    """Return whether the reference is a teacher, from whose log-probs the policy learns (distillation)."""
    return config.algorithm.adv_estimator == "distillation" or config.algorithm.distillation_coef > 0
