"""The Megatron engine's state as a distributed checkpoint of Megatron-Core: sharded, and readable on other layouts.

    model/, optimizer/      Megatron-Core's own format, by global parameter names
    extra-<rank>.pt         schedule and random states, one file a rank
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from meshrl.engines.extra_state import load_extra, save_extra

if TYPE_CHECKING:
    from meshrl.engines.megatron.engine import MegatronEngine

# The only format of the distributed optimizer that fits any layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_state(engine: MegatronEngine, folder: Path, contents: Sequence[str]) -> None:
    """Writes what `contents` names; all ranks take part."""
    for part in ("model", "optimizer"):
        if dist.get_rank() == 0 and part in contents:
            shutil.rmtree(folder / part, ignore_errors=True)
            (folder / part).mkdir(parents=True)
    dist.barrier()
    weights = _model_state(engine)
    if "model" in contents:
        dist_checkpointing.save(weights, str(folder / "model"), content_metadata=METADATA)
    if "optimizer" in contents and engine.optim_config is not None:
        state = engine.optimizer.sharded_state_dict(weights, metadata=METADATA)
        dist_checkpointing.save({"optimizer": state}, str(folder / "optimizer"), content_metadata=METADATA)
    if "extra" in contents:
        folder.mkdir(parents=True, exist_ok=True)
        save_extra(folder, dist.get_rank(), engine.device, getattr(engine, "learning_rate", None))
    dist.barrier()


def load_state(engine: MegatronEngine, folder: Path, contents: Sequence[str]) -> None:
    """Reads what `contents` names into the engine, whatever layout wrote it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint at '{folder}'")
    if "model" in contents:
        _load_model(engine, folder / "model")
    if "optimizer" in contents and engine.optim_config is not None:
        wanted = engine.optimizer.sharded_state_dict(_model_state(engine), is_loading=True, metadata=METADATA)
        found = dist_checkpointing.load({"optimizer": wanted}, str(folder / "optimizer"))
        engine.optimizer.load_state_dict(found["optimizer"])
    if "extra" in contents:
        load_extra(folder, dist.get_rank(), engine.device, getattr(engine, "learning_rate", None))


def _load_model(engine: MegatronEngine, folder: Path) -> None:
    found = dist_checkpointing.load(_model_state(engine), str(folder))
    for number, chunk in enumerate(engine.model):
        chunk.load_state_dict(found[_key(engine, number)])
    if engine.optim_config is not None:
        # The optimizer's float32 weights are copies: without its states in the checkpoint they follow the model's.
        engine.optimizer.reload_model_params()


def _model_state(engine: MegatronEngine) -> dict[str, Any]:
    metadata = METADATA | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    with torch.no_grad():
        return {
            _key(engine, number): chunk.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(engine.model)
        }


def _key(engine: MegatronEngine, number: int) -> str:
    return "model" if len(engine.model) == 1 else f"model{number}"
