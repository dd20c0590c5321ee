"""Models named as on the Hugging Face hub: found in the hub's cache on this machine, or downloaded into it.

All other code reads folders, so names are replaced by folders before a run is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.config.keys import ConfigError, get_value, leaves, set_value
from meshrl.config.model_folder import is_hub_name
from meshrl.files import read_json

# The keys that name a model, and the key that needs no weights.
MODEL_KEYS = re.compile(r"(.*\.)?(model\.path|judge\.path|reference\.path|tokenizer_path)")
TOKENIZER_KEY = "tokenizer_path"
FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
# The same weights in other formats.
LEFT_OUT = ("original/*", "consolidated*", "*/*.safetensors", "*.bin.index.json")


def cached_folder(name: str, weights: bool = True) -> Path | None:
    """Return the folder of a model in the cache, or None unless all needed files are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, **_patterns(weights)))
    except LocalEntryNotFoundError:
        return None
    return folder if _is_whole(folder, weights) else None


def downloaded_folder(name: str, weights: bool = True) -> Path:
    """Download the missing files of a model and return its folder; raise a `ValueError` if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = Path(snapshot_download(name, **_patterns(weights)))
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{name} is not a folder, not whole in the hub's cache, and could not be downloaded: {reason}. Is it spelt "
            "right? Models that must be asked for need a token (HF_TOKEN); without a network, give a folder"
        ) from error
    if _is_whole(folder, weights):
        return folder
    raise ValueError(
        f"{name} on the hub has no weights in safetensors; those in other formats are pickles, which run what they say "
        f"when they are read: if you trust it, 'hf download {name}' and 'meshrl convert FOLDER NEW --trust-pickle'"
        if weights
        else f"{name} on the hub has no tokenizer that can be read"
    )


def _patterns(weights: bool) -> dict[str, Any]:
    """Return the download patterns for a model's needed files."""
    if not weights:
        return {"allow_patterns": [pattern for pattern in FILES if pattern != "*.safetensors"]}
    return {"allow_patterns": list(FILES), "ignore_patterns": list(LEFT_OUT)}


def _is_whole(folder: Path, weights: bool) -> bool:
    """Return whether a folder has all files that its own index lists, or a tokenizer if `weights` is False."""
    if not weights:
        return any(folder.glob("tokenizer*"))
    if not (folder / "config.json").is_file():
        return False
    listings = [read_json(index) for index in folder.glob("*.index.json")]
    if not listings:
        return any(folder.glob("*.safetensors"))
    named = (set(found["weight_map"].values()) for found in listings)
    return any(all(n.endswith(".safetensors") and (folder / n).is_file() for n in names) for names in named)


def folder_of(path: str, say: Callable[[str], None], may_download: bool = True, weights: bool = True) -> str:
    """Return a model's folder: `path` itself, or the cached folder of the hub's model of that name."""
    if not is_hub_name(path):
        return path
    folder = cached_folder(path, weights)
    if folder is None and may_download:
        say(f"downloading {path} from the hub")
        folder = downloaded_folder(path, weights)
    if folder is None:
        return path
    say(f"{path} is read from {folder}")
    return str(folder)


def resolve_models(config: Any, sources: dict[str, str], say: Callable[[str], None], may_download: bool) -> None:
    """Replace the hub's names by folders in all keys of a config that name a model."""
    problems = []
    for key in leaves(type(config)):
        value = get_value(config, key) if MODEL_KEYS.fullmatch(key) else None
        if not value or not is_hub_name(value):
            continue
        section = get_value(config, key.rpartition(".")[0])
        weights = not key.endswith(TOKENIZER_KEY) and not getattr(section, "random_init", False)
        try:
            folder = folder_of(value, say, may_download, weights)
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        if folder != value:
            set_value(config, key, folder)
            sources[key] = f"{sources[key]}, {value} of the hub"
    if problems:
        raise ConfigError(problems)
