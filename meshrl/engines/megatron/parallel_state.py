"""Megatron-Core's process groups, made from the config once per process and looked up by name afterwards."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from meshrl.engines.megatron.ranks import ParallelRanks

logger = logging.getLogger(__name__)


def enter_parallel_state(ranks: ParallelRanks, seed: int) -> None:
    """Create the process groups of this layout; every rank must call this with the same sizes.

    Megatron-Core keeps one layout per process, so all models of a process share it.
    """
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            "strategy=megatron needs CUDA devices, on which Megatron-Core places its tensors; use fsdp2 on a CPU"
        ) from error
    wanted = _sizes(ranks)
    if parallel_state.model_parallel_is_initialized():
        found = _current_sizes()
        if found != wanted:
            raise ValueError(
                f"Megatron-Core keeps one layout a process: this one has {_in_words(found)}, and a second model asks "
                f"for {_in_words(wanted)}; give both the same sizes, or pools of their own"
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        virtual_pipeline_model_parallel_size=ranks.vpp if ranks.vpp > 1 else None,
        context_parallel_size=ranks.cp,
        expert_model_parallel_size=ranks.ep,
        expert_tensor_parallel_size=ranks.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if dist.get_rank() == 0:
        logger.info("megatron: %s on %d ranks", _in_words(wanted), ranks.world_size)


def leave_parallel_state() -> None:
    """Destroy the process groups, so that another layout may follow in this process."""
    # Megatron drops most groups without destroying them. They would keep threads and sockets until the process ends.
    for group in _held_groups():
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _held_groups() -> list[dist.ProcessGroup]:
    """Return every process group that Megatron holds and this rank is in, once each, except the world group."""
    found: dict[int, dist.ProcessGroup] = {}

    def look(value: object) -> None:
        if isinstance(value, dist.ProcessGroup) and value is not dist.group.WORLD:
            found[id(value)] = value
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            look(list(value.values()))

    for value in list(vars(parallel_state).values()):
        look(value)
    return list(found.values())


def _sizes(ranks: ParallelRanks) -> dict[str, int]:
    return {name: getattr(ranks, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}


def _current_sizes() -> dict[str, int]:
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _in_words(sizes: dict[str, int]) -> str:
    return " * ".join(f"{name} {size}" for name, size in sizes.items())
