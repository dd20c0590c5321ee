"""Loading of a config from a recipe and `a.b.c=value` overrides, with the source of each value.

* `load_config`: read recipes and overrides, translate foreign keys, convert types, and fill followers.
* `parse_override`, `settings_of`: the single settings that an override or a recipe asks for.
* `value_problems`, `unread_problems`, `unread_notes`: checks of single keys.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from meshrl.config import quick_yaml
from meshrl.config.batch_sizes import dp_size
from meshrl.config.engine import SHORT_DTYPES, OwnDevices
from meshrl.config.keys import (
    ACTOR,
    COMMAND_LINE,
    REF,
    ConfigError,
    Leaf,
    fill_followers,
    get_value,
    is_default,
    leaves,
    nearest,
    sections,
    set_value,
    type_name,
)
from meshrl.config.recipe import Recipe, group_settings, read_recipes
from meshrl.config.rl import PPOConfig, ranks_of
from meshrl.config.supervised import PreferenceConfig, SFTConfig
from meshrl.config.verl_names import Reading, canonical, has_alias, read_setting
from meshrl.registry import names_a_place

T = TypeVar("T")
TRUTH_WORDS = ("true", "false", "yes", "no", "on", "off")
# The config class of each command that runs a training.
ROOTS: dict[str, type] = {"train": PPOConfig, "sft": SFTConfig, "prefer": PreferenceConfig}


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A loaded config, the source of each value by dotted key, and notes to print."""

    config: T
    sources: dict[str, str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """One key and value as the user wrote them, and their source: `file:line` or the command line."""

    name: str
    value: Any
    source: str


# A setting that can be handled only when all keys are known: `over_ranks`, `agrees` or `needs` of its `Reading`.
Waiting = tuple[Setting, Reading]


def load_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    root: type[T] = PPOConfig,  # type: ignore[assignment]
) -> Loaded[T]:
    """Load a recipe (path or shipped name) and `a.b.c=value` overrides into a config of the class `root`.

    All problems of a stage are raised together in one `ConfigError`.
    """
    problems: list[str] = []
    notes: list[str] = []
    settings: list[Setting] = []
    for file in read_recipes(recipe) if recipe is not None else []:
        settings += settings_of(file, root)
    for override in overrides:
        try:
            if override.startswith("~"):
                settings = _without(settings, override, root)
            else:
                settings += parse_override(override, root)
        except ConfigError as error:
            problems += error.problems

    with _lent_tree(root) as lent:
        sources = dict.fromkeys(leaves(root), "default")
        waiting: list[Waiting] = []
        readings = [(setting, read_setting(setting.name, setting.value)) for setting in settings]
        # Weak settings come first, so that stronger settings of the same key override them.
        for setting, reading in sorted(readings, key=lambda pair: -pair[1].weak):
            problem = None if reading.needs else reading.problem
            if reading.note:
                notes.append(reading.note)
            if reading.needs or (reading.name is not None and (reading.agrees or reading.over_ranks)):
                waiting.append((setting, reading))
            elif reading.name is not None:
                notes += _read_as(setting, reading)
                meant = Setting(reading.name, reading.value, setting.source)
                problem = _apply(lent, root, meant, setting.name, sources)
            if problem:
                problems.append(f"{problem} ({setting.source})")
        if problems:
            raise ConfigError(_of_the_other_command(recipe, settings, root) or problems)
        config = _to_object(lent, root, sources)
    return Loaded(*_finished(config, sources, waiting, notes), list(dict.fromkeys(notes)))


def _read_as(setting: Setting, reading: Reading) -> list[str]:
    """Return a note if a key or its value was translated, and an empty list otherwise."""
    if setting.value is None:
        return []  # null sets nothing
    if reading.value != setting.value:
        return [f"{setting.name}={setting.value} is read as {reading.name}={reading.value} ({setting.source})"]
    return [f"{setting.name} is read as {reading.name} ({setting.source})"] if reading.name != setting.name else []


def settings_of(file: Recipe, root: type) -> Iterator[Setting]:
    """Yield the settings of a recipe. Keys that hold strings take them as written, not as typed by YAML."""
    written = dict(_flatten(file.written, "", root))
    for name, value in _flatten(file.values, "", root):
        leaf = _leaf_of(canonical(name), root)
        is_text = leaf is not None and leaf.takes_any_text
        yield Setting(name, written.get(name, value) if is_text else value, file.source(name))


