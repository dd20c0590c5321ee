"""For tests only: SGLang's kernels have no CPU build on PyPI. It falls back to torch for all of them but these.

The sums and gathers over the ranks of one server go through torch's own: with tensor parallelism alone they are all
the ranks there are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("init_cpu_threads_env(str cpu_ids) -> str")
_library.impl("init_cpu_threads_env", lambda cpu_ids: cpu_ids, "CompositeExplicitAutograd")
_library.define("initialize(int size, int rank) -> ()")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def _sum(tensor: torch.Tensor, op: int) -> None:
    dist.all_reduce(tensor)


def _gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


_library.define("shm_allreduce(Tensor(a!) tensor, int op) -> ()")
_library.impl("shm_allreduce", _sum, "CompositeExplicitAutograd")
_library.define("shm_allgather(Tensor tensor, int dim) -> Tensor")
_library.impl("shm_allgather", _gather, "CompositeExplicitAutograd")
__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} has no CPU build")

    return missing
