"""Checks of the algorithm: estimators, losses, rollout correction, reference, and user code that implements them."""

import copy
import math
from typing import TypeVar

from meshrl.config.actor_critic import POLICY_LOSSES, uses_critic
from meshrl.config.keys import ACTOR, REF, ROLLOUT, Note, changed_keys, get_value, set_value
from meshrl.config.load import external_libs, value_problems
from meshrl.config.reward import MANAGERS, manager_problems, reward_numbers
from meshrl.config.rl import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    RATIO_LOSSES,
    TOKEN_BASELINES,
    WHOLE_SCORE,
    PPOConfig,
    correction_of,
    has_teacher,
    uses_reference,
)
from meshrl.config.supervised import SupervisedConfig
from meshrl.config.user_code import call_problem, import_code, with_absolute_file
from meshrl.registry import ADVANTAGE_ESTIMATORS as REGISTERED_ESTIMATORS
from meshrl.registry import POLICY_LOSSES as REGISTERED_LOSSES
from meshrl.registry import names_a_place

CORRECTION = "algorithm.rollout_correction"
ROLLOUT_RS_MODES = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
# The losses that also bound the ratio at negative advantages (`clip_ratio_c`).
DUAL_CLIP = ("vanilla", "decoupled", "icepop", "m2po", "dppo_tv", "dppo_kl")
# The losses that need the old policy's log-probs over the whole mini-batch.
COVARIANCE_LOSSES = ("clip_cov", "kl_cov", "m2po")
# The losses that clip the ratio.
CLIPPED = (*DUAL_CLIP, "gspo", "geo_mean", "cispo", "clip_cov")
# Keys that only some estimators read, with these estimators.
ESTIMATOR_KEYS = {
    "algorithm.gamma": ("gae", "reinforce_plus_plus"),
    "algorithm.lam": ("gae",),
    "algorithm.norm_adv_by_std_in_grpo": ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
    "algorithm.norm_adv_std_over": ("grpo", "grpo_vectorized"),
    "algorithm.gdpo_reward_keys": ("gdpo",),
    "algorithm.gdpo_reward_weights": ("gdpo",),
}
# Keys without effect that cause a note and no error. `lam` weighs a critic's values, and there is no critic.
HARMLESS_ESTIMATOR_KEYS = ("algorithm.lam",)
# `clip_ratio_c` is an additional bound: a loss that does not read it has another bound.
HARMLESS_LOSS_KEYS = ("clip_ratio_c",)
# Keys of the actor that only some losses read, with these losses.
LOSS_KEYS = {
    "clip_ratio": CLIPPED,
    "clip_ratio_low": CLIPPED,
    "clip_ratio_high": CLIPPED,
    "clip_ratio_c": DUAL_CLIP,
    "policy_loss.tau_pos": ("sapo",),
    "policy_loss.tau_neg": ("sapo",),
    "policy_loss.clip_cov_ratio": ("clip_cov",),
    "policy_loss.clip_cov_lb": ("clip_cov",),
    "policy_loss.clip_cov_ub": ("clip_cov",),
    "policy_loss.kl_cov_ratio": ("kl_cov",),
    "policy_loss.ppo_kl_coef": ("kl_cov",),
    "policy_loss.dro_beta": ("dro",),
    "policy_loss.icepop_low": ("icepop",),
    "policy_loss.icepop_high": ("icepop",),
    "policy_loss.behaviour_weight_cap": ("decoupled",),
    "policy_loss.m2_threshold": ("m2po",),
}


def has_old_log_prob_pass(config: PPOConfig) -> bool:
    """Return whether the trainer computes old log-probs in a pass of its own before the update.

    The result is true for an estimator of the user, because it may need them.
    """
    algorithm, actor, correction = config.algorithm, config.actor_rollout_ref.actor, correction_of(config)
    if correction.bypass_mode:
        return False
    loss = actor.policy_loss.loss_mode
    return (
        algorithm.use_kl_in_reward
        or has_teacher(config)
        or algorithm.adv_estimator in TOKEN_BASELINES
        or algorithm.adv_estimator not in ESTIMATORS
        or loss in COVARIANCE_LOSSES
        or loss in RATIO_LOSSES
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or actor.router_replay.mode == "R2"
        or config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs > 1
    )


