"""The kinds of rules by which keys of other scripts become ours; the rules themselves stand in `verl_names`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Alias:
    """A key of others and everything below it; null always means that it is not set."""

    old: str
    new: str | None = None  # our key
    values: Mapping[Any, Any] = field(default_factory=dict)  # their words for a value, and ours
    agrees: bool = False  # it sets nothing: our key must say the same
    over_ranks: bool = False  # it counts over all data-parallel ranks, ours on one
    why: str = ""  # where there is no key of ours: why none is needed ...
    only: tuple[Any, ...] = ()  # ... and for which values (empty: all); with a key of ours: read it for these alone ...
    instead: str = ""  # ... and what to do about the others (empty: see the rows below)
    besides: tuple[str, ...] = ()  # names below it that are ours
    itself: bool = False  # the key alone, and nothing below it
    weak: int = 0  # above 0 it sets our key only where nothing stronger does
    needs: tuple[str, tuple[Any, ...]] | None = None  # no key is needed only while this key of ours has such a value
    convert: Callable[[Any], Any] | None = None  # our value from theirs, where a table would not do


def read(
    old: str,
    new: str,
    values: Mapping[Any, Any] | None = None,
    *only: Any,
    itself: bool = False,
    weak: int = 0,
    convert: Callable[[Any], Any] | None = None,
) -> Alias:
    """It is our key under another name; `only` of these values, if there are any."""
    return Alias(old, new, values or {}, only=only, itself=itself, weak=weak, convert=convert)


def agree(old: str, new: str, values: Mapping[Any, Any] | None = None) -> Alias:
    """It may say what our key says: nothing else can be had."""
    return Alias(old, new, values or {}, agrees=True)


def idle(
    old: str,
    why: str,
    *only: Any,
    instead: str = "",
    itself: bool = False,
    needs: tuple[str, tuple[Any, ...]] | None = None,
) -> Alias:
    """What it asks for, with these values or with any, is so anyway."""
    return Alias(old, why=why, only=only, instead=instead, itself=itself, needs=needs)


def fixed(old: str, why: str, *only: Any) -> Alias:
    """So it is, and nothing else can be had."""
    return Alias(old, why=why, only=only, instead=f"{why}; leave it out")


def gone(old: str, instead: str) -> Alias:
    """It may be null only."""
    return Alias(old, instead=instead)


def unset(old: str, ours: Any = None) -> Alias:
    """Null leaves our key of this name at its default, or sets it to the value that means the same."""
    return Alias(old, old, {None: ours}, only=(None,), itself=True)


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal; a truth value equals no number, and the text that keys of text have of it."""
    if isinstance(other, bool) and isinstance(value, str):
        return value.lower() == str(other).lower()
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
