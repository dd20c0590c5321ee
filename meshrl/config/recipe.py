"""Reading of recipes: YAML files, shipped or of the user, that may be based on another recipe (`defaults`)."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import meshrl.recipes
from meshrl.config import quick_yaml
from meshrl.config.keys import ConfigError

SHIPPED = Path(meshrl.recipes.__file__).parent
# verl's own config files, as a `defaults` list or --config-name names them, and the keys that each of them sets here.
_MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron", "critic.strategy": "megatron"}
VERL_CONFIGS: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": _MEGATRON,
    "_generated_ppo_trainer": {},
    "_generated_ppo_megatron_trainer": _MEGATRON,
    "sft_trainer": {},
    "sft_trainer_engine": {},
    "fully_async_ppo_trainer": {},
    "fully_async_ppo_megatron_trainer": _MEGATRON,
    "one_step_off_ppo_trainer": {},
    "one_step_off_ppo_megatron_trainer": _MEGATRON,
}
# verl's files that choose an engine. A `defaults` list or an override names such a file as `section@place: file`.
VERL_GROUPS: dict[str, dict[str, str]] = {
    "megatron_actor": {"actor_rollout_ref.actor.strategy": "megatron"},
    "megatron_critic": {"critic.strategy": "megatron"},
    "megatron_reward_model": {"reward_model.strategy": "megatron"},
    "megatron_reward_loop": {"reward_model.strategy": "megatron"},
}
# verl's other files for single sections, which change nothing here.
VERL_PARTS = (
    "dp_actor", "dp_critic", "dp_ref", "dp_reward_model", "dp_reward_loop", "megatron_ref", "legacy_data", "rollout",
    "hf_model", "rollout_correction", "reward_manager", "profiler", "fsdp", "megatron",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The content of one recipe file, as nested dicts.

    `values` are typed by YAML's rules. `written` has every scalar as the string in the file. `lines` maps each dotted
    key to its line number.
    """

    path: Path
    values: dict[str, Any]
    written: dict[str, Any]
    lines: dict[str, int]

    def source(self, name: str) -> str:
        """Return the place of a key as `file:line`, or the file's name alone if the file does not set the key."""
        return f"{self.path.name}:{self.lines[name]}" if name in self.lines else self.path.name


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def is_recipe(word: str) -> bool:
    """Return whether an argument of the command line names a recipe. Other arguments set a key or remove one (`~key`).

    An argument with `=` is a recipe only if it is the path of an existing YAML file.
    """
    return ("=" not in word and not word.startswith("~")) or (word.endswith((".yaml", ".yml")) and Path(word).is_file())


def find_recipe(recipe: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a recipe given by path or by shipped name. Raise `ConfigError` if there is none.

    A path may be relative to the working directory or to the folder `beside`, and may omit `.yaml`.
    """
    given = Path(recipe)
    folders = [Path(), *([beside] if beside else [])]
    for candidate in (folder / name for folder in folders for name in (given, Path(f"{given}.yaml"))):
        if candidate.is_file():
            return candidate
    shipped = SHIPPED / f"{given}.yaml"
    if given.parent == Path() and shipped.is_file():
        return shipped
    raise ConfigError([f"no recipe {str(recipe)!r}: neither a file nor one of {', '.join(shipped_recipes())}"])


def read_recipes(recipe: str | Path) -> list[Recipe]:
    """Read a recipe and all recipes that it is based on. The result begins with the outermost ancestor."""
    chain: list[Recipe] = []
    if (name := _verl_name(recipe)) is not None:
        return [_chosen(name, VERL_CONFIGS[name])]
    path = find_recipe(recipe)
    while True:
        if any(path.samefile(known.path) for known in chain):
            names = " -> ".join(known.path.name for known in [*chain, chain[0]])
            raise ConfigError([f"recipes stand on each other in a circle: {names}"])
        read = _read(path)
        read.values.pop("defaults", None)
        named = read.written.pop("defaults", None)
        chain.append(read)
        parent, chosen = _parent(path, named)
        chain += chosen
        if parent is None:
            return chain[::-1]
        path = find_recipe(parent, beside=path.parent)


def _parent(path: Path, named: Any) -> tuple[str | None, list[Recipe]]:
    """Split the value of `defaults` (a name or Hydra's list) into a parent recipe and the settings of verl's files.

    `defaults` may name at most one recipe of meshrl's. A file of verl becomes a `Recipe` if it sets any key.
    """
    entries = named if isinstance(named, list) else [] if named is None else [named]
    parents, chosen = [], []
    for entry in entries:
        if isinstance(entry, dict) and len(entry) == 1:
            part = str(next(iter(entry.values())))
            if (group := group_settings(part)) is None:
                raise ConfigError([f"{path}: defaults names {part}, which is none of verl's: write its keys out"])
            chosen.append(_chosen(part, group))
        elif not isinstance(entry, str):
            raise ConfigError([f"{path}: defaults must be the name or path of one other recipe, not {named!r}"])
        elif (name := _verl_name(entry)) is not None and not (path.parent / f"{name}.yaml").is_file():
            chosen.append(_chosen(name, VERL_CONFIGS[name]))
        elif entry != "_self_":
            parents.append(entry)
    if isinstance(named, list) and "_self_" in named[:-1]:
        raise ConfigError([f"{path}: defaults has _self_ before others, which would overrule it: put it last"])
    if len(parents) > 1:
        raise ConfigError([f"{path}: defaults names {' and '.join(parents)}: a recipe stands on one other"])
    return (parents[0] if parents else None), [recipe for recipe in chosen if recipe.values]


def group_settings(part: str) -> dict[str, str] | None:
    """Return the keys that a section file of verl sets here, or None if verl has no such file."""
    known = part.removesuffix(".yaml")
    return VERL_GROUPS.get(known, {} if known in VERL_PARTS else None)


def _verl_name(recipe: str | Path) -> str | None:
    name = str(recipe).removesuffix(".yaml")
    return name if name in VERL_CONFIGS and not Path(recipe).is_file() else None


def _chosen(name: str, settings: Mapping[str, Any]) -> Recipe:
    """Return a `Recipe` without lines from dotted keys, for the name of a file of verl."""
    return Recipe(Path(name), dict(settings), dict(settings), {})


def _read(path: Path) -> Recipe:
    try:
        values, written, lines = copy.deepcopy(_content(path.read_text(encoding="utf-8")))  # readers change them
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} is not valid YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(values, dict):
        raise ConfigError([f"{path} must hold keys and values, not a list"])
    return Recipe(path, {str(name): value for name, value in values.items()}, written, lines)


@lru_cache(maxsize=64)
def _content(text: str) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Parse a recipe's text into its typed values, its values as strings, and the line of each key."""
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    lines = dict(_key_lines(quick_yaml.composed(text), ""))
    return values, quick_yaml.texts(text) or {}, lines


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            name = f"{prefix}{key_node.value}"
            yield name, key_node.start_mark.line + 1
            yield from _key_lines(value_node, f"{name}.")