def first_kl_problems(config: PPOConfig) -> list[str]:
    """Return a message if `trainer.gates.on_policy_kl` has no effect, because no KL exists before the first update.

    That is the case without a separate pass for old log-probs.
    """
    given = changed_keys(config, "trainer.gates.on_policy_kl")
    if not given or config.trainer.gates.first_step == "off" or has_old_log_prob_pass(config):
        return []
    why = f"{CORRECTION}.bypass_mode=true takes the rollout's log-probs for the old ones"
    if not config.algorithm.rollout_correction.bypass_mode:
        why = "one optimizer step a batch takes the update's own log-probs for the old ones"
    return [f"{given[0]} has no effect: {why}, so that there is no KL before it"]


def distillation_problems(config: PPOConfig) -> list[str]:
    """Check the keys of distillation: it needs a teacher's path, and some keys of rewards contradict it."""
    algorithm, ref = config.algorithm, config.actor_rollout_ref.ref
    if not has_teacher(config):
        return []
    asked = f"algorithm.distillation_coef={algorithm.distillation_coef:g}"
    problems = []
    if algorithm.adv_estimator == "distillation":
        if algorithm.distillation_coef > 0:
            problems.append(f"{asked} is for a teacher beside rewards, and adv_estimator=distillation has none")
        if algorithm.use_kl_in_reward:
            problems.append("algorithm.use_kl_in_reward: adv_estimator=distillation has no rewards")
        asked = "algorithm.adv_estimator=distillation"
    if ref.model.path is None:
        problems.append(f"{asked} needs a teacher: set {REF}.model.path to a model with the same tokenizer")
    if ref.update_every is not None:
        problems.append(f"{asked}: {REF}.update_every={ref.update_every} would put the policy in its teacher's place")
    return problems


