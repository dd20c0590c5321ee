"""Declaration of config keys, and tools that all parts of the config share.

* `Condition`, `equals`, `any_of`, ...: conditions on other keys under which a key has an effect.
* `key`, `section`, `KeyInfo`: a key's default, its one-line documentation and its permitted values.
* `leaves`, `sections`, `get_value`, ...: walking a config's tree of dataclasses by dotted names.
* `ConfigError`, `Note`: errors and notes about a config, one line for each problem.
* `nearest`: the suggestion for a misspelt name.
"""

import difflib
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

from meshrl.registry import Registry

# A key's declaration may state when the key has an effect: a condition on the values of other keys.
#
#     restart_wait: float = key(1.0, "...", only_if=above(".max_restarts", 0))
#
# A name that begins with a dot is a key in the same section. Any other name is a whole dotted name.


@dataclass(frozen=True)
class Condition:
    """A test of the whole config, as a function and in words.

    `words` describes the condition and has key names in backquotes. `keys` are the keys whose present values explain
    the result in a message.
    """

    words: str
    keys: tuple[str, ...]
    holds: Callable[[Any, str], bool]  # arguments: the config, and the section (with a final dot) of the key declared

    @property
    def shown(self) -> str:
        """The words as Markdown. Keys of the same section lose their first dot; values move inside the backquotes."""
        return re.sub(r"`\.?([\w.]+)`(=[\w.-]+)?", lambda found: f"`{found[1]}{found[2] or ''}`", self.words)

    def present(self, config: Any, section: str) -> str:
        """Describe the present values of the condition's keys as `name=value`."""
        values = {full_name(key, section): value_of(config, key, section) for key in self.keys}
        return " and ".join(f"{name}={_word(value)}" for name, value in values.items())

    def wanted(self, section: str) -> str:
        """Return the words as plain text, with whole dotted names of keys."""
        text = self.words
        for key in sorted(self.keys, key=len, reverse=True):
            text = text.replace(f"`{key}", f"`{full_name(key, section)}")
        return text.replace("`", "")


def full_name(key: str, section: str) -> str:
    """Return the whole dotted name of a key. `.name` is a key in `section`, which ends with a dot."""
    return section + key[1:] if key.startswith(".") else key


def value_of(config: Any, key: str, section: str) -> Any:
    """Return the value of a key. `.name` is a key in `section`, which ends with a dot."""
    for part in full_name(key, section).split("."):
        config = getattr(config, part)
    return config


def equals(key: str, *values: Any) -> Condition:
    """Return the condition that the key has one of the values."""
    words = " or ".join(_word(value) for value in values)
    return Condition(f"`{key}`={words}", (key,), lambda config, section: value_of(config, key, section) in values)


def differs(key: str, value: Any) -> Condition:
    """Return the condition that the key does not have this value."""
    words = f"`{key}` other than {_word(value)}"
    return Condition(words, (key,), lambda config, section: value_of(config, key, section) != value)


def above(key: str, bound: float) -> Condition:
    """Return the condition that the key's number is above a bound; null counts as 0."""
    return Condition(
        f"`{key}` > {bound:g}", (key,), lambda config, section: (value_of(config, key, section) or 0) > bound
    )


def includes(key: str, *values: Any) -> Condition:
    """Return the condition that the key's list contains at least one of the values."""
    words = f"`{key}` with {' or '.join(map(_word, values))}"
    return Condition(words, (key,), lambda config, section: any(v in value_of(config, key, section) for v in values))


def is_set(key: str) -> Condition:
    """Return the condition that the key has a value that is true: not null, empty, 0 or false."""
    return Condition(f"`{key}`", (key,), lambda config, section: bool(value_of(config, key, section)))


def any_of(*conditions: Condition) -> Condition:
    """Return the condition that at least one of the conditions holds."""
    return Condition(
        " or ".join(condition.words for condition in conditions),
        _keys(conditions),
        lambda config, section: any(condition.holds(config, section) for condition in conditions),
    )


def all_of(*conditions: Condition) -> Condition:
    """Return the condition that all of the conditions hold."""
    return Condition(
        " and ".join(f"({c.words})" if " or " in c.words else c.words for c in conditions),
        _keys(conditions),
        lambda config, section: all(condition.holds(config, section) for condition in conditions),
    )


