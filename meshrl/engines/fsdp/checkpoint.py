"""The FSDP engine's state as a torch distributed checkpoint: sharded, under Hugging Face names, for any layout.

model.<name>                       weights (float32 masters where the parameters are kept in bfloat16)
optimizer.<name>.<state>           exp_avg, exp_avg_sq, step
extra-<rank>.pt                    schedule and random states, one file a rank
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from meshrl.engines.extra_state import load_extra, save_extra
from meshrl.engines.master import MasterAdamW

if TYPE_CHECKING:
    from meshrl.engines.fsdp.engine import FSDPEngine

FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def save_state(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """Writes what `contents` names; all ranks take part."""
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(engine, contents)
    if state:
        dcp.save(state, checkpoint_id=str(folder))
    if "extra" in contents:
        save_extra(folder, engine.rank, engine.device, getattr(engine, "learning_rate", None))
    dist.barrier()


def load_state(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """Reads what `contents` names into the engine, whatever layout wrote it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint at '{folder}'")
    state = _state(engine, contents)
    if state:
        dcp.load(state, checkpoint_id=str(folder))
        _restore(engine, state, contents)
    if "extra" in contents:
        load_extra(folder, engine.rank, engine.device, getattr(engine, "learning_rate", None))


def _state(engine: FSDPEngine, contents: Sequence[str]) -> dict[str, Any]:
    """The tensors to write, or to read into, by their names in the checkpoint."""
    state: dict[str, Any] = {}
    optimizer = getattr(engine, "optimizer", None)
    if "model" in contents:
        state |= {f"model.{name}": value for name, value in _weights(engine).items()}
    if "optimizer" in contents and optimizer is not None:
        state |= {f"optimizer.{name}": value for name, value in _moments(engine, optimizer).items()}
    return state


def _weights(engine: FSDPEngine) -> dict[str, Any]:
    optimizer = getattr(engine, "optimizer", None)
    if isinstance(optimizer, MasterAdamW):
        params = engine.hf_model.named_parameters()
        return {name: optimizer.master(p) if p.requires_grad else p.detach() for name, p in params}
    # Tied weights appear once.
    found = get_model_state_dict(engine.module)
    return {name: found[engine.prefix + name] for name in engine.param_names}


def _moments(engine: FSDPEngine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(optimizer, MasterAdamW):
        moments: dict[str, Any] = {}
        for name, param in engine.hf_model.named_parameters():
            if param.requires_grad:
                held = optimizer.state[param]
                moments |= {f"{name}.exp_avg": held["exp_avg"], f"{name}.exp_avg_sq": held["exp_avg_sq"]}
                moments[f"{name}.step"] = torch.tensor(float(optimizer.steps))
        return moments
    found = get_optimizer_state_dict(engine.module, optimizer, options=FLAT)
    start = "state." + engine.prefix
    return {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}


@torch.no_grad()
def _restore(engine: FSDPEngine, state: dict[str, Any], contents: Sequence[str]) -> None:
    """Puts loaded tensors where the engine keeps them; many are its own already."""
    optimizer = getattr(engine, "optimizer", None)
    weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    moments = {k.removeprefix("optimizer."): v for k, v in state.items() if k.startswith("optimizer.")}
    if isinstance(optimizer, MasterAdamW):
        for name, param in engine.hf_model.named_parameters():
            if name in weights and param.requires_grad:
                optimizer.set_master(param, weights[name])
        steps = {int(value) for name, value in moments.items() if name.endswith(".step")}
        optimizer.steps = steps.pop() if steps else optimizer.steps
        return
    if weights:
        set_model_state_dict(engine.module, {engine.prefix + k: v for k, v in weights.items()}, options=FLAT)
    if moments and optimizer is not None:
        whole = get_optimizer_state_dict(engine.module, optimizer, options=FLAT)
        whole |= {f"state.{engine.prefix}{name}": value for name, value in moments.items()}
        set_optimizer_state_dict(engine.module, optimizer, whole, options=FLAT)