def estimator_problems(config: PPOConfig) -> list[str]:
    """Check the requirements of single estimators: gdpo, the optimal token baselines and remax."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    problems = []
    if name == "gdpo":
        keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
        if weights and len(weights) != len(keys):
            problems.append(
                f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(keys)} gdpo_reward_keys: one each"
            )
        problems += _component_problems(config)
        if algorithm.use_kl_in_reward:
            problems.append(f"adv_estimator=gdpo sees each reward, not their sum with the KL: use {ACTOR}.use_kl_loss")
        buffer = config.reward_manager.overlong_buffer
        if config.reward_manager.name == "dapo" and buffer.enable and not (buffer.log and "overlong_reward" in keys):
            problems.append(
                "adv_estimator=gdpo would not see the overlong penalty: set reward_manager.overlong_buffer.log=true "
                "and name overlong_reward in algorithm.gdpo_reward_keys"
            )
    if name in TOKEN_BASELINES:
        if algorithm.rollout_correction.bypass_mode:
            problems.append(
                f"adv_estimator={name} needs the trainer's own pass: {CORRECTION}.bypass_mode must be false"
            )
        if config.actor_rollout_ref.actor.strategy == "megatron":
            problems.append(f"adv_estimator={name} is not there for {ACTOR}.strategy=megatron: use fsdp2")
    greedy = not config.actor_rollout_ref.rollout.do_sample or config.actor_rollout_ref.rollout.temperature == 0
    if name == "remax" and greedy:
        problems.append(f"adv_estimator=remax compares samples with the greedy answer: {ROLLOUT} must sample")
    return problems


def idle_key_problems(config: PPOConfig) -> list[str]:
    """Return one message for each set key that the chosen estimator or loss does not read.

    An estimator or loss of the user may read any key.
    """
    changed, estimator, loss = changed_keys(config), config.algorithm.adv_estimator, effective_loss(config)
    problems: list[str] = [
        (Note if key in HARMLESS_ESTIMATOR_KEYS else str)(
            f"{key} has no effect with algorithm.adv_estimator={estimator}: it is for {', '.join(readers)}"
        )
        for key, readers in ESTIMATOR_KEYS.items()
        if key in changed and estimator in ESTIMATORS and estimator not in readers
    ]
    chosen = f"{ACTOR}.policy_loss.loss_mode={loss}"
    if bypass_loss(config):
        chosen = f"{CORRECTION}.loss_type={config.algorithm.rollout_correction.loss_type}"
    problems += [
        (Note if key in HARMLESS_LOSS_KEYS else str)(
            f"{ACTOR}.{key} has no effect with {chosen}: it is for {', '.join(readers)}"
        )
        for key, readers in LOSS_KEYS.items()
        if f"{ACTOR}.{key}" in changed and loss in POLICY_LOSSES and loss not in readers
    ]
    if estimator in ESTIMATORS and config.algorithm.adv_kwargs:
        problems.append(f"algorithm.adv_kwargs is for an estimator of your own, not for {estimator}")
    if loss in POLICY_LOSSES and config.actor_rollout_ref.actor.policy_loss.loss_kwargs:
        problems.append(f"{ACTOR}.policy_loss.loss_kwargs is for a loss of your own, not for {loss}")
    if not config.actor_rollout_ref.actor.use_kl_loss:
        why = f"has no effect without {ACTOR}.use_kl_loss=true"
        # A coefficient of 0 also means no KL loss.
        if config.actor_rollout_ref.actor.kl_loss_coef != 0 and f"{ACTOR}.kl_loss_coef" in changed:
            problems.append(f"{ACTOR}.kl_loss_coef {why}")
        if f"{ACTOR}.kl_loss_type" in changed:
            problems.append(Note(f"{ACTOR}.kl_loss_type {why}"))
    return problems


def filter_groups_problems(config: PPOConfig) -> list[str]:
    """Check dynamic sampling (`filter_groups`). Without it, keys that only dynamic sampling reads must not be set."""
    filters, rollout = config.algorithm.filter_groups, config.actor_rollout_ref.rollout
    if not filters.enable:
        changed = [*changed_keys(config, "algorithm.filter_groups."), *changed_keys(config, "data.gen_batch_size")]
        return [f"{name} has no effect without algorithm.filter_groups.enable=true" for name in changed]
    problems = []
    if rollout.n < 2:
        problems.append(
            f"algorithm.filter_groups compares the samples of a group: {ROLLOUT}.n ({rollout.n}) must be > 1"
        )
    if not rollout.calculate_log_probs:
        problems.append(
            "algorithm.filter_groups keeps surplus groups for the next step, where their old log-probs are the "
            f"rollout's: {ROLLOUT}.calculate_log_probs must be true"
        )
    if filters.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        problems.append("algorithm.filter_groups.metric=seq_final_reward is not known before the KL: use seq_reward")
    return problems + _metric_problems(config)


def _metric_problems(config: PPOConfig) -> list[str]:
    """Return a message if no reward function returns the metric of dynamic sampling."""
    metric, numbers = config.algorithm.filter_groups.metric, _numbers_of_samples(config)
    if metric is None or numbers is None or metric in (*WHOLE_SCORE, *numbers):
        return []
    known = " or ".join([WHOLE_SCORE[0], *numbers])
    return [f"algorithm.filter_groups.metric={metric}: the reward function does not return it: use {known}"]


def _component_problems(config: PPOConfig) -> list[str]:
    """Return a message if no reward function returns some of the rewards that GDPO normalises."""
    numbers = _numbers_of_samples(config)
    unknown = [name for name in config.algorithm.gdpo_reward_keys if numbers is not None and name not in numbers]
    if not unknown:
        return []
    known = f"it returns {', '.join(numbers)}" if numbers else "it returns nothing beside its score"
    words = f"algorithm.gdpo_reward_keys names {', '.join(unknown)}, which the reward function does not return"
    return [f"{words}: {known}"]


def _numbers_of_samples(config: PPOConfig) -> list[str] | None:
    """Return the names of the numbers that each sample has in addition to its score.

    The result is None if they are unknown, because a reward function, manager, tool or environment of the user may
    add any number.
    """
    manager = config.reward_manager
    numbers = reward_numbers(config.reward, config.custom_reward_function, config.reward_model.enable)
    has_own_code = manager.name not in MANAGERS or config.actor_rollout_ref.rollout.multi_turn.enable
    if numbers is None or has_own_code:
        return None
    model = ["rm_score"] if config.reward_model.enable else []
    overlong = ["overlong_reward", "overlong"] if manager.name == "dapo" and manager.overlong_buffer.log else []
    return [*numbers, *model, *overlong]


def reference_problems(config: PPOConfig) -> list[str]:
    """Check the keys of the reference: a reference must be used, and updates must be possible.

    The reference of a policy with adapters is the policy without its adapters, which cannot be updated.
    """
    ref, model = config.actor_rollout_ref.ref, config.actor_rollout_ref.model
    asked = {f"{REF}.model.path": ref.model.path, f"{REF}.update_every": ref.update_every, f"{REF}.nnodes": ref.nnodes}
    asked = {name: value for name, value in asked.items() if value}
    if not uses_reference(config):
        return [
            f"{name}={value} has no effect without a reference: set {ACTOR}.use_kl_loss or algorithm.use_kl_in_reward, "
            "or learn from it as a teacher (algorithm.adv_estimator=distillation)"
            for name, value in asked.items()
        ]
    if ref.has_own_devices and ref.update_every is not None:
        return [
            f"{REF}.update_every={ref.update_every} needs a reference on the policy's devices: leave {REF}.nnodes at 0"
        ]
    actor = config.actor_rollout_ref.actor
    if ref.model.path is None and ref.engine(actor).rounds != actor.rounds:
        return [
            f"{ACTOR}.fsdp_config.mixed_precision.product_dtype=fp8 is not for both of {ACTOR}.strategy="
            f"{actor.strategy} and {REF}.strategy={ref.strategy}: the policy would not begin where its reference is. "
            "Leave it out, or give both the same strategy"
        ]
    if model.has_adapters and ref.update_every is not None:
        return [f"{REF}.update_every={ref.update_every}: with LoRA the reference is the model without its adapters"]
    return []


def bypass_problems(config: PPOConfig) -> list[str]:
    """Check that the loss and the rollout correction are compatible with `rollout_correction.bypass_mode`.

    In bypass mode there are two policies instead of three: the rollout's log-probs are the old log-probs.
    """
    correction, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        problems = []
        if loss == "bypass_mode":
            problems.append(f"{ACTOR}.policy_loss.loss_mode=bypass_mode needs {CORRECTION}.bypass_mode=true")
        if correction.loss_type != "ppo_clip":
            problems.append(f"{CORRECTION}.loss_type={correction.loss_type} needs {CORRECTION}.bypass_mode=true")
        return problems
    problems = []
    if correction.rollout_is not in (None, "off") and correction.loss_type == "ppo_clip":
        problems.append(
            f"{CORRECTION}.rollout_is has no effect with bypass_mode=true and loss_type=ppo_clip, whose ratio corrects "
            "already: set loss_type=reinforce, or bypass_mode=false"
        )
    own = bypass_loss(config) and loss not in ("vanilla", "bypass_mode")
    if own:
        problems.append(
            f"{CORRECTION} with bypass_mode=true has a loss of its own for loss_type=reinforce and rollout_rs: leave "
            f"{ACTOR}.policy_loss.loss_mode at vanilla, not {loss}"
        )
    return problems


def threshold_problems(config: PPOConfig) -> list[str]:
    """Check the thresholds and modes of the rollout correction: known modes, valid bounds, a bound for each mode."""
    correction = config.algorithm.rollout_correction
    problems = _bound_problems(f"{CORRECTION}.rollout_is_threshold", str(correction.rollout_is_threshold), True)
    if correction.rollout_is_batch_normalize and correction.bypass_mode:
        problems.append(f"{CORRECTION}.rollout_is_batch_normalize needs the whole batch: bypass_mode must be false")
    # `algorithm_problems` has a message about losses that weigh by the plain ratio.
    plain_ratio = config.actor_rollout_ref.actor.policy_loss.loss_mode in RATIO_LOSSES
    if not problems and not plain_ratio and correction_of(config).rollout_is is None:
        idle = changed_keys(config, f"{CORRECTION}.rollout_is_")
        problems += [f"{key} has no effect without weights: set {CORRECTION}.rollout_is as well" for key in idle]
    if correction.rollout_rs is None:
        return problems
    modes = [mode.strip() for mode in correction.rollout_rs.split(",")]
    unknown = [mode for mode in modes if mode not in ROLLOUT_RS_MODES]
    if unknown:
        return [*problems, f"{CORRECTION}.rollout_rs: no mode {unknown[0]!r}; there are {', '.join(ROLLOUT_RS_MODES)}"]
    bounds = [] if correction.rollout_rs_threshold is None else str(correction.rollout_rs_threshold).split(",")
    if len(bounds) > 1 and len(bounds) != len(modes):
        return [*problems, f"{CORRECTION}.rollout_rs_threshold has {len(bounds)} bounds for {len(modes)} modes"]
    for mode, bound in zip(modes, bounds * len(modes) if len(bounds) == 1 else bounds, strict=False):
        problems += _bound_problems(f"{CORRECTION}.rollout_rs_threshold", bound.strip(), mode.endswith("k1"))
    return problems


def _bound_problems(name: str, text: str, may_be_range: bool) -> list[str]:
    try:
        numbers = [float(number) for number in text.split("_")]
    except ValueError:
        numbers = []
    finite = all(map(math.isfinite, numbers))
    if not finite or not 1 <= len(numbers) <= 2 or numbers[0] <= 0 or numbers[0] > numbers[-1]:
        return [f"{name}={text}: give a finite number above 0, or lower_upper such as 0.5_5.0"]
    if len(numbers) == 2 and not may_be_range:
        return [f"{name}={text}: modes of k2 and k3 have an upper bound only"]
    return []


def bypass_loss(config: PPOConfig) -> bool:
    """Return whether the run computes the special loss of bypass mode, instead of a policy loss with a plain clip.

    The special loss computes the correction between policy and rollout itself.
    """
    correction, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    asked = correction.loss_type == "reinforce" or correction.rollout_rs is not None or loss == "bypass_mode"
    return correction.bypass_mode and asked


def effective_loss(config: PPOConfig) -> str:
    """Return the policy loss that is computed. For the loss of bypass mode, it is the loss on which that builds."""
    correction, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass_loss(config) or loss == "bypass_mode":
        return "gpg" if correction.loss_type == "reinforce" else "vanilla"
    return loss


# Checks of the user's estimators and losses, and of the libraries that register them: importable and callable.
#
# Nothing is assumed about a user's function: it may read any key. Samples without advantage count unless it was
# registered with the promise that they do not. A critic is trained only if `critic.enable` is true.

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
LOSS = f"{ACTOR}.policy_loss.loss_mode"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
LOSS_ARGUMENTS = (
    "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights", "stats",
)  # fmt: skip
ESTIMATOR_ARGUMENTS = (
    "token_level_rewards", "response_mask", "index", "gamma", "lam", "config", "norm_adv_by_std_in_grpo",
    "norm_adv_std_over", "old_log_probs",
)  # fmt: skip


def import_external_libs(config: PPOConfig | SupervisedConfig) -> None:
    """Import the modules in `model.external_lib`. Raise `ValueError` with the key if that fails."""
    for name, path in external_libs(config).items():
        try:
            import_code(path)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def external_lib_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return a message if a module in `model.external_lib` cannot be imported."""
    try:
        import_external_libs(config)
    except ValueError as error:
        return [f"{error}: name a .py file, or a module that is installed or on PYTHONPATH"]
    return []


