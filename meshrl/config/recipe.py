"""Reading recipes: YAML files, shipped or one's own, that may stand on one other recipe."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import meshrl.recipes
from meshrl.config import quick_yaml
from meshrl.config.errors import ConfigError

SHIPPED = Path(meshrl.recipes.__file__).parent


@dataclass(frozen=True)
class Recipe:
    """One recipe file: its values as nested dicts, as YAML types them and as they are written, and each key's line."""

    path: Path
    values: dict[str, Any]
    written: dict[str, Any]
    lines: dict[str, int]

    def source(self, name: str) -> str:
        """Where a key stands, as `file:line`."""
        return f"{self.path.name}:{self.lines[name]}" if name in self.lines else self.path.name


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def is_recipe(word: str) -> bool:
    """Whether a word of the command line names a recipe, and does not set a key."""
    return "=" not in word or (word.endswith((".yaml", ".yml")) and Path(word).is_file())


def find_recipe(recipe: str | Path, beside: Path | None = None) -> Path:
    """The file of a recipe given by path (also relative to `beside`) or by shipped name."""
    given = Path(recipe)
    folders = [Path(), *([beside] if beside else [])]
    for candidate in (folder / given for folder in folders):
        if candidate.is_file():
            return candidate
    shipped = SHIPPED / f"{given}.yaml"
    if given.parent == Path() and shipped.is_file():
        return shipped
    raise ConfigError([f"no recipe {str(recipe)!r}: neither a file nor one of {', '.join(shipped_recipes())}"])


def read_recipes(recipe: str | Path) -> list[Recipe]:
    """A recipe and those it stands on, the outermost ancestor first."""
    chain: list[Recipe] = []
    path = find_recipe(recipe)
    while True:
        if any(path.samefile(known.path) for known in chain):
            names = " -> ".join(known.path.name for known in [*chain, chain[0]])
            raise ConfigError([f"recipes stand on each other in a circle: {names}"])
        read = _read(path)
        read.values.pop("defaults", None)
        parent = read.written.pop("defaults", None)
        chain.append(read)
        if parent is None:
            return chain[::-1]
        if not isinstance(parent, str):
            raise ConfigError([f"{path}: defaults must be the name or path of one other recipe, not {parent!r}"])
        path = find_recipe(parent, beside=path.parent)


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
    """A text's values, the same as they are written, and the keys' lines."""
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    lines = dict(_key_lines(quick_yaml.composed(text), ""))
    return values, quick_yaml.texts(text) or {}, lines


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            name = f"{prefix}{key_node.value}"
            yield name, key_node.start_mark.line + 1
            yield from _key_lines(value_node, f"{name}.")
