"""The FSDP engine's state as rectangles under the modules' names; see `meshrl.engines.stored_state` for the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from meshrl.engines.extra_state import extra_state, load_extra
from meshrl.engines.fsdp.reading import local_rows
from meshrl.engines.master import MasterAdamW
from meshrl.engines.optim import LocalAdamW
from meshrl.engines.stored_reading import Stored
from meshrl.engines.stored_state import PARAM, STEP, Rectangle, Shape, Snapshot
from meshrl.models.buffers import persistent_buffers

if TYPE_CHECKING:
    from meshrl.engines.fsdp.engine import FSDPEngine

FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
# A tensor of the state by its kind and its parameter's name.
State = dict[tuple[str, str], Any]


def take_snapshot(engine: FSDPEngine, contents: Sequence[str]) -> Snapshot:
    """What this rank has to write of what `contents` names; all ranks take part."""
    rectangles: list[Rectangle] = []
    for (kind, name), value in _state(engine, contents).items():
        local, start, shape = _local(value)
        rectangles.append(Rectangle(kind, name, shape, start, local))
    extra = extra_state(engine.device, getattr(engine, "learning_rate", None)) if "extra" in contents else None
    return Snapshot(_own(rectangles, engine), extra)


def load_state(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """Reads what `contents` names into the engine, whatever layout or engine wrote it."""
    stored = Stored(folder)
    state = _state(engine, contents)
    if "model" in contents:
        stored.check_no_more_than({name for kind, name in state if kind == PARAM})
    with torch.no_grad():
        for (kind, name), value in state.items():
            if kind == STEP:
                state[kind, name] = torch.full_like(value, stored.steps_of(name))
                continue
            local, start, shape = _local(value)
            if local.numel():
                stored.fill(kind, name, shape, start, local)
    _restore(engine, state)
    if "extra" in contents:
        load_extra(folder, engine.rank, engine.device, getattr(engine, "learning_rate", None))


def _local(value: Tensor) -> tuple[Tensor, Shape, Shape]:
    """This rank's part of a tensor as a view, where it starts, and the whole's shape."""
    if not isinstance(value, DTensor):
        value = value.detach()
        return value, (0,) * value.dim(), tuple(value.shape)
    first, _ = local_rows(value)
    return value.to_local().detach(), (first, *(0 for _ in value.shape[1:])), tuple(value.shape)


def _own(rectangles: list[Rectangle], engine: FSDPEngine) -> list[Rectangle]:
    """Those of the rectangles that no rank before this one holds: copies are written once."""
    held = [(r.kind, r.name, r.start) for r in rectangles if r.tensor.numel()]
    everyone: list[Any] = [held]
    if engine.world_size > 1:
        everyone = [None] * engine.world_size
        dist.all_gather_object(everyone, held)
    before = {key for keys in everyone[: engine.rank] for key in keys}
    return [r for r in rectangles if r.tensor.numel() and (r.kind, r.name, r.start) not in before]


def _state(engine: FSDPEngine, contents: Sequence[str]) -> State:
    """The tensors to write, or to read into."""
    state: State = {}
    optimizer = getattr(engine, "optimizer", None)
    if "model" in contents:
        state |= {(PARAM, name): value for name, value in _weights(engine).items()}
    if "optimizer" in contents and optimizer is not None:
        state |= _moments(engine, optimizer)
    return state


def _weights(engine: FSDPEngine) -> dict[str, Any]:
    optimizer, buffers = getattr(engine, "optimizer", None), persistent_buffers(engine.hf_model)
    if isinstance(optimizer, MasterAdamW):
        params = engine.hf_model.named_parameters()
        # On the host: together they are twice as large as the parameters.
        return {name: optimizer.master(p).cpu() if p.requires_grad else p.detach() for name, p in params} | buffers
    # Tied weights appear once.
    found = get_model_state_dict(engine.module)
    return {name: found[engine.prefix + name] for name in engine.param_names} | buffers


def _moments(engine: FSDPEngine, optimizer: torch.optim.Optimizer) -> State:
    moments: State = {}
    if isinstance(optimizer, MasterAdamW):
        for name, param in engine.hf_model.named_parameters():
            if param.requires_grad:
                held = optimizer.state[param]
                moments |= {(kind, name): held[kind] for kind in ("exp_avg", "exp_avg_sq")}
                moments[STEP, name] = torch.tensor(float(optimizer.steps))
        return moments
    if isinstance(optimizer, LocalAdamW):
        optimizer.make_states()
    found = get_optimizer_state_dict(engine.module, optimizer, options=FLAT)
    start = "state." + engine.prefix
    for key, value in found.items():
        if key.startswith(start):
            name, _, kind = key.removeprefix(start).rpartition(".")
            moments[kind, name] = value
    return moments


@torch.no_grad()
def _restore(engine: FSDPEngine, state: State) -> None:
    """Puts loaded tensors where the engine keeps them; many are its own already."""
    optimizer = getattr(engine, "optimizer", None)
    weights = {name: value for (kind, name), value in state.items() if kind == "param"}
    moments = {(kind, name): value for (kind, name), value in state.items() if kind != "param"}
    if isinstance(optimizer, MasterAdamW):
        for name, param in engine.hf_model.named_parameters():
            if name in weights and param.requires_grad:
                optimizer.set_master(param, weights[name])
        steps = {int(value) for (kind, _), value in moments.items() if kind == STEP}
        optimizer.steps = steps.pop() if steps else optimizer.steps
        return
    if weights:
        set_model_state_dict(engine.module, {engine.prefix + k: v for k, v in weights.items()}, options=FLAT)
    if moments and optimizer is not None:
        whole = get_optimizer_state_dict(engine.module, optimizer, options=FLAT)
        whole |= {f"state.{engine.prefix}{name}.{kind}": value for (kind, name), value in moments.items()}
        set_optimizer_state_dict(engine.module, optimizer, whole, options=FLAT)