def with_absolute_files(config: Config) -> Config:
    """Return a copy of the config with absolute paths of the user's code files.

    Workers need them, because their working directory may be another one.
    """
    config = copy.deepcopy(config)
    for name in [*external_libs(config), *([LOSS] if isinstance(config, PPOConfig) else [])]:
        set_value(config, name, with_absolute_file(get_value(config, name)))
    return config


def own_function_problems(config: PPOConfig) -> list[str]:
    """Check the user's estimator, loss and reward manager: registered, importable and callable with a run's arguments.

    The external libraries must have been imported.
    """
    problems = [problem for _, problem in value_problems(config, imported=True)]
    return problems or [
        *_estimator_problems(config),
        *_loss_problems(config),
        *manager_problems(config.reward_manager),
    ]


def _estimator_problems(config: PPOConfig) -> list[str]:
    name, kwargs = config.algorithm.adv_estimator, config.algorithm.adv_kwargs
    if name in ESTIMATORS:
        return []
    where = f"algorithm.adv_estimator={name}"
    try:
        function = REGISTERED_ESTIMATORS.get(name)
    except ValueError as error:
        return [f"algorithm.adv_estimator: {error}"]
    has_critic = uses_critic(config.critic, name)
    offered = [*ESTIMATOR_ARGUMENTS, *kwargs]
    has_own_pass = not config.algorithm.rollout_correction.bypass_mode
    if has_own_pass and config.actor_rollout_ref.actor.strategy != "megatron":  # Megatron does not compute it
        offered.append("sum_pi_squared")
    if problem := call_problem(function, [*offered, "values"], list(kwargs)):
        return [f"{where}: {problem}"]
    if not has_critic and call_problem(function, offered, ()):
        return [f"{where} needs values, which a critic gives: set critic.enable=true"]
    if has_critic and call_problem(function, [*offered, "values"], ["values"]):
        return [f"critic.enable=true has no effect with {where}, which takes no values"]
    return []


