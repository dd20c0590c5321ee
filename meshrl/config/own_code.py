"""Estimators and losses of the user's own, and the libraries that register them: there, and fit to be called.

What is not known of a user's function is never taken for granted: it may read any key, samples without advantage count
unless it was registered with the promise that they don't, and a critic is trained only if `critic.enable` says so.
"""

import copy
from typing import TypeVar

from meshrl.config.actor import POLICY_LOSSES
from meshrl.config.algorithm import ESTIMATORS
from meshrl.config.critic import uses_critic
from meshrl.config.functions import call_problem, import_code, with_absolute_file
from meshrl.config.names import ACTOR
from meshrl.config.reward import manager_problems
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.tree import get_value, set_value
from meshrl.config.values import external_libs, value_problems
from meshrl.registry import ADVANTAGE_ESTIMATORS as REGISTERED_ESTIMATORS
from meshrl.registry import POLICY_LOSSES as REGISTERED_LOSSES
from meshrl.registry import names_a_place

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
    """Import what the config asks for before anything else; a `ValueError` names the key."""
    for name, path in external_libs(config).items():
        try:
            import_code(path)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def external_lib_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """A library that cannot be imported."""
    try:
        import_external_libs(config)
    except ValueError as error:
        return [f"{error}: name a .py file, or a module that is installed or on PYTHONPATH"]
    return []


def with_absolute_files(config: Config) -> Config:
    """The config for workers, whose folder may be another: files of the user's own code with their whole paths."""
    config = copy.deepcopy(config)
    for name in [*external_libs(config), *([LOSS] if isinstance(config, PPOConfig) else [])]:
        set_value(config, name, with_absolute_file(get_value(config, name)))
    return config


def own_function_problems(config: PPOConfig) -> list[str]:
    """Names that nobody registered, and functions that are not there or cannot be called as a run calls them."""
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
    if has_own_pass and config.actor_rollout_ref.actor.strategy != "megatron":  # which does not compute it
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
