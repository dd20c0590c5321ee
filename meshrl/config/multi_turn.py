"""Checks of `actor_rollout_ref.rollout.multi_turn.*`."""

from pathlib import Path

from meshrl.config.functions import load_function
from meshrl.config.root import PPOConfig
from meshrl.config.tree import changed_keys

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def multi_turn_problems(config: PPOConfig) -> list[str]:
    """Keys that contradict each other or have nothing to work on."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable:
        return [f"{name} has no effect without {MULTI_TURN}.enable=true" for name in changed_keys(config, MULTI_TURN)]
    problems = []
    has_tools = bool(turns.tools or turns.tool_config_path)
    if not has_tools and turns.environment is None:
        problems.append(
            f"{MULTI_TURN}.enable=true, but nobody answers the model: set {MULTI_TURN}.tools, tool_config_path or "
            "environment"
        )
    if turns.environment_kwargs and turns.environment is None:
        problems.append(f"{MULTI_TURN}.environment_kwargs has no effect without {MULTI_TURN}.environment")
    if turns.environment is not None and not has_tools and turns.max_assistant_turns == 1:
        problems.append(f"{MULTI_TURN}.max_assistant_turns=1 ends before the environment answers: it needs at least 2")
    return problems


def multi_turn_file_problems(config: PPOConfig) -> list[str]:
    """Tools and environments that cannot be imported."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable:
        return []
    problems = []
    paths = [("tools", path) for path in turns.tools]
    if turns.environment is not None:
        paths.append(("environment", turns.environment))
    for name, path in paths:
        module, colon, attribute = path.rpartition(":")
        if not colon:
            module, _, attribute = path.rpartition(".")
        try:
            load_function(module, attribute)
        except ValueError as error:
            problems.append(f"{MULTI_TURN}.{name}: {error}")
    if turns.tool_config_path is not None and not Path(turns.tool_config_path).is_file():
        problems.append(f"{MULTI_TURN}.tool_config_path: there is no file {turns.tool_config_path}")
    return problems
