"""The reward function that the config asks for."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.functions import load_function
from meshrl.config.root import PPOConfig
from meshrl.rewards.functions import BUILT_IN
from meshrl.rewards.manager import RewardFunction, RewardManager


def load_reward_manager(config: PPOConfig, tokenizer: Tokenizer) -> RewardManager:
    """The configured reward function (one's own, or a built-in one) inside the configured manager."""
    return RewardManager(
        load_reward_function(config),
        tokenizer,
        per_batch=config.reward_manager.name == "batch",
        on_error=config.reward.on_error,
    )


def load_reward_function(config: PPOConfig) -> RewardFunction:
    """`custom_reward_function.path/name`, or else the built-in function `reward.name`."""
    custom = config.custom_reward_function
    if custom.path is not None:
        return load_function(custom.path, custom.name)
    if config.reward.name not in BUILT_IN:
        raise ValueError(f"reward.name is '{config.reward.name}': use one of {', '.join(BUILT_IN)}")
    return BUILT_IN[config.reward.name]
