"""The kinds of rules that translate another project's config keys into meshrl's.

`meshrl/config/verl_names.py` holds the rules themselves and applies them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Alias:
    """A rule for one foreign key `old` and all keys below it.

    A rule with `new` translates the key. A rule without `new` ignores the key (`why`) or refuses it (`instead`).
    A null value of the foreign key means that the key is not set, unless `values` translates null.
    """

    old: str
    new: str | None = None  # meshrl's key
    values: Mapping[Any, Any] = field(default_factory=dict)  # the foreign value -> meshrl's value
    agrees: bool = False  # the foreign key sets nothing: it must have the same value as `new`
    over_ranks: bool = False  # the foreign value counts over all data-parallel ranks, that of `new` on one rank
    why: str = ""  # without `new`: the reason that the foreign key is not needed
    only: tuple[Any, ...] = ()  # the rule holds for these values of the foreign key alone (empty: for all values)
    instead: str = ""  # without `new`: advice for a refused value (empty: later rules decide about it)
    besides: tuple[str, ...] = ()  # names below `old` that the rule leaves out; with these, also `old` itself
    itself: bool = False  # the rule is for `old` alone, and for no key below it
    weak: int = 0  # settings are applied from the highest number to 0, so that later settings override weak ones
    needs: tuple[str, tuple[Any, ...]] | None = None  # `why` is valid only if this meshrl key has one of these values
    convert: Callable[[Any], Any] | None = None  # computes meshrl's value, if a table in `values` is not enough


def read(
    old: str,
    new: str,
    values: Mapping[Any, Any] | None = None,
    *only: Any,
    itself: bool = False,
    weak: int = 0,
    convert: Callable[[Any], Any] | None = None,
) -> Alias:
    """Return a rule that reads the key `old` as meshrl's key `new`, for the values in `only` (none given: for all)."""
    return Alias(old, new, values or {}, only=only, itself=itself, weak=weak, convert=convert)


def agree(old: str, new: str, values: Mapping[Any, Any] | None = None) -> Alias:
    """Return a rule that accepts the key `old` only if it has the value of meshrl's key `new`."""
    return Alias(old, new, values or {}, agrees=True)


def idle(
    old: str,
    why: str,
    *only: Any,
    instead: str = "",
    itself: bool = False,
    needs: tuple[str, tuple[Any, ...]] | None = None,
) -> Alias:
    """Return a rule that ignores the key `old`, because meshrl behaves that way anyway.

    The rule ignores the values in `only` (none given: all values). It refuses others if it has the advice `instead`.
    """
    return Alias(old, why=why, only=only, instead=instead, itself=itself, needs=needs)


def fixed(old: str, why: str, *only: Any) -> Alias:
    """Return a rule that ignores the key `old` if it has one of the values in `only`, and refuses other values."""
    return Alias(old, why=why, only=only, instead=f"{why}; leave it out")


def gone(old: str, instead: str) -> Alias:
    """Return a rule that refuses the key `old` unless it is null."""
    return Alias(old, instead=instead)


def unset(old: str, ours: Any = None) -> Alias:
    """Return a rule for the null value of a key that meshrl has as well: null is read as the value `ours`."""
    return Alias(old, old, {None: ours}, only=(None,), itself=True)


def same(value: Any, other: Any) -> bool:
    """Return whether `value` equals `other`, a value in a rule.

    A bool equals no number. A bool `other` also equals its text (`"true"`), because text keys are read as text.
    """
    if isinstance(other, bool) and isinstance(value, str):
        return value.lower() == str(other).lower()
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