def _of_the_other_command(recipe: str | Path | None, settings: Sequence[Setting], root: type) -> list[str]:
    """Return a message if the recipe is for another command, such as one of `meshrl sft` given to `meshrl train`."""
    names = [canonical(setting.name) for setting in settings if setting.source != COMMAND_LINE]
    if recipe is None or root not in ROOTS.values() or all(_leaf_of(name, root) for name in names):
        return []
    for command, other in ROOTS.items():
        if other is not root and all(_leaf_of(name, other) for name in names):
            how = "without --sft or --prefer" if other is PPOConfig else f"with --{command}"
            return [f"{recipe} is a recipe of meshrl {command}: use that command (or meshrl config {how})"]
    return []


@dataclass(frozen=True)
class _LentTree:
    """An OmegaConf tree of all keys, which checks and converts values, and the names of the keys set in it."""

    tree: DictConfig
    touched: set[str] = field(default_factory=set)


# Unused trees by config class. Building a tree takes a hundred times as long as resetting a few keys.
_idle_trees: dict[type, DictConfig] = {}


@contextmanager
def _lent_tree(root: type) -> Iterator[_LentTree]:
    """Lend a tree with all keys at their defaults, and reset it afterwards for the next load.

    A second load at the same time builds its own tree.
    """
    idle = _idle_trees.pop(root, None)
    lent = _LentTree(OmegaConf.structured(root) if idle is None else idle)
    try:
        yield lent
    finally:
        for name in lent.touched:
            OmegaConf.update(lent.tree, name, leaves(root)[name].default, merge=False)
        _idle_trees[root] = lent.tree


def _to_object(lent: _LentTree, root: type[T], sources: dict[str, str]) -> T:
    """Build the config from the defaults and the keys that were set in the tree."""
    config = root()
    for name in leaves(root):
        if name not in lent.touched:
            continue
        try:
            value = OmegaConf.select(lent.tree, name, throw_on_missing=True)
            set_value(config, name, OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)
        except OmegaConfBaseException as error:
            where = f" ({sources[error.full_key]})" if error.full_key in sources else ""
            raise ConfigError([f"{error.full_key}: {_first_line(error)}{where}"]) from error
    return config


def _finished(
    config: Any, sources: dict[str, str], waiting: Sequence[Waiting], notes: list[str]
) -> tuple[Any, dict[str, str]]:
    """Finish a config whose keys are all set: handle waiting settings, check values and fill followers.

    Return the config and the sources, both changed in place. Raise `ConfigError` for all problems of a stage.
    """
    problems = _divide_over_ranks(config, sources, waiting, notes)
    problems += [f"{problem} ({sources[name]})" for name, problem in value_problems(config)]
    if problems:
        raise ConfigError(problems)
    for name in fill_followers(config):
        sources[name] = f"follows {leaves(type(config))[name].info.follows}"
    if problems := _disagreements(config, waiting):
        raise ConfigError(problems)
    return config, sources


