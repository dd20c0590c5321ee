"""How a config key is declared: its default, its one-line documentation, and what it may be set to."""

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

# When a key has an effect, declared beside it: the other keys, and the values of theirs, that it is read with.
#
#     restart_wait: float = key(1.0, "...", only_if=above(".max_restarts", 0))
#
# A name that begins with a dot is that of a key in the same section; any other is a whole dotted name.


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


METADATA_NAME = "meshrl_key"
# Upper ends of ranges: beyond, a number is a slip of the keyboard.
MOST_RANKS = 100_000
MOST_AT_ONCE = 1_000_000  # sequences, calls
MOST_ROWS = 10**9
MOST_TOKENS = 10**8
MOST_STEPS = 10**9
MOST_MEGABYTES = 2**24
LONGEST_WAIT = 31_536_000  # seconds: a year
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class KeyInfo:
    """What is known of a key besides its type and default."""

    doc: str
    pending: str | None = None  # why the key may keep its default only
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    follows: str | None = None  # the dotted key whose value this one takes while it is null
    registry: Registry | None = None  # beside the choices: the names that users register in it, and file.py:name
    only_if: Condition | None = None  # when the key is read; set otherwise, it is refused
    no_request: tuple[Any, ...] = ()  # values that ask for nothing, and so do no harm where the key is not read
    noted: bool = False  # set where it is not read, it is worth a note and no error: scripts often carry it
    takes_blank: bool = False  # whether a text of white space alone means something


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
    """A dataclass field for one key. Lists and dicts given as default are copied for each config."""
    info = KeyInfo(doc, pending, choices, low, high, follows, registry, only_if, no_request, noted, takes_blank)
    metadata = {METADATA_NAME: info}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, pending: str | None = None, **defaults: Any) -> Any:
    """A dataclass field for a nested group of keys; `pending` holds for every key in it."""
    return field(default_factory=lambda: cls(**defaults), metadata={METADATA_NAME: KeyInfo(doc, pending)})


def key_info(dataclass_field: Field) -> KeyInfo:
    """The `KeyInfo` a field was declared with."""
    return dataclass_field.metadata[METADATA_NAME]


# Walking a config's tree of dataclasses by dotted key.


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
    for each in fields(node):
        name, value, info = prefix + each.name, getattr(node, each.name), key_info(each)
        mark = info.pending or pending
        if is_dataclass(each.type):
            yield from _walk(value, f"{name}.", mark)
        else:
            yield Leaf(name, each.type, value, info, mark)


def sections(root: type) -> dict[str, str]:
    """All groups of keys by dotted name, with their documentation."""
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
def _under(root: type, prefix: str) -> tuple[Leaf, ...]:
    return tuple(leaf for leaf in leaves(root).values() if leaf.name.startswith(prefix))


# Words that messages share: the longest names of sections, and counts of things.

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
# Where a value came from that was given beside a recipe.
COMMAND_LINE = "command line"


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


# The one error of configs: everything that is wrong, a line each.


class ConfigError(ValueError):
    """A config that cannot be used; `problems` has one line for each thing to change."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return ConfigError, (self.problems,)


class Note(str):
    """A line about a key that does nothing here and costs the user nothing: printed, and no reason to refuse."""

    __slots__ = ()


@contextmanager
def told_without_traceback(key: str = "") -> Iterator[None]:
    """What is refused inside (data, a package, a folder) is the user's to change: it becomes a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        words = str(error) or type(error).__name__
        raise ConfigError([f"{key}: {words}" if key else words]) from error


# How alike names must be to be taken for one another: the last components, and what stands before them.
NEAR, NEAR_PARENTS = 0.66, 0.6


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that a misspelt one is likely to mean: the first that ends so, else the one most alike if it is near."""
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
