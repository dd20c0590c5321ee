"""The models of a run on the devices: how each is sharded, and what each takes while it works or rests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.config import rl
from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import dp_size, sequence_ranks
from meshrl.config.engine import EngineConfig, FSDPConfig, ModelConfig
from meshrl.config.rl import PPOConfig, uses_reference
from meshrl.engines.batching import split_into_micro_batches
from meshrl.engines.fsdp.sharding import units_to_shard
from meshrl.engines.megatron.ranks import ParallelRanks, ranks_of, uses_sequence_parallel
from meshrl.engines.megatron.weight_map import describe, padded_vocab_size
from meshrl.engines.optim import ALIGNMENT
from meshrl.engines.packed_model import CHUNK_ELEMENTS_ON_GPU
from meshrl.models.loading import torch_dtype
from meshrl.models.names import is_of_tower
from meshrl.parallel.mesh import shard_layout
from meshrl.parallel.pipeline import layer_offsets
from meshrl.tools.plan.models import Lengths, PlannedModel
from meshrl.tools.plan.trace import TRACED_TOKENS, Cut, LayerSettings, ModelTrace, trace_model

Parts = dict[str, int]


@dataclass(frozen=True)
class Budget:
    """The largest micro-batch of a phase: tokens on one rank, and how many of them are predicted."""

    tokens: int
    targets: int
    count: int  # micro-batches of one mini-batch (or of the whole batch, where nothing is trained)


@dataclass(frozen=True)
class Cutting:
    """What makes a micro-batch of a rank: so many tokens, or so many samples."""

    tokens: int | None
    samples: int | None

    @classmethod
    def of(cls, how: Any, prefix: str = "ppo") -> Cutting:
        """As a section of an RL recipe says it."""
        by_tokens = getattr(how, "use_dynamic_bsz" if prefix == "ppo" else f"{prefix}_use_dynamic_bsz")
        tokens = getattr(how, f"{prefix}_max_token_len_per_gpu") if by_tokens else None
        return cls(tokens, getattr(how, f"{prefix}_micro_batch_size_per_gpu"))


@dataclass(frozen=True)
class Role:
    """A model that an engine holds: the actor, its reference, the critic, or the reward model."""

    name: str
    model: PlannedModel
    model_config: ModelConfig
    engine: EngineConfig
    world_size: int
    trains: bool = True
    head: str = "lm"
    # Whether its weights wait in host memory, where another key than the engine's says so.
    offloads: bool | None = None

    @property
    def is_megatron(self) -> bool:
        return self.engine.strategy == "megatron"

    @cached_property
    def placement(self) -> str:
        return "megatron" if self.is_megatron else fsdp_placement(self.engine, self.world_size)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type in which layers compute."""
        if self.is_megatron:
            return torch_dtype(self.engine.megatron.dtype)
        config = self.engine.fsdp_config
        return torch_dtype(config.model_dtype if self.placement == "whole" else config.mixed_precision.param_dtype)

    @property
    def rests(self) -> tuple[bool, bool]:
        """Whether weights, and whether optimizer states, wait in host memory between phases."""
        config = self.engine.megatron if self.is_megatron else self.engine.fsdp_config
        params = config.param_offload if self.offloads is None else self.offloads
        return params, config.optimizer_offload and self.trains

    @cached_property
    def units(self) -> list[Unit]:
        """FSDP's units, the root last."""
        frozen = self.engine.freeze_vision_tower
        key = ("units", self.head, self.trains, frozen, str(self.engine.fsdp_config.wrap_policy))
        if key not in self.model.notes:
            modules = self.model.modules if self.head == "lm" else self.model.build("value")
            self.model.notes[key] = fsdp_units(modules, self.engine, self.trains)
        return self.model.notes[key]

    @cached_property
    def stages(self) -> list[list[range]]:
        """The layers of every pipeline stage, by chunk."""
        if not self.is_megatron:
            return [[range(self.model.num_layers)]]
        ranks = ranks_of(self.engine.megatron, 0, self.world_size)
        return layer_offsets(self.model.num_layers, ranks.pp, ranks.vpp, ranks.split)

    def states(self, stage: int = 0) -> States:
        """The fullest rank's states (of a pipeline stage)."""
        shape = self.engine.megatron if self.is_megatron else self.engine.fsdp_config
        alike = self._kinds_of(stage)
        frozen = self.engine.freeze_vision_tower
        key = ("states", str(shape), self.engine.strategy, self.world_size, self.trains, frozen, self.head, alike)
        if key not in self.model.notes:
            self.model.notes[key] = self._count_states(stage)
        return self.model.notes[key]

    def states_of_ranks(self) -> list[States]:
        """Every rank's states."""
        if not self.is_megatron:
            return fsdp_states(self.units, self.engine, self.world_size, self.trains)
        return [
            megatron_states(self.model.config, self.engine, rank, self.world_size, self.trains, self.head)
            for rank in range(self.world_size)
        ]

    def _kinds_of(self, stage: int) -> tuple[Any, ...]:
        """What stages with equal states have in common: kinds of layers, the embedding, the head."""
        kinds = self.model.layer_kinds
        chunks = tuple(tuple(kinds[layer] for layer in chunk) for chunk in self.stages[stage])
        return chunks, stage == 0, stage == len(self.stages) - 1

    def _count_states(self, stage: int) -> States:
        if self.is_megatron:
            rank = stage * (self.world_size // len(self.stages))
            return megatron_states(self.model.config, self.engine, rank, self.world_size, self.trains, self.head)
        return max(self.states_of_ranks(), key=lambda states: states.total)

    @cached_property
    def trace(self) -> ModelTrace:
        """A rank's metered layers, as they are trained."""
        return self._traced(self.trains and self.model_config.enable_gradient_checkpointing)

    def _traced(self, checkpointing: bool) -> ModelTrace:
        config, cut = self.engine, Cut()
        if self.is_megatron:
            ranks = ranks_of(config.megatron, 0, self.world_size)
            cut = Cut(ranks.tp, ranks.etp, uses_sequence_parallel(config.megatron))
        settings = LayerSettings(
            tokens=0,
            dtype=self.dtype,
            checkpointing=checkpointing,
            compiled=config.use_torch_compile and not self.is_megatron,
            memory_budget=config.activation_memory_budget,
            sp=1 if self.is_megatron else config.ulysses_sequence_parallel_size,
        )
        return trace_model(self.model, settings, cut)

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection on one rank."""
        size = int(self.model.config.vocab_size)
        if not self.is_megatron:
            return size
        tp = self.engine.megatron.tensor_model_parallel_size
        return padded_vocab_size(size, tp, self.engine.megatron.make_vocab_size_divisible_by) // tp

    # Bytes of what is computed with

    def gathered(self, trains: bool) -> Parts:
        """What FSDP holds beside the shards: the root whole, layers on their way, gradients before they are reduced."""
        if self.placement not in ("fsdp2", "fsdp"):
            return {}
        size = self.dtype.itemsize
        *units, root = self.units
        layer = max((unit.numel() for unit in units), default=0)
        config = self.engine.fsdp_config
        # The one in use, the next one on its way, and that one being copied out of the message.
        held = 3 * layer if config.reshard_after_forward or not trains else sum(u.numel() for u in units)
        parts = {"gathered weights": (root.numel() + held) * size}
        if trains:
            trained = max((unit.numel(True) for unit in units), default=0)
            reduce_size = torch_dtype(config.mixed_precision.reduce_dtype).itemsize
            parts["unreduced gradients"] = (root.numel(True) + trained) * size + trained * reduce_size
        return parts

    def update_parts(self, budget: Budget, stage: int = 0) -> Parts:
        """Beyond the states, at the fullest moment of a forward and backward."""
        hidden, size = int(self.model.config.hidden_size), self.dtype.itemsize
        layers = [layer for chunk in self.stages[stage] for layer in chunk]
        tokens = budget.tokens
        kept = self._in_flight(stage, budget) + self._between(tokens)
        if self.model_config.enable_activation_offload:
            kept = self.trace.widest(layers, tokens).kept
        widest = self.trace.widest(layers, tokens)
        working = widest.backward + self._tied_gradient()
        at_layer = {"activations": kept, "backward of a layer": working}
        if not self._has_head(stage):
            return at_layer | self.gathered(self.trains)
        norm = self.trace.norm.scaled(tokens / TRACED_TOKENS)
        head = self._head(budget.targets, trains=True)
        inputs = norm.kept + budget.targets * hidden * size
        at_head = {"activations": kept + inputs, **head}
        fullest = max(at_layer, at_head, key=lambda parts: sum(parts.values()))
        return fullest | self.gathered(self.trains)

    def forward_parts(self, budget: Budget, stage: int = 0) -> Parts:
        """Beyond the states, while log-probs or values are computed."""
        hidden, size = int(self.model.config.hidden_size), self.dtype.itemsize
        layers = [layer for chunk in self.stages[stage] for layer in chunk]
        running = self.trace.widest(layers, budget.tokens).forward + budget.tokens * hidden * size
        head = self._head(budget.targets, trains=False) if self._has_head(stage) else {}
        at_head = {"activations": (2 * budget.tokens + budget.targets) * hidden * size, **head}
        fullest = max({"activations": running}, at_head, key=lambda parts: sum(parts.values()))
        return fullest | self.gathered(False)

    def _has_head(self, stage: int) -> bool:
        return stage == len(self.stages) - 1

    def _between(self, tokens: int) -> int:
        """The embedding's output, which the first layer keeps."""
        cut = self.engine.megatron.tensor_model_parallel_size if self._shares_sequence else 1
        return tokens * int(self.model.config.hidden_size) * self.dtype.itemsize // cut

    @property
    def _shares_sequence(self) -> bool:
        return self.is_megatron and uses_sequence_parallel(self.engine.megatron)

    def _in_flight(self, stage: int, budget: Budget) -> int:
        """Activations of all micro-batches that a stage has run forward and not yet backward."""
        chunks = self.stages[stage]
        whole = self.trace.kept([layer for chunk in chunks for layer in chunk], budget.tokens)
        pp, vpp = len(self.stages), len(chunks)
        if pp == 1:
            return whole
        if vpp == 1:
            return whole * min(budget.count, pp - stage)
        ahead = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
        return whole * min(budget.count * vpp, ahead) // vpp

    def _tied_gradient(self) -> int:
        """One tensor for embedding and head: the head's gradient waits for the embedding's, which comes last."""
        tied = self.model.config.tie_word_embeddings and self.head == "lm" and self.placement.startswith("whole")
        if not tied or self.model.lora is not None:
            return 0
        return int(self.model.config.vocab_size * self.model.config.hidden_size) * self.dtype.itemsize

    def keeps_logits(self, targets: int) -> bool:
        """Whether a micro-batch's logits wait for the backward pass; else they are computed twice."""
        if self.is_megatron or self.head != "lm":
            return False
        whole = targets * self.vocabulary * self.dtype.itemsize
        return self.dtype.itemsize == 2 and whole <= self.engine.keep_logits_megabytes << 20

    def _head(self, targets: int, trains: bool) -> Parts:
        """Logits and what their gradient takes, by how `log_probs` and `vocab_parallel` compute them on a GPU."""
        if self.head != "lm":
            return {"logits": targets * FLOAT}
        vocabulary, size = self.vocabulary, self.dtype.itemsize
        whole = targets * vocabulary * size
        # Of several chunks the next one is there before the last one goes.
        chunk = min(whole, 2 * CHUNK_ELEMENTS_ON_GPU * size)
        weight = vocabulary * int(self.model.config.hidden_size)
        if not trains:
            return {"logits": chunk}
        grad_hidden = targets * int(self.model.config.hidden_size) * size
        if self.model.lora is not None:
            weight = 0
        if self.is_megatron:
            return {"logits": chunk, "gradient of the head": weight * (FLOAT + 2 * size) + grad_hidden}
        if self.keeps_logits(targets):
            return {"logits": whole, "gradient of the head": weight * size + grad_hidden}
        several = 2 if whole > CHUNK_ELEMENTS_ON_GPU * size else 1
        return {"logits": chunk, "gradient of the head": several * weight * FLOAT + grad_hidden}


def roles_of(
    config: PPOConfig,
    model: PlannedModel,
    critic_model: PlannedModel | None = None,
    reward_model: PlannedModel | None = None,
    ref_model: PlannedModel | None = None,
) -> list[Role]:
    """The actor and, where the recipe has them, its reference, critic and reward model."""
    policy, world = config.actor_rollout_ref, config.trainer.world_size
    found = [Role("actor", model, policy.model, policy.actor, world)]
    has_own = policy.ref.model.path is not None or policy.ref.has_own_devices
    if uses_reference(config) and (model.lora is None or has_own):
        plain = ref_model or PlannedModel(model.config, model.source)
        offloads, engine = policy.ref.fsdp_config.param_offload, policy.ref.engine(policy.actor)
        ranks = rl.ranks_of(config, policy.ref)
        found.append(Role("ref", plain, policy.model, engine, ranks, trains=False, offloads=offloads))
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        own, ranks = config.critic, rl.ranks_of(config, config.critic)
        found.append(Role("critic", critic_model or model, own.model, own, ranks, head="value"))
    if reward_model is not None:
        scorer, ranks = config.reward_model, rl.ranks_of(config, config.reward_model)
        found.append(Role("reward_model", reward_model, scorer.model, scorer, ranks, trains=False, head="value"))
    return found


def budget_of(role: Role, lengths: Lengths, samples: int, cutting: Cutting) -> Budget:
    """The micro-batches that a data-parallel rank makes of its part of the first `samples`."""
    share, copies = sequence_ranks(role.engine), dp_size(role.engine, role.world_size)
    most = cutting.tokens * share if cutting.tokens is not None else None
    key = (copies, samples, most, cutting.samples, share)
    if key not in lengths.notes:
        lengths.notes[key] = _cut(lengths, *key)
    return lengths.notes[key]


def _cut(lengths: Lengths, copies: int, samples: int, most: int | None, size: int | None, share: int) -> Budget:
    part = lengths.part(0, copies, samples)
    rows = split_into_micro_batches(part.totals, max_token_len=most, micro_batch_size=size, agree=lambda n: n)
    plan = [row for row in rows if row is not None]
    fullest = _fullest(part, plan, most)
    return Budget(-(-fullest[0] // share), -(-fullest[1] // share), len(plan))


def _fullest(part: Lengths, plan: Sequence[np.ndarray], most: int | None) -> tuple[int, int]:
    """Tokens and targets of the largest micro-batch; under a budget another step may fill it to the brim."""
    tokens = max(int(part.totals[rows].sum()) for rows in plan)
    targets = max(int(part.responses[rows].sum()) for rows in plan)
    if most is None or len(plan) == 1:
        return tokens, targets
    return most, int(most * min(1.0, targets / tokens))


# Bytes of parameters, gradients and optimizer states on every rank, by each engine's own rules of sharding.
#
# FSDP2 cuts every parameter's rows into equal steps, rounded up; memory is taken for whole steps, moments for real
# rows.
# FSDP1 cuts each unit's flat parameter. One rank alone keeps bfloat16 weights with 16-bit remainders (`MasterAdamW`).
# Step counters (one number a parameter) and buffers are left out.

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
