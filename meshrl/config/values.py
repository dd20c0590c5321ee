"""Checks of single keys: types, choices, ranges, whether anything reads them, and whether they are supported yet."""

import math
from collections.abc import Iterator, Sequence
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
    if leaf.base_type is bool and not isinstance(value, bool):
        return f"{leaf.name}={value} must be true or false"
    if info.choices and value not in info.choices:
        return _choice_problem(leaf, value, may_be_registered)
    if leaf.holds_text and isinstance(value, str) and not value.strip() and not info.takes_blank:
        return f"{leaf.name}={value!r} is blank: give it a value, or leave it out"
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


def unread_problems(config: Any, told: Sequence[str]) -> list[str]:
    """Keys that are set and that nothing reads, by what other keys say (`only_if`); not those `told` of already."""
    return [line for name, line in _unread(config, noted=False) if not any(name in problem for problem in told)]


def unread_notes(config: Any) -> list[str]:
    """The same of keys that scripts often carry, of which a note says that nothing reads them."""
    return [line for _, line in _unread(config, noted=True)]


def _unread(config: Any, noted: bool) -> Iterator[tuple[str, str]]:
    for leaf in leaves(type(config)).values():
        if leaf.info.noted == noted and (line := _unread_line(config, leaf)):
            yield leaf.name, line


def _unread_line(config: Any, leaf: Leaf) -> str | None:
    condition, section = leaf.info.only_if, leaf.name[: leaf.name.rfind(".") + 1]
    if condition is None or is_default(config, leaf) or get_value(config, leaf.name) in leaf.info.no_request:
        return None
    if condition.holds(config, section):
        return None
    return f"{leaf.name} has no effect with {condition.present(config, section)}: it is for {condition.wanted(section)}"


def unsupported(config: Any) -> list[str]:
    """Keys that are set to something which is declared but not built yet, a line each."""
    return [*_unsupported(config), *(split_engine_problems(config) if isinstance(config, PPOConfig) else [])]


def _unsupported(config: Any) -> Iterator[str]:
    for leaf in leaves(type(config)).values():
        if leaf.pending and not is_default(config, leaf):
            yield f"not supported yet: {leaf.name}={get_value(config, leaf.name)}: {leaf.pending}"
