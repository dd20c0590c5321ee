"""From a recipe and `a.b.c=value` overrides to a typed config that knows where each value came from."""

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from meshrl.config import quick_yaml
from meshrl.config.aliases import RETIRED, canonical, nearest
from meshrl.config.errors import ConfigError
from meshrl.config.recipe import Recipe, read_recipes
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTConfig
from meshrl.config.tree import Leaf, fill_followers, leaves, sections, type_name
from meshrl.config.values import value_problems

COMMAND_LINE = "command line"
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A config, the source of each of its values by dotted key, and remarks for the reader."""

    config: T
    sources: dict[str, str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """One value that somebody asked for."""

    name: str
    value: Any
    source: str


def load_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    root: type[T] = PPOConfig,  # type: ignore[assignment]
) -> Loaded[T]:
    """Load a recipe (path or shipped name) and `a.b.c=value` overrides into `root`; one `ConfigError` for all."""
    problems: list[str] = []
    notes: list[str] = []
    settings: list[Setting] = []
    for file in read_recipes(recipe) if recipe is not None else []:
        settings += _settings_of(file, root)
    for override in overrides:
        try:
            settings += _parse_override(override, root)
        except ConfigError as error:
            problems += error.problems

    tree = _defaults(root)
    sources = dict.fromkeys(leaves(root), "default")
    for setting in settings:
        name = canonical(setting.name)
        if name != setting.name:
            notes.append(f"{setting.name} is read as {name} ({setting.source})")
        problem = _apply(tree, root, Setting(name, setting.value, setting.source), setting.name, sources)
        if problem:
            problems.append(f"{problem} ({setting.source})")
    if problems:
        raise ConfigError(_of_the_other_command(recipe, settings, root) or problems)
    return Loaded(*_to_object(tree, sources), notes)


def _settings_of(file: Recipe, root: type) -> Iterator[Setting]:
    """What a recipe asks for: keys that hold texts take them as they are written, not as YAML types them."""
    written = dict(_flatten(file.written, "", root))
    for name, value in _flatten(file.values, "", root):
        leaf = _leaf_of(canonical(name), root)
        is_text = leaf is not None and leaf.takes_any_text
        yield Setting(name, written.get(name, value) if is_text else value, file.source(name))


def _of_the_other_command(recipe: str | Path | None, settings: Sequence[Setting], root: type) -> list[str]:
    """Says so, if a recipe of `meshrl sft` was given to `meshrl train` or the other way round."""
    others = {PPOConfig: (SFTConfig, "sft", "with"), SFTConfig: (PPOConfig, "train", "without")}
    names = [canonical(setting.name) for setting in settings if setting.source != COMMAND_LINE]
    if recipe is None or root not in others or all(_leaf_of(name, root) for name in names):
        return []
    other, command, how = others[root]
    if not all(_leaf_of(name, other) for name in names):
        return []
    return [f"{recipe} is a recipe of meshrl {command}: use that command (or meshrl config {how} --sft)"]


def _defaults(root: type) -> DictConfig:
    """The tree before any setting."""
    return pickle.loads(_pickled_defaults(root))


@cache
def _pickled_defaults(root: type) -> bytes:
    # To read a pickle is thirty times as fast as to make the tree of its dataclasses.
    return pickle.dumps(OmegaConf.structured(root))


def _to_object(tree: DictConfig, sources: dict[str, str]) -> tuple[Any, dict[str, str]]:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        where = f" ({sources[error.full_key]})" if error.full_key in sources else ""
        raise ConfigError([f"{error.full_key}: {_first_line(error)}{where}"]) from error
    problems = [f"{problem} ({sources[name]})" for name, problem in value_problems(config)]
    if problems:
        raise ConfigError(problems)
    for name in fill_followers(config):
        sources[name] = f"follows {leaves(type(config))[name].info.follows}"
    return config, sources


def _flatten(values: dict[str, Any], prefix: str, root: type) -> Iterator[tuple[str, Any]]:
    """Dotted names and values down to the keys; what lies below a dict-valued key stays one value."""
    for part, value in values.items():
        name = f"{prefix}{part}"
        known = leaves(root).get(canonical(name))
        if isinstance(value, dict) and known is None:
            yield from _flatten(value, f"{name}.", root)
        elif value is None and canonical(name) in sections(root):
            continue  # a heading with nothing under it
        else:
            yield name, value


def _parse_override(text: str, root: type) -> list[Setting]:
    name, equals, value = text.partition("=")
    name = name.lstrip("+").strip()
    if not equals or not name or name.startswith(("-", "~")):
        raise ConfigError([f"cannot read the override {text!r}: write it as a.b.c=value"])
    leaf = _leaf_of(canonical(name), root)
    is_text = leaf is not None and leaf.takes_any_text
    if is_text and _is_plain(value.strip()):
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
    if isinstance(parsed["value"], dict) and canonical(name) in sections(root):
        return [Setting(key, v, COMMAND_LINE) for key, v in _flatten(parsed["value"], f"{name}.", root)]
    return [Setting(name, parsed["value"], COMMAND_LINE)]


def _is_plain(text: str) -> bool:
    """Whether a text value stands for itself: YAML would read `12:30` and `1e5` as numbers and `#` as a comment."""
    return text not in ("", "~", "null", "None") and not text.startswith(("'", '"', "[", "{"))


def _expanded(value: Any) -> Any:
    """With the home folder for `~/`: shells leave it as it is behind an equals sign."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _apply(tree: DictConfig, root: type, setting: Setting, written: str, sources: dict[str, str]) -> str | None:
    """Set one value; returns what is wrong with it, if anything."""
    leaf = _leaf_of(setting.name, root)
    if leaf is None:
        return _unknown(setting.name, written, root)
    if setting.name != leaf.name and leaf.base_type is not dict:
        return f"unknown key {written}: {leaf.name} holds one value ({type_name(leaf.type)}), no keys"
    value = setting.value
    if value is False and "off" in leaf.info.choices:  # YAML takes the bare word for a truth value
        value = "off"
    if leaf.base_type is list and value is not None and not isinstance(value, list):
        if isinstance(value, dict) and leaf.item_type in (str, int, float, bool):
            return f"{written} must be {type_name(leaf.type)}, not {value!r}"
        value = [value]
    value = _expanded(value)
    try:
        OmegaConf.update(tree, setting.name, value, merge=True, force_add=setting.name != leaf.name)
    except OmegaConfBaseException:
        shown = "null" if value is None else repr(setting.value)
        return f"{written} must be {type_name(leaf.type)}, not {shown}"
    sources[leaf.name] = setting.source
    return None


def _leaf_of(name: str, root: type) -> Leaf | None:
    """The key itself, or the dict-valued key that a longer name reaches into."""
    known = leaves(root)
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return None


def _unknown(name: str, written: str, root: type) -> str:
    if name in sections(root):
        return f"{written} is a section: set the keys below it"
    if name in RETIRED:
        return f"unknown key {written}: {RETIRED[name]}"
    suggestion = nearest(name, [*leaves(root), *sections(root)])
    return f"unknown key {written}" + (f": did you mean {suggestion}?" if suggestion else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
