"""Checks of single keys: choices, ranges, and whether the key is supported yet."""

import math
from collections.abc import Iterator
from typing import Any

from meshrl.config.aliases import nearest
from meshrl.config.root import PPOConfig
from meshrl.config.split_rollout import split_engine_problems
from meshrl.config.tree import Leaf, get_value, is_default, leaves


def value_problems(config: Any) -> list[tuple[str, str]]:
    """Values outside their choices or range, as (key, problem)."""
    found = []
    for leaf in leaves(type(config)).values():
        value = get_value(config, leaf.name)
        for item in value if isinstance(value, list) else [value]:
            problem = _value_problem(leaf, item)
            if problem:
                found.append((leaf.name, problem))
    return found


def _value_problem(leaf: Leaf, value: Any) -> str | None:
    info = leaf.info
    if value is None:
        return None
    if info.choices and value not in info.choices:
        suggestion = nearest(str(value), map(str, info.choices))
        hint = f"did you mean {suggestion}? " if suggestion else ""
        return f"{leaf.name}={value}: {hint}choices are {', '.join(map(str, info.choices))}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not math.isfinite(value):
        return f"{leaf.name}={value} must be a finite number"
    if info.low is not None and value < info.low:
        return f"{leaf.name}={value} must be at least {info.low}"
    if info.high is not None and value > info.high:
        return f"{leaf.name}={value} must be at most {info.high}"
    return None


def unsupported(config: Any) -> list[str]:
    """Keys that are set to something which is declared but not built yet, a line each."""
    return [*_unsupported(config), *(split_engine_problems(config) if isinstance(config, PPOConfig) else [])]


def _unsupported(config: Any) -> Iterator[str]:
    for leaf in leaves(type(config)).values():
        if leaf.pending and not is_default(config, leaf):
            yield f"not supported yet: {leaf.name}={get_value(config, leaf.name)}: {leaf.pending}"
