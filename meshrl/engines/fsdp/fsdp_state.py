"""The FSDP engine's state as rectangles under the modules' names, and the initial weights of a sharded model.

- `take_snapshot`, `load_state`: checkpoints; see `meshrl.engines.state_files` for the files.
- `fill`, `fill_randomly`: values for a model that was built on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from meshrl.engines.optim import LocalAdamW, MasterAdamW
from meshrl.engines.state_files import PARAM, STEP, Rectangle, Shape, Snapshot, extra_state, load_extra
from meshrl.engines.state_reader import Stored
from meshrl.models.loading import is_value_head, named_weights, persistent_buffers
from meshrl.models.lora import plain_name
from meshrl.models.saving import tensor_files

if TYPE_CHECKING:
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine


FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
# A tensor of the state by its kind and its parameter's name.
State = dict[tuple[str, str], Any]


def take_snapshot(engine: FSDPEngine, contents: Sequence[str]) -> Snapshot:
    """Return the part of the state in `contents` that this rank has to write; all ranks must take part."""
    rectangles: list[Rectangle] = []
    for (kind, name), value in _state(engine, contents).items():
        local, start, shape = _local(value)
        rectangles.append(Rectangle(kind, name, shape, start, local))
    extra = extra_state(engine.device, getattr(engine, "learning_rate", None)) if "extra" in contents else None
    return Snapshot(_own(rectangles, engine), extra)


def load_state(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """Load the state in `contents` into the engine, whatever layout or engine wrote it."""
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
    """Return this rank's part of a tensor as a view, the part's start, and the whole tensor's shape."""
    if not isinstance(value, DTensor):
        value = value.detach()
        return value, (0,) * value.dim(), tuple(value.shape)
    first, _ = local_rows(value)
    return value.to_local().detach(), (first, *(0 for _ in value.shape[1:])), tuple(value.shape)


def _own(rectangles: list[Rectangle], engine: FSDPEngine) -> list[Rectangle]:
    """Return the rectangles that no lower rank holds, so that copies are written once; collective."""
    held = [(r.kind, r.name, r.start) for r in rectangles if r.tensor.numel()]
    everyone: list[Any] = [held]
    if engine.world_size > 1:
        everyone = [None] * engine.world_size
        dist.all_gather_object(everyone, held)
    before = {key for keys in everyone[: engine.rank] for key in keys}
    return [r for r in rectangles if r.tensor.numel() and (r.kind, r.name, r.start) not in before]


def _state(engine: FSDPEngine, contents: Sequence[str]) -> State:
    """Return the engine's tensors of `contents`, to write them or to read into them."""
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
        # On the host, because together they are twice as large as the parameters.
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
    """Put loaded tensors where the engine keeps them; many are the engine's own tensors already."""
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


# Filling a sharded model: every rank reads only its own slices of the safetensors files, and whole buffers.
#
# The model is built on the meta device (except its buffers, most of which are in no file), sharded, and then filled. If
# a checkpoint's tensors differ from the model's own (renamed or fused on loading), rank 0 loads the model with
# Transformers and broadcasts one tensor after the other.

# (name, start, stop) -> rows [start, stop) of the tensor with this name.
ReadRows = Callable[[str, int, int], Tensor]


class SliceReader:
    """A reader of tensor rows directly from safetensors files; the file in use stays open."""

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self._open: tuple[Path, Any] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        view = self._slice(name)
        return view[start:stop] if view.get_shape() else view[...]

    def _slice(self, name: str) -> Any:
        file = self.files[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(file, framework="pt"))
        return self._open[1].get_slice(name)


