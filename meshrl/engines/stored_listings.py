"""The files of checkpoints before format 2: safetensors and listings in JSON. They are read, no longer written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from meshrl.engines.stored_state import STEP, Shape
from meshrl.files import read_json
from meshrl.models.tensor_files import open_tensors

# Kind, name, shape of the whole, start and size of the rectangle, and how it is looked at.
Listed = tuple[str, str, Shape, Shape, Shape, Callable[[], Any]]


def entries(folder: Path) -> list[Listed]:
    """All rectangles in a folder of that format; none where it is of another."""
    opened = cache(open_tensors)
    steps: dict[str, int] = {}
    found: list[Listed] = []
    for listing in sorted(folder.glob("tensors-*.json")):
        content = read_json(listing)
        for name, count in content["steps"].items():
            steps[name] = max(count, steps.get(name, 0))
        for entry in content["tensors"]:
            place = (tuple(entry[key]) for key in ("shape", "start", "size"))
            view = partial(_slice, opened, folder / entry["file"], entry["entry"])
            found.append((entry["kind"], entry["name"], *place, view))
    counts = {name: torch.tensor(float(count)) for name, count in steps.items()}
    return found + [(STEP, name, (), (), (), partial(torch.clone, count)) for name, count in counts.items()]


def _slice(opened: Callable[[Path], Any], file: Path, entry: str) -> Any:
    return opened(file).get_slice(entry)