def fact(words: str, keys: tuple[str, ...], holds: Callable[[Any], bool]) -> Condition:
    """Return a condition from a function of the whole config. `keys` are whole names of the keys that it reads."""
    return Condition(words, keys, lambda config, section: holds(config))


def _keys(conditions: tuple[Condition, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for condition in conditions for key in condition.keys))


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


METADATA_NAME = "meshrl_key"
# Upper bounds of ranges. A larger number is taken for a typing error.
MOST_RANKS = 100_000
MOST_AT_ONCE = 1_000_000  # sequences, calls
MOST_ROWS = 10**9
MOST_TOKENS = 10**8
MOST_STEPS = 10**9
MOST_MEGABYTES = 2**24
LONGEST_WAIT = 31_536_000  # seconds, that is one year
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class KeyInfo:
    """The metadata of a key: documentation, permitted values, and when the key has an effect.

    The dataclass field itself holds the key's type and default.
    """

    doc: str
    pending: str | None = None  # the reason that the key is not supported yet, so that it must keep its default
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    follows: str | None = None  # the dotted key whose value this key takes while this key is null
    registry: Registry | None = None  # permits, besides the choices, names that users register, and file.py:name
    only_if: Condition | None = None  # the key has an effect only if this holds; otherwise it is an error to set it
    no_request: tuple[Any, ...] = ()  # values that are harmless even if the key has no effect
    noted: bool = False  # a key without effect causes a note instead of an error, because scripts often carry it
    takes_blank: bool = False  # permits a text that is empty or white space alone


def key(
    default: Any,
    doc: str,
    *,
    pending: str | None = None,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    follows: str | None = None,
    registry: Registry | None = None,
    only_if: Condition | None = None,
    no_request: tuple[Any, ...] = (),
    noted: bool = False,
    takes_blank: bool = False,
) -> Any:
    """Return a dataclass field that declares one key; see `KeyInfo` for the arguments.

    A list or dict given as default is copied for each config.
    """
    info = KeyInfo(doc, pending, choices, low, high, follows, registry, only_if, no_request, noted, takes_blank)
    metadata = {METADATA_NAME: info}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, pending: str | None = None, **defaults: Any) -> Any:
    """Return a dataclass field that declares a section of keys.

    `pending` applies to every key in the section. `defaults` replace the defaults of single keys.
    """
    return field(default_factory=lambda: cls(**defaults), metadata={METADATA_NAME: KeyInfo(doc, pending)})


def key_info(dataclass_field: Field) -> KeyInfo:
    """Return the `KeyInfo` that `key` or `section` attached to a dataclass field."""
    return dataclass_field.metadata[METADATA_NAME]


# Walking a config's tree of dataclasses by dotted key.


@dataclass(frozen=True)
class Leaf:
    """A key that holds a value (not a section), with its whole dotted name and its declaration."""

    name: str
    type: Any
    default: Any
    info: KeyInfo
    pending: str | None  # `pending` of the key itself or of an enclosing section

    @cached_property
    def base_type(self) -> Any:
        """The plain type, without `| None` and without the item types of a list or dict."""
        options = [option for option in _options(self.type) if option is not types.NoneType]
        return typing.get_origin(options[0]) or options[0]

    @cached_property
    def item_type(self) -> Any:
        """The item type of a list, or the key type of a dict; None for a type without arguments."""
        options = [option for option in _options(self.type) if option is not types.NoneType]
        return next(iter(typing.get_args(options[0])), None)

    @cached_property
    def holds_text(self) -> bool:
        """True if the value may be a string or a list of strings."""
        return str in (option for option in _options(self.type)) or (self.base_type is list and self.item_type is str)

    @cached_property
    def takes_any_text(self) -> bool:
        """True if the key takes any string (or list of strings): it has no choices and no other type but null."""
        options = [option for option in _options(self.type) if option is not types.NoneType]
        return self.holds_text and len(options) == 1 and not self.info.choices


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """Describe a type for messages and tables, such as `int or null` or `list of str`."""
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
    """Return all keys of a config class by dotted name, in order of declaration."""
    return _leaves(root)


@cache
def _leaves(root: type) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in _walk(root(), "", None)}


def _walk(node: Any, prefix: str, pending: str | None) -> Iterator[Leaf]:
    for each in fields(node):
        name, value, info = prefix + each.name, getattr(node, each.name), key_info(each)
        mark = info.pending or pending
        if is_dataclass(each.type):
            yield from _walk(value, f"{name}.", mark)
        else:
            yield Leaf(name, each.type, value, info, mark)


