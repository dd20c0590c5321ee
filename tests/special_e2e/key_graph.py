"""Everything that hangs on an object, as a flat table of plain values, so that what two runs built can be compared."""

from __future__ import annotations

import functools
import re
import types
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, Path)
COMMON = frozenset((bool, int, float, str, type(None)))  # the same, asked faster
MOST_CHILDREN = 200
# Times, memory addresses and counters that differ from run to run.
VOLATILE = re.compile(
    r"\._seconds|timing|ledger|\.segments\[|clock|_pointers|_hooks|perf/|mfu/|\btime$|since|pids?\b|_rng|began|_s$|/s$|_ended|\[seconds\]|"
    r"memory/|_thread|start_process"
)
LONGEST = 20  # no match of it is longer


@functools.cache
def _is_volatile(path: str) -> bool:
    return VOLATILE.search(path) is not None


def graph(root: Any) -> dict[str, str]:
    """Every plain value that can be reached from an object, by the path to it. Configs themselves are left out."""
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}  # with the objects, so that no address is used twice
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        path, node, known = stack.pop()
        if _is_volatile(path[known:]):
            continue
        if type(node) in COMMON or isinstance(node, PLAIN):
            found[path] = f"{node!r:.300}"
        elif isinstance(node, type):
            found[path] = node.__qualname__
        elif isinstance(node, Tensor):
            found[path] = f"{tuple(node.shape)} {node.dtype} {node.device} {node.requires_grad}"
        elif isinstance(node, np.ndarray) and node.dtype != object:
            found[path] = f"{node.shape} {node.dtype} {zlib.crc32(np.ascontiguousarray(node).tobytes())}"
        elif id(node) not in seen:
            seen[id(node)] = node
            found[path] = type(node).__name__
            # What was said of a path need not be asked again of the longer ones that go on from it.
            known = max(0, len(path) - LONGEST)
            stack.extend((path + step, value, known) for step, value in _children(node))
    return found


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """What an object of ours, of a training library or of the language holds."""
    module = type(node).__module__
    if module.startswith("meshrl.config"):
        return
    if isinstance(node, Mapping):
        for number, (name, value) in enumerate(list(node.items())[:MOST_CHILDREN]):
            yield f"[{name if isinstance(name, str) else number}]", value
    elif isinstance(node, set | frozenset):
        yield "{}", repr(sorted(str(value) for value in node if isinstance(value, PLAIN)))
    elif isinstance(node, list | tuple | np.ndarray):
        for number, value in enumerate(list(node)[:MOST_CHILDREN]):
            yield f"[{number}]", value
    elif isinstance(node, functools.partial):
        yield from ((".func", node.func), (".args", node.args), (".keywords", node.keywords))
    elif isinstance(node, types.MethodType):
        yield ".__self__", node.__self__
    elif isinstance(node, types.FunctionType):
        yield from _closure(node)
    elif isinstance(node, nn.Module):
        for name, value in vars(node).items():
            if name in ("_modules", "_parameters", "_buffers") or isinstance(value, PLAIN) or is_dataclass(value):
                yield f".{name}", value
    elif isinstance(node, torch.optim.Optimizer):
        groups = [{name: value for name, value in group.items() if name != "params"} for group in node.param_groups]
        yield ".param_groups", groups
    elif is_dataclass(node) and not module.startswith("meshrl."):
        yield from ((f".{field.name}", getattr(node, field.name, None)) for field in fields(node))
    elif module.startswith(("meshrl.", "megatron.")) and not isinstance(node, np.random.Generator):
        yield from _attributes(node)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if not function.__module__.startswith("meshrl."):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield f".<{name}>", cell.cell_contents


def _attributes(node: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(node, "__dict__", {}).items():
        if name != "config" or not isinstance(value, dict):  # a copy of the whole config, kept in checkpoints
            yield f".{name}", value
    for kind in type(node).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(node, name):
                yield f".{name}", getattr(node, name)
