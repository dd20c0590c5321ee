"""The Megatron engine's state as rectangles under the modules' names; see `meshrl.engines.state_files` for the files.

Megatron-Core's own format is not used, because it cannot restore torch's AdamW. It also cannot restore experts onto
another number of expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from meshrl.engines.megatron.megatron_config import ensure_states
from meshrl.engines.megatron.weight_map import Slice, describe, module_place
from meshrl.engines.megatron.weights import module_names, piece_owners
from meshrl.engines.state_files import STEP, Rectangle, Snapshot, extra_state, load_extra
from meshrl.engines.state_reader import Stored
from meshrl.models.names import expert_count

if TYPE_CHECKING:
    from meshrl.engines.megatron.megatron_engine import MegatronEngine


def take_snapshot(engine: MegatronEngine, contents: Sequence[str]) -> Snapshot:
    """Return the part of the state in `contents` that this rank has to write, in host memory; collective."""
    rank, experts = dist.get_rank(), expert_count(engine.hf_config)
    owned = {
        (piece.chunk, piece.parameter, piece.name, piece.start)
        for parts in piece_owners(engine.hf_config, engine.ranks, **_naming(engine)).values()
        for owner, piece in parts
        if owner == rank
    }
    rectangles: list[Rectangle] = []
    has_states = "optimizer" in contents and engine.optim_config is not None
    steps = torch.tensor(float(steps_of(engine.optimizer)) if has_states else 0.0)
    for kind, key, whole in _states(engine, _kinds(engine, contents)):
        for piece in _pieces(engine, key):
            if (piece.chunk, piece.parameter, piece.name, piece.start) in owned:
                name, shape, start = module_place(piece.name, piece.shape, piece.start, experts)
                tensor = piece.region(whole).to("cpu", copy=True)
                if len(shape) > tensor.dim():
                    tensor = tensor[None]
                rectangles.append(Rectangle(kind, name, shape, start, tensor))
                if kind == MOMENTS[0] and not any(start):
                    rectangles.append(Rectangle(STEP, name, (), (), steps))
    extra = None
    if "extra" in contents:
        extra = extra_state(engine.device, getattr(engine, "learning_rate", None))
        # The random generators of Megatron-Core's dropout.
        tracked = get_cuda_rng_tracker().get_states()
        extra["megatron_random"] = {n: s for n, s in tracked.items() if isinstance(s, Tensor)}
    return Snapshot(rectangles, extra)


@torch.no_grad()
def load_state(engine: MegatronEngine, folder: Path, contents: Sequence[str]) -> None:
    """Load the state in `contents` into the engine, whatever layout or engine wrote it."""
    stored, experts = Stored(folder), expert_count(engine.hf_config)
    kinds = _kinds(engine, contents)
    if "model" in contents:
        stored.check_no_more_than(_all_names(engine, experts))
    if engine.optim_config is not None:
        ensure_states(engine.optimizer)
        held = stretches(engine.optimizer)
        if "optimizer" in contents:
            set_steps(engine.optimizer, stored.steps_of())
    for key, param in _parameters(engine).items():
        for kind in kinds:
            if kind != "param" and not isinstance(param, nn.Parameter):
                continue
            value = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            for piece in _pieces(engine, key):
                name, shape, start = module_place(piece.name, piece.shape, piece.start, experts)
                region = piece.region(value)
                stored.fill(kind, name, shape, start, region if len(shape) == region.dim() else region[None])
            if kind == "param":
                param.data.copy_(value)
            if engine.optim_config is not None and isinstance(param, nn.Parameter) and param in held:
                set_state(held[param], kind, value)
    if "extra" in contents:
        extra = load_extra(folder, dist.get_rank(), engine.device, getattr(engine, "learning_rate", None))
        tracker = get_cuda_rng_tracker()
        known = tracker.get_states()
        found = {n: s for n, s in extra.get("megatron_random", {}).items() if n in known}
        if found:
            tracker.set_states(known | found)


def _all_names(engine: MegatronEngine, experts: int) -> set[str]:
    """Return the names of the model's weights in checkpoints, over all ranks; collective."""
    own = {
        module_place(piece.name, piece.shape, piece.start, experts)[0]
        for key in _parameters(engine)
        for piece in _pieces(engine, key)
    }
    everyone: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return set().union(*everyone)


def _kinds(engine: MegatronEngine, contents: Sequence[str]) -> list[str]:
    moments = MOMENTS if "optimizer" in contents and engine.optim_config is not None else ()
    return [*(["param"] if "model" in contents else []), *moments]


def _states(engine: MegatronEngine, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[int, str], Tensor]]:
    """Yield every local tensor of each kind, whole in its parameter's shape, one at a time; collective."""
    held = {}
    if engine.optim_config is not None:
        ensure_states(engine.optimizer)
        held = stretches(engine.optimizer)
    for key, param in _parameters(engine).items():
        for kind in kinds:
            if not isinstance(param, nn.Parameter) or engine.optim_config is None:
                if kind == "param":
                    yield kind, key, param.detach().float()
                continue
            yield kind, key, whole_state(param, held.get(param), kind, _copies(param))


