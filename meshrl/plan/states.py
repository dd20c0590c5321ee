"""Bytes of parameters, gradients and optimizer states on every rank, by each engine's own rules of sharding.

FSDP2 cuts every parameter's rows into equal steps, rounded up; memory is taken for whole steps, moments for real rows.
FSDP1 cuts each unit's flat parameter. One rank alone keeps bfloat16 weights with 16-bit remainders (`MasterAdamW`).
Step counters (one number a parameter) and buffers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrl.config.engine import EngineConfig, FSDPConfig
from meshrl.engines.fsdp.units import units_to_shard
from meshrl.engines.master import ALIGNMENT
from meshrl.engines.megatron.ranks import ParallelRanks, ranks_of
from meshrl.engines.megatron.weight_map import describe, padded_vocab_size
from meshrl.models.key_map import is_of_tower
from meshrl.models.loading import torch_dtype
from meshrl.parallel.layout import shard_layout

FLOAT = 4
# Megatron-Core's paddings of its buffers with a distributed optimizer, in elements.
PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128


@dataclass(frozen=True)
class States:
    """One rank's bytes; `grads` are those of the sharded gradients while they exist."""

    params: int
    grads: int = 0
    optimizer: int = 0
    # Whether the gradients' memory stays between updates.
    keeps_grads: bool = False

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


