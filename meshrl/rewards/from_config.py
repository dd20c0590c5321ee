"""Construction of the reward manager, its reward functions and the overlong penalty from the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.reward import MANAGERS, NOTHING, entry_problem
from meshrl.config.rl import PPOConfig
from meshrl.registry import REWARD_MANAGERS
from meshrl.rewards.functions import BUILT_IN, describe_sandbox
from meshrl.rewards.judge import Ask, Judge
from meshrl.rewards.manager import OverlongBuffer, RewardManager
from meshrl.rewards.reward_calls import RewardFunction, RewardFunctionSpec


def load_reward_manager(config: PPOConfig, tokenizer: Tokenizer, ask: Ask | None = None) -> RewardManager:
    """Build the configured reward manager with the configured reward functions, the user's own or built-in ones.

    `ask` sends prompts to the judge model at `reward.judge.path`.
    """
    manager, specs = config.reward_manager, reward_function_specs(config)
    if config.reward.judge.path is not None and ask is not None:
        specs = [_with_model(spec, ask) for spec in specs]
    built_in = manager.name in MANAGERS
    make = RewardManager if built_in else cast(type[RewardManager], REWARD_MANAGERS.get(manager.name))
    return make(
        specs,
        tokenizer,
        name=manager.name if built_in else "naive",
        on_error=config.reward.on_error,
        timeout=manager.timeout,
        num_processes=manager.num_processes,
        max_concurrent_calls=manager.max_concurrent_calls,
        overlong=overlong_buffer(config),
        log_overlong=manager.overlong_buffer.log,
    )


def sandbox_notes(specs: Sequence[RewardFunctionSpec]) -> list[str]:
    """Return one line for each reward function `code` about the sandbox that runs its programs.

    Raise `ValueError` if this machine has no working sandbox, so that the run fails before any worker starts.
    """
    ours = [spec for spec in specs if spec.is_built_in and (spec.name or spec.label) == "code"]
    return [f"{spec.label}: programs run in the sandbox {describe_sandbox(spec.kwargs)}" for spec in ours]


def overlong_buffer(config: PPOConfig) -> OverlongBuffer | None:
    """Build the overlong penalty for the manager dapo, or return None for other managers or if it is disabled."""
    buffer = config.reward_manager.overlong_buffer
    if config.reward_manager.name != "dapo" or not buffer.enable:
        return None
    if buffer.len is None:
        raise ValueError("reward_manager.name=dapo needs reward_manager.overlong_buffer.len (or its enable=false)")
    return OverlongBuffer(config.data.max_response_length, buffer.len, buffer.penalty_factor)


def reward_function_specs(config: PPOConfig) -> list[RewardFunctionSpec]:
    """Return the specs of `reward.functions`, else of `custom_reward_function`, else of the built-in `reward.name`.

    Without all three, a config with a reward model gets the built-in function that returns zero.
    """
    custom, reward = config.custom_reward_function, config.reward
    if reward.functions:
        return [_spec(str(label), entry) for label, entry in reward.functions.items()]
    if custom.path is not None:
        return [RewardFunctionSpec(custom.name, name=custom.name, path=custom.path, kwargs=dict(custom.reward_kwargs))]
    if reward.name is None and config.reward_model.enable:
        return [RewardFunctionSpec(NOTHING)]
    if reward.name not in BUILT_IN:
        raise ValueError(f"reward.name is '{reward.name}': use one of {', '.join(BUILT_IN)}")
    return [RewardFunctionSpec(reward.name, kwargs=dict(reward.kwargs))]


def _with_model(spec: RewardFunctionSpec, ask: Ask) -> RewardFunctionSpec:
    """Replace the built-in judge by a `Judge` that calls `ask` instead of a URL. Return other specs unchanged."""
    if spec.path is not None or (spec.name or spec.label) != "judge":
        return spec
    return replace(spec, function=Judge(ask, **spec.kwargs), kwargs={})


def load_reward_function(config: PPOConfig) -> RewardFunction:
    """Load the single configured reward function, with its keyword arguments bound.

    Raise `ValueError` if several functions are configured.
    """
    (spec,) = reward_function_specs(config)
    return spec.load()


def _spec(label: str, entry: Any) -> RewardFunctionSpec:
    """Parse one entry of `reward.functions`: `label: weight` or `label: {weight, name, path, kwargs}`."""
    if problem := entry_problem(label, entry):
        raise ValueError(problem)
    fields = entry if isinstance(entry, dict) else {"weight": entry}
    weight, kwargs = float(fields.get("weight", 1.0)), dict(fields.get("kwargs") or {})
    return RewardFunctionSpec(label, weight, fields.get("name"), fields.get("path"), kwargs)