def _divide_over_ranks(config: Any, sources: dict[str, str], waiting: Sequence[Waiting], notes: list[str]) -> list[str]:
    """Set per-rank keys from sizes that count over all data-parallel ranks. Return a message for each that fails."""
    problems = []
    for setting, reading in waiting:
        if not reading.over_ranks:
            continue
        assert reading.name is not None
        if problem := _unknown_here(reading.name, setting, type(config)):
            problems.append(problem)
            continue
        role = reading.name.partition(".")[0]
        engine = get_value(config, ACTOR if role == "actor_rollout_ref" else role)
        place = config.actor_rollout_ref.ref if reading.name.startswith(f"{REF}.") else engine
        world_size = ranks_of(config, place) if isinstance(place, OwnDevices) else config.trainer.world_size
        ranks = max(1, dp_size(engine, world_size))
        if not isinstance(reading.value, int) or reading.value % ranks:
            problems.append(
                f"{setting.name}={reading.value} counts over all data-parallel ranks and must be divisible by them "
                f"({ranks}); or set {reading.name} ({setting.source})"
            )
            continue
        set_value(config, reading.name, reading.value // ranks)
        sources[reading.name] = setting.source
        notes.append(
            f"{setting.name}={reading.value} counts over all {ranks} data-parallel ranks: it is read as "
            f"{reading.name}={reading.value // ranks} ({setting.source})"
        )
    return problems


def _disagreements(config: Any, waiting: Sequence[Waiting]) -> list[str]:
    """Return one message for each setting that contradicts another key.

    The settings are those that must agree with a key, and those that are ignored only for some values of a key.
    """
    problems = []
    for setting, reading in waiting:
        if reading.needs and _value_at(config, reading.needs[0]) not in reading.needs[1]:
            problems.append(f"{reading.problem} ({setting.source})")
        if not reading.agrees:
            continue
        assert reading.name is not None
        if problem := _unknown_here(reading.name, setting, type(config)):
            problems.append(problem)
            continue
        value, said = _value_at(config, reading.name), reading.value
        said = [said] if isinstance(value, list) and not isinstance(said, list) else said
        if SHORT_DTYPES.get(str(value), value) != SHORT_DTYPES.get(str(said), said):
            problems.append(
                f"{setting.name}={setting.value} must say what {reading.name} says ({value}): they are one setting "
                f"here ({setting.source})"
            )
    return problems


def _value_at(config: Any, name: str) -> Any:
    """Return the value of a key, or of an entry below a dict-valued key (None if the dict has no such entry)."""
    leaf = _leaf_of(name, type(config))
    assert leaf is not None
    value = get_value(config, leaf.name)
    for part in name[len(leaf.name) + 1 :].split(".") if name != leaf.name else ():
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _unknown_here(name: str, setting: Setting, root: type) -> str | None:
    leaf = _leaf_of(name, root)
    known = leaf is not None and (name == leaf.name or leaf.base_type is dict)
    return None if known else f"{_unknown(name, setting.name, root)} ({setting.source})"


def _flatten(values: dict[str, Any], prefix: str, root: type) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested dicts, down to the keys.

    The value of a dict-valued key stays one value, except for entries that have a rule of their own in `ALIASES`.
    """
    for part, value in values.items():
        name = f"{prefix}{part}"
        known = leaves(root).get(canonical(name))
        if isinstance(value, dict) and known is None:
            yield from _flatten(value, f"{name}.", root)
        elif isinstance(value, dict) and (own := [part for part in value if has_alias(f"{name}.{part}")]):
            yield from ((f"{name}.{part}", value[part]) for part in own)
            if rest := {part: item for part, item in value.items() if part not in own}:
                yield name, rest
        elif value is None and canonical(name) in sections(root):
            continue  # a section without any key
        else:
            yield name, value


def _without(settings: list[Setting], override: str, root: type) -> list[Setting]:
    """Drop the settings of a key or section that Hydra's `~key` removes, so that defaults apply again."""
    name = override[1:].partition("=")[0].strip()
    meant = canonical(name)
    if not has_alias(name) and _leaf_of(meant, root) is None and meant not in sections(root):
        raise ConfigError([f"{_unknown(meant, override, root)} ({COMMAND_LINE})"])
    return [
        setting
        for setting in settings
        if f"{setting.name}.".partition(f"{name}.")[0] and f"{canonical(setting.name)}.".partition(f"{meant}.")[0]
    ]


def parse_override(text: str, root: type) -> list[Setting]:
    """Parse an override `a.b.c=value`. Raise `ConfigError` if it cannot be parsed.

    A dict given for a section becomes one setting for each key. `section@place=file` becomes the settings of a file of
    verl.
    """
    name, equals, value = text.partition("=")
    name = name.lstrip("+").strip()
    if not equals or not name or name.startswith(("-", "~")):
        raise ConfigError([f"cannot read the override {text!r}: write it as a.b.c=value"])
    if "@" in name:
        if (chosen := group_settings(value.strip())) is None:
            raise ConfigError([f"cannot read {text!r}: {value} is no file of verl's that is known here; set its keys"])
        return [Setting(key, given, COMMAND_LINE) for key, given in chosen.items()]
    leaf = _leaf_of(canonical(name), root)
    if not value.strip() and (value or leaf is None or not leaf.takes_any_text or leaf.base_type is list):
        raise ConfigError([f"{text} has no value: is a variable of the shell empty? Write null to leave a key unset"])
    is_text = leaf is not None and leaf.takes_any_text
    is_one_text = leaf is not None and is_text and leaf.base_type is str
    if is_text and (_is_plain(value.strip()) or (is_one_text and value.strip().startswith(("[", "{")))):
        return [Setting(name, value.strip(), COMMAND_LINE)]
    try:
        if is_text:
            return [Setting(name, quick_yaml.texts(value), COMMAND_LINE)]
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or _first_line(error)
        hint = "close its brackets, and quote the whole for the shell"
        raise ConfigError([f"cannot read the value of {text!r}: {problem}; {hint}"]) from error
    assert isinstance(parsed, dict)
    if isinstance(parsed["value"], dict) and parsed["value"] and (canonical(name) in sections(root) or has_alias(name)):
        *above, last = name.split(".")
        prefix = ".".join([*above, ""])
        return [Setting(key, value, COMMAND_LINE) for key, value in _flatten({last: parsed["value"]}, prefix, root)]
    return [Setting(name, parsed["value"], COMMAND_LINE)]


def _is_plain(text: str) -> bool:
    """Return whether a string is taken literally, without YAML: not null, and neither quoted nor a list or dict.

    YAML would read `12:30` and `1e5` as numbers, and `#` as the start of a comment.
    """
    return text not in ("", "~", "null", "None") and not text.startswith(("'", '"', "[", "{"))


def _expanded(value: Any) -> Any:
    """Replace a leading `~/` of strings by the home folder, because shells do not expand it after an equals sign."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _is_truth(value: Any) -> bool:
    """Return whether a value is a bool or a word for one. Numbers are not, although OmegaConf would accept them."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in TRUTH_WORDS)


def _apply(lent: _LentTree, root: type, setting: Setting, written: str, sources: dict[str, str]) -> str | None:
    """Set one value in the tree and record its source. Return a message if the key or the value is wrong."""
    leaf = _leaf_of(setting.name, root)
    if setting.value is None and setting.name in sections(root):
        return None  # a section without any key
    if leaf is None:
        return _unknown(setting.name, written, root)
    if setting.name != leaf.name and leaf.base_type is not dict:
        return f"unknown key {written}: {leaf.name} holds one value ({type_name(leaf.type)}), no keys"
    value = setting.value
    if value is False and "off" in leaf.info.choices:  # YAML reads an unquoted `off` as false
        value = "off"
    if leaf.base_type is list and value is not None and not isinstance(value, list):
        if isinstance(value, dict) and leaf.item_type in (str, int, float, bool):
            return f"{written} must be {type_name(leaf.type)}, not {value!r}"
        value = [value]
    if leaf.base_type is bool and value is not None and not _is_truth(value):
        return f"{written} must be {type_name(leaf.type)}, not {value!r}"
    value = _expanded(value)
    lent.touched.add(leaf.name)
    try:
        OmegaConf.update(lent.tree, setting.name, value, merge=True, force_add=setting.name != leaf.name)
    except OmegaConfBaseException:
        shown = "null" if value is None else repr(setting.value)
        return f"{written} must be {type_name(leaf.type)}, not {shown}"
    sources[leaf.name] = setting.source
    return None


def _leaf_of(name: str, root: type) -> Leaf | None:
    """Return the key of this name, or the key whose name is a prefix of it (as for an entry of a dict-valued key)."""
    known = leaves(root)
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return None


def _unknown(name: str, written: str, root: type) -> str:
    if name in sections(root):
        return f"{written} is a section: set the keys below it"
    suggestion = nearest(name, [*leaves(root), *sections(root)])
    return f"unknown key {written}" + (f": did you mean {suggestion}?" if suggestion else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# Checks of single keys: choices, ranges, and keys that have no effect.


def value_problems(config: Any, imported: bool = False) -> list[tuple[str, str]]:
    """Return the values outside their choices or range, as pairs of key and message.

    A key with a registry accepts any name until external libraries are `imported`, because they may register it.
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
    """Return the modules that a run imports before anything else (`model.external_lib`), by their keys."""
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
    """Return one message for each set key that has no effect, because its condition `only_if` does not hold.

    Keys that occur in one of the earlier problems `told` are left out.
    """
    return [line for name, line in _unread(config, noted=False) if not any(name in problem for problem in told)]


def unread_notes(config: Any) -> list[str]:
    """Return the notes on set keys without effect that are marked `noted`, because scripts often carry them."""
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
