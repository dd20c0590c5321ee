"""For tests only: SGLang's kernels have no CPU build on PyPI. It falls back to torch for all of them but two."""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("init_cpu_threads_env(str cpu_ids) -> str")
_library.impl("init_cpu_threads_env", lambda cpu_ids: cpu_ids, "CompositeExplicitAutograd")
_library.define("initialize(int size, int rank) -> ()")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")
__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} has no CPU build")

    return missing