def _loss_problems(config: PPOConfig) -> list[str]:
    loss, trainer = config.actor_rollout_ref.actor.policy_loss, config.trainer
    name = loss.loss_mode
    if name in POLICY_LOSSES:
        return []
    try:
        function = REGISTERED_LOSSES.get(name)
    except ValueError as error:
        return [f"{LOSS}: {error}"]
    arguments = [*LOSS_ARGUMENTS, *loss.loss_kwargs]
    if problem := call_problem(function, arguments, arguments):
        return [f"{LOSS}={name}: {problem}"]
    is_apart = trainer.world_size > 1 or trainer.backend != "local"
    if is_apart and not names_a_place(name) and not external_libs(config):
        return [f"{LOSS}={name} is registered in this process alone: set {EXTERNAL_LIB} to the module that does it"]
    return []


# Policy losses whose objective is a mean over sequences.
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")


def algorithm_problems(config: PPOConfig) -> list[str]:
    """Check the keys of `algorithm` against each other: group sizes, KL terms and the rollout correction."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    problems = []
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2:
        problems.append(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one prompt: "
            f"{ROLLOUT}.n ({rollout.n}) must be at least 2"
        )
    if algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        problems.append(f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss both count the KL: choose one")
    if algorithm.rollout_correction.bypass_mode and not rollout.calculate_log_probs:
        problems.append(
            f"algorithm.rollout_correction.bypass_mode=true takes the rollout's log-probs: "
            f"{ROLLOUT}.calculate_log_probs must be true"
        )
    correction = algorithm.rollout_correction
    asked = []
    if not correction.bypass_mode:
        given = [name for name in ("rollout_is", "rollout_rs") if getattr(correction, name) not in (None, "off")]
        asked = [f"algorithm.rollout_correction.{name}" for name in given]
    if config.actor_rollout_ref.actor.policy_loss.loss_mode in RATIO_LOSSES:
        asked.append(f"{ACTOR}.policy_loss.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}")
        idle = changed_keys(config, "algorithm.rollout_correction.rollout_is")
        problems += [f"{name} has no effect with {asked[-1]}, which weighs by the plain ratio" for name in idle]
    if not algorithm.use_kl_in_reward:
        why, weight = "has no effect with algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef"
        idle = [*changed_keys(config, "algorithm.kl_ctrl."), *changed_keys(config, "algorithm.kl_penalty")]
        if weight in idle and algorithm.kl_ctrl.kl_coef != 0:  # 0 also means no KL
            problems.append(f"{weight} {why}")
        problems += [Note(f"{name} {why}") for name in idle if name != weight]
    if asked and (correction.bypass_mode or not rollout.calculate_log_probs):
        problems.append(
            f"{asked[0]} compares the trainer's log-probs with the rollout's: rollout_correction.bypass_mode must be "
            f"false and {ROLLOUT}.calculate_log_probs true"
        )
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        problems.append("algorithm.rollout_correction.rollout_rs and rollout_rs_threshold go together: set both")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "fixed":
        idle = [name for key in ("horizon", "target_kl") for name in changed_keys(config, f"algorithm.kl_ctrl.{key}")]
        problems += [f"{name} has no effect with algorithm.kl_ctrl.type=fixed: set adaptive" for name in idle]
    if algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.target_kl == 0:
        problems.append("algorithm.kl_ctrl.type=adaptive needs algorithm.kl_ctrl.target_kl above 0")
    return problems


def loss_problems(config: PPOConfig) -> list[str]:
    """Check the parameters of the policy loss and its aggregation."""
    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    problems = []
    if loss.loss_mode in SEQUENCE_LOSSES and actor.loss_agg_mode == "token-mean":
        problems.append(
            f"{ACTOR}.policy_loss.loss_mode={loss.loss_mode} is a loss of whole sequences, which token-mean weighs "
            f"by their lengths: set {ACTOR}.loss_agg_mode=seq-mean-token-mean"
        )
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        problems.append(
            f"{ACTOR}.loss_scale_factor={actor.loss_scale_factor} is read with loss_agg_mode=seq-mean-token-sum-norm "
            f"only, not with {actor.loss_agg_mode}"
        )
    if actor.loss_scale_factor == 0:
        problems.append(f"{ACTOR}.loss_scale_factor=0 must be above 0")
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1:
        problems.append(f"{ACTOR}.clip_ratio_c={actor.clip_ratio_c} must be above 1")
    for low, high in (("clip_cov_lb", "clip_cov_ub"), ("icepop_low", "icepop_high")):
        if getattr(loss, low) >= getattr(loss, high):
            problems.append(
                f"{ACTOR}.policy_loss.{low} ({getattr(loss, low)}) must be below {high} ({getattr(loss, high)})"
            )
    positive = "tau_pos", "tau_neg", "clip_cov_ratio", "kl_cov_ratio", "dro_beta", "behaviour_weight_cap"
    for name in (*positive, "m2_threshold"):
        if getattr(loss, name) == 0:
            problems.append(f"{ACTOR}.policy_loss.{name}=0 must be above 0")
    return problems