@dataclass(frozen=True)
class Parameter:
    """One parameter as sharding sees it."""

    name: str
    shape: tuple[int, ...]
    trained: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows(self, index: int, parts: int) -> tuple[int, int]:
        """Elements that the `index`-th of `parts` ranks holds, and those it takes memory for."""
        rows = self.shape[0] if self.shape else 1
        rest = self.numel // max(1, rows)
        step = -(-rows // parts)
        return max(0, min(step, rows - index * step)) * rest, step * rest


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered, used and freed together; `repeats` neighbours are alike."""

    name: str
    params: tuple[Parameter, ...]

    def numel(self, trained_only: bool = False) -> int:
        return sum(p.numel for p in self.params if p.trained or not trained_only)

    def padded(self, parts: int, trained_only: bool = False) -> int:
        """Elements of the unit gathered from `parts` ranks, padding included."""
        return sum(p.rows(0, parts)[1] * parts for p in self.params if p.trained or not trained_only)


def fsdp_units(hf_model: Any, engine: EngineConfig, trains: bool) -> list[Unit]:
    """The units that FSDP shards one by one, by the engine's own policy; the last one is the root."""
    names = {id(p): (name, p) for name, p in hf_model.named_parameters()}
    titles = {id(module): name for name, module in hf_model.named_modules()}
    found, taken = [], set()

    def is_trained(name: str, param: Tensor) -> bool:
        return trains and param.requires_grad and not (engine.freeze_vision_tower and is_of_tower(name))

    for module in (*units_to_shard(hf_model, engine.fsdp_config.wrap_policy), hf_model):
        mine = {id(p): names[id(p)] for p in module.parameters() if id(p) not in taken and id(p) in names}
        taken |= set(mine)
        params = (Parameter(name, tuple(p.shape), is_trained(name, p)) for name, p in mine.values())
        found.append(Unit(titles.get(id(module), "") or "root", tuple(params)))
    return found


def fsdp_placement(engine: EngineConfig, world_size: int) -> str:
    """How the FSDP engine lays its parameters out: `whole`, `whole-bf16`, `fsdp2` or `fsdp`; as its `initialize`."""
    config = engine.fsdp_config
    if world_size > 1 or config.offload_policy or engine.strategy != "fsdp2":
        return engine.strategy
    mixed, kept = config.mixed_precision, torch_dtype(config.model_dtype)
    param, reduce = torch_dtype(mixed.param_dtype), torch_dtype(mixed.reduce_dtype)
    if param == reduce == kept:
        return "whole"
    return "whole-bf16" if (param, kept) == (torch.bfloat16, torch.float32) else "fsdp2"


def fsdp_states(units: Sequence[Unit], engine: EngineConfig, world_size: int, trains: bool = True) -> list[States]:
    """Every rank's bytes under strategy fsdp2 or fsdp."""
    how = fsdp_placement(engine, world_size)
    size = torch_dtype(engine.fsdp_config.model_dtype).itemsize
    if how == "whole-bf16":
        return [_master_states(units, engine.fsdp_config, trains)]
    if how == "whole":
        every, trained = (sum(unit.numel(only) for unit in units) for only in (False, True))
        return [States(every * size, trained * size, 2 * trained * size)]
    layout = shard_layout(world_size, engine.fsdp_config.fsdp_size)
    shards = layout.size("fsdp")
    by_place = [_sharded(units, place, shards, size, flat=how == "fsdp") for place in range(shards)]
    return [by_place[layout.index(rank, "fsdp")] for rank in range(world_size)]


def _master_states(units: Sequence[Unit], config: FSDPConfig, trains: bool) -> States:
    """One rank with bfloat16 weights: flat buffers in which every parameter starts at a multiple of `ALIGNMENT`."""
    params = [p for unit in units for p in unit.params]
    frozen = sum(p.numel for p in params if not p.trained)
    trained = sum(-(-p.numel // ALIGNMENT) * ALIGNMENT for p in params if p.trained)
    grad = FLOAT if torch_dtype(config.mixed_precision.reduce_dtype) == torch.float32 else 2
    if not trains:
        return States(2 * (frozen + trained))
    return States(2 * (frozen + trained), grad * trained, (2 + 2 * FLOAT) * trained, keeps_grads=True)


def _sharded(units: Sequence[Unit], place: int, shards: int, size: int, flat: bool) -> States:
    if flat:
        # Each unit is one flat parameter: what is trained of it cannot be told from the rest before it is cut.
        held = sum(-(-unit.numel() // shards) for unit in units)
        trained = sum(-(-unit.numel() // shards) for unit in units if unit.numel(True))
        return States(held * size, trained * size, 2 * trained * size)
    params = [p for unit in units for p in unit.params]
    real = [(p.rows(place, shards), p.trained) for p in params]
    held = sum(padded for (_, padded), _ in real)
    grads = sum(padded for (_, padded), trained in real if trained)
    moments = sum(2 * own for (own, _), trained in real if trained)
    return States(held * size, grads * size, moments * size)


@dataclass(frozen=True)
class MegatronParameter:
    """A Megatron parameter of one rank: its chunk, name and elements."""

    chunk: int
    name: str
    numel: int

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name


# The order in which Megatron-Core registers a layer's modules: it decides where each parameter lies in a buffer.
LAYER_ORDER = (
    "input_layernorm", "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "q_layernorm", "linear_kv_down_proj", "linear_kv_up_proj", "k_layernorm", "kv_layernorm", "pre_mlp_layernorm",
    "router", "experts", "shared_experts", "linear_fc1", "linear_fc2",
)  # fmt: skip


def megatron_params(hf_config: Any, engine: EngineConfig, rank: int, world_size: int, head: str = "lm") -> list[Any]:
    """A rank's Megatron parameters in the order in which their modules have them."""
    ranks = ranks_of(engine.megatron, rank, world_size)
    padded = padded_vocab_size(hf_config.vocab_size, ranks.tp, engine.megatron.make_vocab_size_divisible_by)
    found: dict[tuple[int, str], int] = {}
    for piece in describe(hf_config, ranks, vocab_size=padded, value_head=head == "value"):
        if not piece.parameter.endswith("expert_bias"):
            found[piece.chunk, piece.parameter] = math.prod(piece.parameter_shape)
    params = [MegatronParameter(chunk, name, numel) for (chunk, name), numel in found.items()]
    return sorted(params, key=_module_order)


def _module_order(param: MegatronParameter) -> tuple[int, int, int, int]:
    parts = param.name.split(".")
    if parts[0] == "embedding":
        return param.chunk, 0, 0, 0
    if parts[0] == "output_layer":
        return param.chunk, 3, 0, 0
    if parts[1] != "layers":
        return param.chunk, 2, 0, 0
    place = next((number for number, word in enumerate(LAYER_ORDER) if word in parts), len(LAYER_ORDER))
    return param.chunk, 1, int(parts[2]), place


def megatron_states(
    hf_config: Any, engine: EngineConfig, rank: int, world_size: int, trains: bool = True, head: str = "lm"
) -> States:
    """One rank's bytes under strategy megatron."""
    megatron = engine.megatron
    ranks = ranks_of(megatron, rank, world_size)
    params = megatron_params(hf_config, engine, rank, world_size, head)
    size = torch_dtype(megatron.dtype).itemsize
    numel = sum(p.numel for p in params)
    if not trains:
        return States(numel * size)
    master = FLOAT if size < FLOAT else 0
    if not megatron.use_distributed_optimizer:
        return States(numel * size, numel * FLOAT, numel * (2 * FLOAT + master), keeps_grads=True)
    tied = hf_config.tie_word_embeddings and ranks.pp > 1 and head == "lm"
    held, own = 0, 0
    for chunk in range(ranks.vpp):
        for is_expert, group, place in (
            (False, ranks.dp * ranks.cp, ranks.layout.index(rank, "dp", "cp")),
            (True, ranks.edp, ranks.edp_rank),
        ):
            mine = [p for p in params if p.chunk == chunk and p.is_expert == is_expert]
            buckets = _buckets(mine, group, _bucket_size(ranks, engine, chunk), tied)
            held += sum(end - start for start, end, _ in buckets)
            own += sum(_real_elements(bucket, place, group) for bucket in buckets)
    return States(held * size, held * FLOAT, own * (2 * FLOAT + master), keeps_grads=True)


def _bucket_size(ranks: ParallelRanks, engine: EngineConfig, chunk: int) -> int | None:
    """Elements after which Megatron-Core begins another bucket; None: never."""
    if not engine.megatron.overlap_grad_reduce or chunk > 0 or ranks.pp_rank > 0:
        return None
    return max(40_000_000, 1_000_000 * ranks.dp * ranks.cp)


# A bucket: first and last element, and the [start, end) of each parameter in it.
Bucket = tuple[int, int, list[tuple[int, int]]]


def _buckets(params: Sequence[MegatronParameter], group: int, most: int | None, tied: bool) -> list[Bucket]:
    """The parameters of one buffer, last first, in buckets whose ends are padded; tied embeddings are alone."""
    step = math.lcm(group, BUCKET_ALIGNMENT)
    found: list[Bucket] = []
    start, place = 0, 0
    inside: list[tuple[int, int]] = []

    def close(end: int) -> int:
        nonlocal start, inside
        end = -(-end // step) * step
        found.append((start, end, inside))
        start, inside = end, []
        return end

    for param in reversed(params):
        alone = tied and ("word_embeddings" in param.name or param.name.startswith("output_layer"))
        place = -(-place // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
        if alone and inside:
            place = close(place)
        end = place + param.numel
        inside.append((place, end))
        place = close(end) if alone or (most is not None and end - start >= most) else end
    if inside:
        close(place)
    return found


def _real_elements(bucket: Bucket, place: int, group: int) -> int:
    """Elements of parameters, not padding, in the `place`-th of `group` equal parts of a bucket."""
    first, last, inside = bucket
    part = (last - first) // group
    low, high = first + place * part, first + (place + 1) * part
    return sum(max(0, min(end, high) - max(start, low)) for start, end in inside)
