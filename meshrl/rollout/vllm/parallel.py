"""How vLLM's ranks share a model, as far as a weight sync has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrl.models.sizes import expert_count


@dataclass(frozen=True)
class Parallel:
    """One rank of an engine of `size` ranks, which cut matrices (`tp`) and spread experts (`ep`; 0: cut them)."""

    size: int
    rank: int
    ep: int = 0

    @property
    def tp(self) -> int:
        return self.size


def parallel_of(config: Any, rank: int, hf_config: Any) -> Parallel | None:
    """By vLLM's `ParallelConfig`; None where a rank keeps everything, or where we cannot tell what it keeps."""
    size, experts = int(config.tensor_parallel_size), expert_count(hf_config)
    spreads = bool(config.enable_expert_parallel) and experts > 0
    moves = config.data_parallel_size > 1 or config.enable_eplb or config.expert_placement_strategy != "linear"
    if size == 1 or (spreads and (moves or experts % size)):
        return None
    return Parallel(size, rank, size if spreads else 0)
