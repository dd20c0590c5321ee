"""Walking a config's tree of dataclasses by dotted key."""

import types
import typing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

from meshrl.config.key import KeyInfo, key_info


@dataclass(frozen=True)
class Leaf:
    """One key that holds a value."""

    name: str
    type: Any
    default: Any
    info: KeyInfo
    pending: str | None  # the key's own mark, or that of a section around it

    @cached_property
    def base_type(self) -> Any:
        """The type without `| None`, and without what a list or dict holds."""
        options = [option for option in _options(self.type) if option is not types.NoneType]
        return typing.get_origin(options[0]) or options[0]

    @cached_property
    def item_type(self) -> Any:
        """What a list holds, if the key is one and says so."""
        options = [option for option in _options(self.type) if option is not types.NoneType]
        return next(iter(typing.get_args(options[0])), None)

    @cached_property
    def holds_text(self) -> bool:
        """Whether the value may be a text, or a list of texts."""
        return str in (option for option in _options(self.type)) or (self.base_type is list and self.item_type is str)

    @cached_property
    def takes_any_text(self) -> bool:
        """Whether the value is a text, or a list of texts, of no given choice, and nothing else but null."""
        options = [option for option in _options(self.type) if option is not types.NoneType]
        return self.holds_text and len(options) == 1 and not self.info.choices


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """A type as a reader of messages and tables would say it: `int or null`, `list of str`."""
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(option) for option in typing.get_args(hint))
    if hint is types.NoneType:
        return "null"
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return f"list of {type_name(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return "dict"
    return hint.__name__


def leaves(root: type) -> dict[str, Leaf]:
    """All keys of a config class by dotted name, in order of declaration."""
    return _leaves(root)


@cache
def _leaves(root: type) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in _walk(root(), "", None)}


def _walk(node: Any, prefix: str, pending: str | None) -> Iterator[Leaf]:
    for field in fields(node):
        name, value, info = prefix + field.name, getattr(node, field.name), key_info(field)
        mark = info.pending or pending
        if is_dataclass(field.type):
            yield from _walk(value, f"{name}.", mark)
        else:
            yield Leaf(name, field.type, value, info, mark)


def sections(root: type) -> dict[str, str]:
    """All groups of keys by dotted name, with their documentation."""
    return _sections(root)


@cache
def _sections(root: type) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(cls: Any, prefix: str) -> None:
        for field in fields(cls):
            if is_dataclass(field.type):
                found[prefix + field.name] = key_info(field).doc
                visit(field.type, f"{prefix}{field.name}.")

    visit(root, "")
    return found


def get_value(config: Any, name: str) -> Any:
    """The value (or section) at a dotted name."""
    return _getter(name)(config)


@cache
def _getter(name: str) -> Callable[[Any], Any]:
    return attrgetter(name)


def set_value(config: Any, name: str, value: Any) -> None:
    """Set the value at a dotted name."""
    parent, _, last = name.rpartition(".")
    setattr(get_value(config, parent) if parent else config, last, value)


def fill_followers(config: Any) -> list[str]:
    """Give every null key that follows another key that key's value; returns the names of those filled."""
    filled = []
    for leaf in leaves(type(config)).values():
        if leaf.info.follows and get_value(config, leaf.name) is None:
            set_value(config, leaf.name, get_value(config, leaf.info.follows))
            filled.append(leaf.name)
    return filled


_given: set[str] = set()


@contextmanager
def counted_as_changed(names: Collection[str]) -> Iterator[None]:
    """Inside, these keys count as changed though they may have their defaults: somebody has written them."""
    new = set(names) - _given
    _given.update(new)
    try:
        yield
    finally:
        _given.difference_update(new)


def is_default(config: Any, leaf: Leaf) -> bool:
    """Whether a key says nothing beyond its default; a follower that equals what it follows doesn't."""
    if leaf.name in _given:
        return False
    value = get_value(config, leaf.name)
    if value == leaf.default:
        return True
    return leaf.info.follows is not None and value == get_value(config, leaf.info.follows)


def changed_keys(config: Any, prefix: str = "") -> list[str]:
    """The keys under a dotted prefix that differ from their defaults."""
    root: type = type(config)
    return [leaf.name for leaf in _under(root, prefix) if not is_default(config, leaf)]


@cache
def _under(root: type, prefix: str) -> list[Leaf]:
    return [leaf for leaf in leaves(root).values() if leaf.name.startswith(prefix)]