def sections(root: type) -> dict[str, str]:
    """Return the documentation of all sections by dotted name."""
    return _sections(root)


@cache
def _sections(root: type) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(cls: Any, prefix: str) -> None:
        for each in fields(cls):
            if is_dataclass(each.type):
                found[prefix + each.name] = key_info(each).doc
                visit(each.type, f"{prefix}{each.name}.")

    visit(root, "")
    return found


def get_value(config: Any, name: str) -> Any:
    """Return the value (or the section) at a dotted name."""
    return _getter(name)(config)


@cache
def _getter(name: str) -> Callable[[Any], Any]:
    return attrgetter(name)


def set_value(config: Any, name: str, value: Any) -> None:
    """Set the value at a dotted name of a config, without any check."""
    parent, _, last = name.rpartition(".")
    setattr(get_value(config, parent) if parent else config, last, value)


def fill_followers(config: Any) -> list[str]:
    """Fill every null key that follows another key with that key's value. Return the names of the filled keys."""
    filled = []
    for leaf in leaves(type(config)).values():
        if leaf.info.follows and get_value(config, leaf.name) is None:
            set_value(config, leaf.name, get_value(config, leaf.info.follows))
            filled.append(leaf.name)
    return filled


_given: set[str] = set()


@contextmanager
def counted_as_changed(names: Collection[str]) -> Iterator[None]:
    """Count the named keys as changed inside this context, even if they have their defaults.

    The checks of a config use it for keys that the command line sets to their default.
    """
    new = set(names) - _given
    _given.update(new)
    try:
        yield
    finally:
        _given.difference_update(new)


def is_default(config: Any, leaf: Leaf) -> bool:
    """Return whether a key has its default value, or follows another key and equals that key.

    Keys inside `counted_as_changed` never count as defaults.
    """
    if leaf.name in _given:
        return False
    value = get_value(config, leaf.name)
    if value == leaf.default:
        return True
    return leaf.info.follows is not None and value == get_value(config, leaf.info.follows)


def changed_keys(config: Any, prefix: str = "") -> list[str]:
    """Return the keys under a dotted prefix that differ from their defaults."""
    root: type = type(config)
    return [leaf.name for leaf in _under(root, prefix) if not is_default(config, leaf)]


@cache
def _under(root: type, prefix: str) -> tuple[Leaf, ...]:
    return tuple(leaf for leaf in leaves(root).values() if leaf.name.startswith(prefix))


# Texts that messages share: long names of sections, and counts with nouns.

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
# The source of a value that an override on the command line sets.
COMMAND_LINE = "command line"


def count(number: int, noun: str) -> str:
    """Join a number and a noun, with the noun in the plural if necessary: `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


# Errors and notes about a config.


class ConfigError(ValueError):
    """The error of an unusable config. `problems` has one line for each thing that the user must change."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return ConfigError, (self.problems,)


class Note(str):
    """A line about a key without effect. The line is printed, and the config is not refused."""

    __slots__ = ()


@contextmanager
def told_without_traceback(key: str = "") -> Iterator[None]:
    """Convert a `ValueError`, `OSError` or `ImportError` raised inside to a `ConfigError`, which has no traceback.

    Such errors (of data, a package or a folder) are for the user to correct. `key` begins the message, if given.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        words = str(error) or type(error).__name__
        raise ConfigError([f"{key}: {words}" if key else words]) from error


# The least similarity (`difflib` ratio) of a misspelt name to a suggestion: of the last component, and of its parent.
NEAR, NEAR_PARENTS = 0.66, 0.6


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a misspelt name is likely to mean, or None.

    The result is the first name that ends with `.name`. Otherwise it is the most similar name, if similar enough.
    """
    names = list(names)
    if (longer := next((candidate for candidate in names if candidate.endswith(f".{name}")), None)) is not None:
        return longer
    parent, _, last = name.rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        candidate_parent, _, candidate_last = candidate.rpartition(".")
        return _alike(last, candidate_last), _alike(parent, candidate_parent)

    near = [(sum(likeness(candidate)), candidate) for candidate in names if _is_near(*likeness(candidate))]
    return max(near, key=lambda pair: pair[0])[1] if near else None


def _is_near(last: float, parent: float) -> bool:
    return last >= NEAR and parent >= NEAR_PARENTS


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
