"""What a run builds and does, as a flat table that two runs can be compared by."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Enum, Path)
VOLATILE = re.compile(r"timing_|ledger_s|perf/|time|_seconds|mfu|memory|trainer_s|/s$")


def graph(root: Any, limit: int = 40000) -> dict[str, str]:
    """Every plain value that can be reached from an object, by the path to it; configs themselves are left out."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    keep = []
    stack: list[tuple[str, Any]] = [("", root)]
    while stack and len(found) < limit:
        path, node = stack.pop()
        if isinstance(node, PLAIN):
            found[path] = repr(node)[:200]
            continue
        if isinstance(node, Tensor):
            found[path] = f"{tuple(node.shape)} {node.dtype} {node.device} {node.requires_grad}"
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        found[path] = type(node).__name__
        stack.extend((f"{path}{name}", value) for name, value in children(node))
    return found


def children(node: Any) -> Iterator[tuple[str, Any]]:
    kind = type(node)
    module = kind.__module__ or ""
    if module.startswith("meshrl.config"):
        return
    if isinstance(node, Mapping):
        for number, (name, value) in enumerate(list(node.items())[:200]):
            yield f"[{name if isinstance(name, str) else number}]", value
    elif isinstance(node, list | tuple | set | frozenset):
        for number, value in enumerate(list(node)[:200]):
            yield f"[{number}]", value
    elif isinstance(node, functools.partial):
        yield ".func", node.func
        yield ".args", node.args
        yield ".keywords", node.keywords
    elif isinstance(node, types.MethodType):
        yield ".__self__", node.__self__
    elif isinstance(node, types.FunctionType):
        if node.__module__ and node.__module__.startswith("meshrl.") and node.__closure__:
            for name, cell in zip(node.__code__.co_freevars, node.__closure__, strict=True):
                try:
                    yield f".<{name}>", cell.cell_contents
                except ValueError:
                    pass
    elif isinstance(node, np.random.Generator | torch.Generator):
        return
    elif isinstance(node, nn.Module):
        yield ".training", node.training
        for name, value in vars(node).items():
            if name in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
                yield f".{name}", value
            elif isinstance(value, PLAIN):
                yield f".{name}", value
    elif isinstance(node, torch.optim.Optimizer):
        yield ".groups", [{n: v for n, v in g.items() if n != "params"} for g in node.param_groups]
    elif module.startswith(("meshrl.", "concurrent", "queue")) or module in ("__main__",):
        for name, value in getattr(node, "__dict__", {}).items():
            if name == "_pointers":
                continue
            if name != "config" or not isinstance(value, dict):
                yield f".{name}", value
        for cls in kind.__mro__:
            for name in getattr(cls, "__slots__", ()):
                if hasattr(node, name):
                    yield f".{name}", getattr(node, name)
