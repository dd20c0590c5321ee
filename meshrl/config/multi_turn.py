"""Checks of `actor_rollout_ref.rollout.multi_turn.*`."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meshrl.config.functions import load_by_path
from meshrl.config.root import PPOConfig
from meshrl.config.tool_schema import function_schema
from meshrl.config.tree import changed_keys

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
# Where the class that tools are made of is; nothing here imports it.
TOOLS = "meshrl.agents.tools"
ENTRY_KEYS = ("path", "class_name", "config", "name", "timeout")


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
    """Tools and environments that cannot be imported, and tools of which the model could not be told."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable:
        return []
    problems = []
    paths = [("tools", path) for path in turns.tools]
    if turns.environment is not None:
        paths.append(("environment", turns.environment))
    if turns.tool_config_path is not None:
        try:
            entries = read_tool_config(turns.tool_config_path)
            paths += [("tool_config_path", str(entry.get("path") or entry["class_name"])) for entry in entries]
        except ValueError as error:
            problems.append(f"{MULTI_TURN}.tool_config_path: {error}")
    for name, path in paths:
        try:
            found = load_by_path(path)
        except ValueError as error:
            problems.append(f"{MULTI_TURN}.{name}: {error}")
            continue
        if name != "environment" and (problem := _schema_problem(found)):
            problems.append(f"{MULTI_TURN}.{name}: {problem}")
    return problems


def _schema_problem(found: Any) -> str | None:
    """Why the model could not be told of a tool: of a plain function, or of a class that is made in no way of its own.

    A decorated function has been asked when it was imported.
    """
    is_tool_class = inspect.isclass(found) and found.__init__.__module__ == TOOLS
    try:
        if inspect.isfunction(found):
            function_schema(found)
        elif is_tool_class and found.parameters is None:
            function_schema(found.execute, skip=("self", "state"))
    except ValueError as error:
        return str(error)
    return None


def read_tool_config(path: str) -> list[Mapping[str, Any]]:
    """The entries of a tool file: `tools:`, a list of import paths or of mappings with `path` and what goes with it."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the tool file {path}: {' '.join(str(error).split())}") from error
    listed = read.get("tools") if isinstance(read, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"the tool file {path} needs a list under 'tools'")
    entries: list[Mapping[str, Any]] = []
    for entry in listed:
        entry = {"path": entry} if isinstance(entry, str) else entry
        unknown = sorted(set(entry) - set(ENTRY_KEYS)) if isinstance(entry, Mapping) else [repr(entry)]
        if unknown:
            raise ValueError(f"the tool file {path}: unknown key {unknown[0]}; a tool has {', '.join(ENTRY_KEYS)}")
        if ("path" in entry) == ("class_name" in entry):
            raise ValueError(f"the tool file {path}: each tool needs a 'path' such as my_tools.py:search")
        entries.append(entry)
    return entries
