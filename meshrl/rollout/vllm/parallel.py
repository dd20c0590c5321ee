"""How vLLM's ranks share a model, as far as a weight sync has to know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    # Over more ranks than matrices, or in an order of vLLM's own.
    wider = config.data_parallel_size > 1 or getattr(config, "prefill_context_parallel_size", 1) > 1
    moves = config.enable_eplb or config.expert_placement_strategy != "linear" or experts % size
    if size == 1 or (experts and wider) or (spreads and moves):
        return None
    return Parallel(size, rank, size if spreads else 0)


def complaint(unsent: Iterable[Sequence[str]], passed_over: Iterable[Sequence[str]]) -> str | None:
    """What is wrong after an update: each rank's parameters that are no numbers, and those that stayed as they were."""
    kept = [name for names in passed_over for name in names]
    if kept:
        return (
            f"weight sync: vLLM did not take what it was sent for '{kept[0]}' ({len(kept)} parameters in all): it "
            "cannot renew those of this model while it runs; set rollout.name to sglang, embedded or hf"
        )
    found = [name for names in unsent for name in names]
    if not found:
        return None
    return (
        f"weight sync: vLLM's '{found[0]}' ({len(found)} parameters in all) has values that are no numbers. Either the "
        "trainer's weights have, or vLLM cuts this model over its ranks in another way than we think: then one rank "
        "must have all of it (rollout.tensor_model_parallel_size and expert_parallel_size, or "
        "engine_kwargs.vllm.tensor_parallel_size)"
    )