def fill(
    module: nn.Module,
    prefix: str,
    folder: Path,
    load_whole: Callable[[], PreTrainedModel],
    device: torch.device,
    refuse_unread: Callable[[Collection[str]], None],
) -> None:
    """Load a sharded module's meta parameters onto a device, and every buffer of its state.

    `prefix` is the part of module names that names in files lack. Adapters have values already. `refuse_unread` gets
    the names of the tensors in the files that the module does not have.
    """
    files = tensor_files(folder)
    buffers = persistent_buffers(module)
    wanted = {name: param for name, param in module.named_parameters() if param.is_meta} | buffers
    shapes = {_file_name(name, prefix): tuple(value.shape) for name, value in wanted.items()}
    reader = SliceReader(files)

    def rows(name: str, start: int, stop: int) -> Tensor:
        # A value head that is not in the folder starts at zero.
        return reader.rows(name, start, stop) if name in files else torch.zeros(stop - start, *shapes[name][1:])

    known = {name: shape for name, shape in shapes.items() if name in files or not is_value_head(name)}
    if all(name in files and reader.shape(name) == shape for name, shape in known.items()):
        refuse_unread(files.keys() - shapes.keys())
        read: ReadRows = rows
    else:
        read = _rows_from_rank_zero(shapes, load_whole)
    _fill_rows(module, prefix, read, device)
    for name, buffer in buffers.items():
        # Floating-point buffers, such as a router's bias, are float32 whatever the model's type.
        value = read(_file_name(name, prefix), 0, len(buffer) if buffer.dim() else 1)
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        buffer.data = value.to(dtype).reshape(buffer.shape)


def _file_name(name: str, prefix: str) -> str:
    return plain_name(name.removeprefix(prefix))


def fill_randomly(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters random values (ones for vectors, as in norms), to measure a shape without a model."""
    filled: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner._parameters.items()):
            if param is None:
                continue
            if id(param) not in filled:
                value = torch.empty_like(param.data, device=device)
                value.normal_(0.0, 0.02) if value.dim() > 1 else value.fill_(1.0)
                filled[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            setattr(owner, name, filled[id(param)])


def _rows_from_rank_zero(shapes: dict[str, tuple[int, ...]], load_whole: Callable[[], PreTrainedModel]) -> ReadRows:
    whole: dict[str, Tensor] = {}
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            whole = named_weights(load_whole())
            if missing := shapes.keys() - whole.keys():
                raise ValueError(f"the loaded model lacks {len(missing)} parameters, first of all '{min(missing)}'")
        except Exception as error:  # raised below on all ranks, because the others would wait for its weights
            failure = error
    told = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise ValueError(f"rank 0 could not load the model: {told[0]}")

    def rows(name: str, start: int, stop: int) -> Tensor:
        tensor = whole[name].detach().float().contiguous() if whole else torch.empty(shapes[name])
        dist.broadcast(tensor, src=0)
        return tensor[start:stop] if tensor.dim() else tensor

    return rows


def _fill_rows(module: nn.Module, prefix: str, read: ReadRows, device: torch.device) -> None:
    filled: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, param in list(owner._parameters.items()):
            if param is None or not param.is_meta:
                continue
            if id(param) not in filled:
                full_name = f"{path}.{name}" if path else name
                filled[id(param)] = _filled(param, _file_name(full_name, prefix), read, device)
            # Tied weights stay one parameter.
            setattr(owner, name, filled[id(param)])


def _filled(param: nn.Parameter, name: str, read: ReadRows, device: torch.device) -> nn.Parameter:
    value = param.data
    if not isinstance(value, DTensor):
        raise ValueError(f"parameter '{name}' is not sharded: it cannot be filled by slices")
    start, stop = local_rows(value)
    rows = read(name, start, stop)
    # Not `DTensor.from_local`, which moves everything to the mesh's device type: the shard may belong on the host.
    whole: Any = torch.empty_like(value, device=device)
    whole.to_local().copy_(rows)
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def local_rows(value: DTensor) -> tuple[int, int]:
    """Return the first and the end row that this rank holds of a tensor sharded along its first dim."""
    for dim, placement in enumerate(value.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise ValueError(f"expected parameters sharded along dim 0, got dim {placement.dim}")
            size, place = value.device_mesh.size(dim), value.device_mesh.get_local_rank(dim)
            step = -(-value.shape[0] // size)
            return min(place * step, value.shape[0]), min((place + 1) * step, value.shape[0])
    return 0, value.shape[0] if value.dim() else 0
