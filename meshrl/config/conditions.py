"""When a key has an effect, declared beside it: the other keys, and the values of theirs, that it is read with.

    restart_wait: float = key(1.0, "...", only_if=above(".max_restarts", 0))

A name that begins with a dot is that of a key in the same section; any other is a whole dotted name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """A test of the whole config, in words that name keys, and the keys whose present values explain its result."""

    words: str
    keys: tuple[str, ...]
    holds: Callable[[Any, str], bool]  # given the config and the section (with its last dot) of the key it belongs to

    @property
    def shown(self) -> str:
        """The words as Markdown: names of keys in the same section by themselves, values beside them."""
        return re.sub(r"`\.?([\w.]+)`(=[\w.-]+)?", lambda found: f"`{found[1]}{found[2] or ''}`", self.words)

    def present(self, config: Any, section: str) -> str:
        """The values that its keys have now, in words."""
        values = {full_name(key, section): value_of(config, key, section) for key in self.keys}
        return " and ".join(f"{name}={_word(value)}" for name, value in values.items())

    def wanted(self, section: str) -> str:
        """The words with whole names of keys."""
        text = self.words
        for key in sorted(self.keys, key=len, reverse=True):
            text = text.replace(f"`{key}", f"`{full_name(key, section)}")
        return text.replace("`", "")


def full_name(key: str, section: str) -> str:
    """The dotted name of a key, which may be given as `.name` for one in the section."""
    return section + key[1:] if key.startswith(".") else key


def value_of(config: Any, key: str, section: str) -> Any:
    """The value of a key, which may be given as `.name` for one in the section."""
    for part in full_name(key, section).split("."):
        config = getattr(config, part)
    return config


def equals(key: str, *values: Any) -> Condition:
    """The key has one of the values."""
    words = " or ".join(_word(value) for value in values)
    return Condition(f"`{key}`={words}", (key,), lambda config, section: value_of(config, key, section) in values)


def differs(key: str, value: Any) -> Condition:
    """The key has another value than this one."""
    words = f"`{key}` other than {_word(value)}"
    return Condition(words, (key,), lambda config, section: value_of(config, key, section) != value)


def above(key: str, bound: float) -> Condition:
    """The key's number is above a bound."""
    return Condition(
        f"`{key}` > {bound:g}", (key,), lambda config, section: (value_of(config, key, section) or 0) > bound
    )


def includes(key: str, *values: Any) -> Condition:
    """The list that the key holds has one of the values in it."""
    words = f"`{key}` with {' or '.join(map(_word, values))}"
    return Condition(words, (key,), lambda config, section: any(v in value_of(config, key, section) for v in values))


def is_set(key: str) -> Condition:
    """The key is neither null nor empty."""
    return Condition(f"`{key}`", (key,), lambda config, section: bool(value_of(config, key, section)))


def any_of(*conditions: Condition) -> Condition:
    """At least one of the conditions holds."""
    return Condition(
        " or ".join(condition.words for condition in conditions),
        _keys(conditions),
        lambda config, section: any(condition.holds(config, section) for condition in conditions),
    )


def all_of(*conditions: Condition) -> Condition:
    """All of the conditions hold."""
    return Condition(
        " and ".join(f"({c.words})" if " or " in c.words else c.words for c in conditions),
        _keys(conditions),
        lambda config, section: all(condition.holds(config, section) for condition in conditions),
    )


def fact(words: str, keys: tuple[str, ...], holds: Callable[[Any], bool]) -> Condition:
    """What a function finds in the whole config; `keys` (whole names) are what it goes by."""
    return Condition(words, keys, lambda config, section: holds(config))


def _keys(conditions: tuple[Condition, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for condition in conditions for key in condition.keys))


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
