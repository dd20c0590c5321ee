"""Checks of single keys: choices, ranges, and whether the key is supported yet."""

import math
from collections.abc import Iterator
from typing import Any

from meshrl.config.aliases import nearest
from meshrl.config.root import PPOConfig
from meshrl.config.split_rollout import split_engine_problems
from meshrl.config.tree import Leaf, get_value, is_default, leaves
from meshrl.registry import names_a_place


def value_problems(config: Any, imported: bool = False) -> list[tuple[str, str]]:
    """Values outside their choices or range, as (key, problem).

    Until external libraries are `imported`, any name may be one that they register.
    """
    may_be_registered = not imported and bool(external_libs(config))
    found = []
    for leaf in leaves(type(config)).values():
        value = get_value(config, leaf.name)
        for item in value if isinstance(value, list) else [value]:
            problem = _value_problem(leaf, item, may_be_registered)
            if problem:
                found.append((leaf.name, problem))
    return found


def external_libs(config: Any) -> dict[str, str]:
    """The modules that are imported before anything else, by the key that names them."""
    keys = [name for name in leaves(type(config)) if name.endswith("model.external_lib")]
    return {name: value for name in keys if (value := get_value(config, name))}


def _value_problem(leaf: Leaf, value: Any, may_be_registered: bool) -> str | None:
    info = leaf.info
    if value is None:
        return None
    if info.choices and value not in info.choices:
        return _choice_problem(leaf, value, may_be_registered)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not math.isfinite(value):
        return f"{leaf.name}={value} must be a finite number"
    if info.low is not None and value < info.low:
        return f"{leaf.name}={value} must be at least {info.low}"
    if info.high is not None and value > info.high:
        return f"{leaf.name}={value} must be at most {info.high}"
    return None


def _choice_problem(leaf: Leaf, value: Any, may_be_registered: bool) -> str | None:
    known, registry = [str(choice) for choice in leaf.info.choices], leaf.info.registry
    if registry is not None:
        if may_be_registered or value in registry or names_a_place(str(value)):
            return None
        known += [name for name in registry if name not in known]
    suggestion = nearest(str(value), known)
    hint = f"did you mean {suggestion}? " if suggestion else ""
    own = "" if registry is None else ", or file.py:name of your own"
    return f"{leaf.name}={value}: {hint}choices are {', '.join(known)}{own}"


def unsupported(config: Any) -> list[str]:
    """Keys that are set to something which is declared but not built yet, a line each."""
    return [*_unsupported(config), *(split_engine_problems(config) if isinstance(config, PPOConfig) else [])]


def _unsupported(config: Any) -> Iterator[str]:
    for leaf in leaves(type(config)).values():
        if leaf.pending and not is_default(config, leaf):
            yield f"not supported yet: {leaf.name}={get_value(config, leaf.name)}: {leaf.pending}"