def _copies(param: nn.Parameter) -> dist.ProcessGroup:
    """Return the group of the ranks that hold the same parameter."""
    if getattr(param, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _parameters(engine: MegatronEngine) -> dict[tuple[int, str], Tensor]:
    """Return this rank's parameters and the routers' biases (which are weights too), by chunk and name."""
    found: dict[tuple[int, str], Tensor] = {}
    for number, chunk in enumerate(engine.model):
        while isinstance(inner := getattr(chunk, "module", None), nn.Module):
            chunk = inner
        found |= {(number, name): param for name, param in chunk.named_parameters()}
        found |= {(number, name): b for name, b in chunk.named_buffers() if name.endswith("router.expert_bias")}
    return found


def _naming(engine: MegatronEngine) -> dict[str, Any]:
    return {
        "names": module_names(engine.model),
        "vocab_size": engine.padded_vocab_size,
        "value_head": engine.head == "value",
    }


def _pieces(engine: MegatronEngine, key: tuple[int, str]) -> list[Slice]:
    """Return the rectangles of Hugging Face tensors that lie in a local parameter."""
    if not hasattr(engine, "_pieces_of"):
        pieces: dict[tuple[int, str], list[Slice]] = {}
        for piece in describe(engine.hf_config, engine.ranks, **_naming(engine)):
            if min(piece.size) > 0:
                pieces.setdefault((piece.chunk, piece.parameter), []).append(piece)
        engine._pieces_of = pieces  # type: ignore[attr-defined]
    return engine._pieces_of.get(key, [])  # type: ignore[attr-defined]


# The optimizer's states in the shapes of the model's parameters, whatever shards them inside.
#
# Megatron-Core's distributed optimizer cuts each gradient buffer, not each parameter, over data-parallel ranks. A rank
# holds some stretch of the flattened parameter, or no part of it. Here a parameter's states are assembled from the
# stretches of all ranks, and cut up again.

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Stretch:
    """The part of a parameter that this rank's optimizer holds: elements [start, stop) of the flattened parameter.

    `master` is the tensor that the optimizer steps on. `is_only` is True if no other data-parallel rank holds the part.
    """

    owner: Any
    master: Tensor
    start: int
    stop: int
    is_only: bool


def stretches(optimizer: ChainedOptimizer) -> dict[nn.Parameter, Stretch]:
    """Return the stretch of every parameter of which this rank's optimizer holds a part."""
    found: dict[nn.Parameter, Stretch] = {}
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        if isinstance(part, DistributedOptimizer):
            for param, (group, place) in part.model_param_group_index_map.items():
                held = part._get_model_param_range_map(param)["param"]
                master = part.optimizer.param_groups[group]["params"][place]
                found[param] = Stretch(part, master, held.start, held.end, True)
        else:
            for param, master in _pairs(part):
                found[param] = Stretch(part, master, 0, param.numel(), False)
    return found


def _pairs(part: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with the tensor that the optimizer steps on.

    That tensor is a float32 copy of a half-precision parameter, otherwise the parameter itself.
    """
    if hasattr(part, "float16_groups"):
        for models, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, masters, strict=True)
        for models in part.fp32_from_fp32_groups:
            yield from zip(models, models, strict=True)
    else:
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)


def _held(stretch: Stretch, name: str) -> Tensor:
    return stretch.master if name == "param" else stretch.owner.optimizer.state[stretch.master][name]


def whole_state(param: nn.Parameter, stretch: Stretch | None, name: str, group: dist.ProcessGroup) -> Tensor:
    """Return a parameter's float32 state in the parameter's shape, assembled over its data-parallel ranks; collective.

    `name`: `param` for the weights that the optimizer steps on, or one of `MOMENTS`.
    """
    flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if stretch is not None and (stretch.is_only or dist.get_rank(group) == 0):
        flat[stretch.start : stretch.stop] = _held(stretch, name).detach().flatten()
    dist.all_reduce(flat, group=group)
    return flat.view(param.shape)


@torch.no_grad()
def set_state(stretch: Stretch, name: str, value: Tensor) -> None:
    """Copy a parameter's whole state into the stretch that this rank's optimizer holds."""
    held = _held(stretch, name)
    held.copy_(value.flatten()[stretch.start : stretch.stop].view(held.shape))


def steps_of(optimizer: ChainedOptimizer) -> int:
    """Return how many steps AdamW has taken, as far as this rank's states show; 0 if the rank holds no state."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:
            continue
        for group in inner.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in inner.state.values():
            if "step" in state:
                return int(state["step"])
    return 0


def set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    """Set the number of steps that AdamW has taken."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:
            continue
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        if not isinstance(inner, torch.optim.AdamW):  # fused optimizers count steps by group
            for group in inner.param_groups:
                group["step"] = steps
