"""The models of a run on the devices: how each is sharded, and its memory while it works or is offloaded.

- `Role`: one model that an engine holds, with the memory of its forward and update phases.
- `Budget`, `Cutting`: the micro-batches of a phase.
- `States`: bytes of parameters, gradients and optimizer states, by the sharding rules of FSDP and Megatron.
"""

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
    """The largest micro-batch of a phase: tokens on one rank, and how many of these tokens are predicted."""

    tokens: int
    targets: int
    count: int  # micro-batches of one mini-batch (or of the whole batch, if nothing is trained)


@dataclass(frozen=True)
class Cutting:
    """The limit of a rank's micro-batch: a number of tokens, or else a number of samples."""

    tokens: int | None
    samples: int | None

    @classmethod
    def of(cls, how: Any, prefix: str = "ppo") -> Cutting:
        """Read the limit from a section of an RL recipe; `prefix` is the prefix of the section's keys."""
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
    # Parameter offload, if a key outside the engine's section sets it. None: the engine's section decides.
    offloads: bool | None = None

    @property
    def is_megatron(self) -> bool:
        return self.engine.strategy == "megatron"

    @cached_property
    def placement(self) -> str:
        return "megatron" if self.is_megatron else fsdp_placement(self.engine, self.world_size)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The data type in which layers compute."""
        if self.is_megatron:
            return torch_dtype(self.engine.megatron.dtype)
        config = self.engine.fsdp_config
        return torch_dtype(config.model_dtype if self.placement == "whole" else config.mixed_precision.param_dtype)

    @property
    def rests(self) -> tuple[bool, bool]:
        """Two flags: whether weights, and whether optimizer states, are offloaded to host memory between phases."""
        config = self.engine.megatron if self.is_megatron else self.engine.fsdp_config
        params = config.param_offload if self.offloads is None else self.offloads
        return params, config.optimizer_offload and self.trains

    @cached_property
    def units(self) -> list[Unit]:
        """The FSDP units of the model, with the root unit last."""
        frozen = self.engine.freeze_vision_tower
        key = ("units", self.head, self.trains, frozen, str(self.engine.fsdp_config.wrap_policy))
        if key not in self.model.notes:
            modules = self.model.modules if self.head == "lm" else self.model.build("value")
            self.model.notes[key] = fsdp_units(modules, self.engine, self.trains)
        return self.model.notes[key]

    @cached_property
    def stages(self) -> list[list[range]]:
        """The layers of every pipeline stage, as one range for each virtual chunk."""
        if not self.is_megatron:
            return [[range(self.model.num_layers)]]
        ranks = ranks_of(self.engine.megatron, 0, self.world_size)
        return layer_offsets(self.model.num_layers, ranks.pp, ranks.vpp, ranks.split)

    def states(self, stage: int = 0) -> States:
        """Return the states of the fullest rank (with Megatron, of the first rank of pipeline stage `stage`)."""
        shape = self.engine.megatron if self.is_megatron else self.engine.fsdp_config
        alike = self._kinds_of(stage)
        frozen = self.engine.freeze_vision_tower
        key = ("states", str(shape), self.engine.strategy, self.world_size, self.trains, frozen, self.head, alike)
        if key not in self.model.notes:
            self.model.notes[key] = self._count_states(stage)
        return self.model.notes[key]

    def states_of_ranks(self) -> list[States]:
        """Return the states of every rank, in rank order."""
        if not self.is_megatron:
            return fsdp_states(self.units, self.engine, self.world_size, self.trains)
        return [
            megatron_states(self.model.config, self.engine, rank, self.world_size, self.trains, self.head)
            for rank in range(self.world_size)
        ]

    def _kinds_of(self, stage: int) -> tuple[Any, ...]:
        """Return a key that is equal for stages with equal states: kinds of layers, has embedding, has head."""
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
        """The metered layers of one rank, with gradient checkpointing if the role trains with it."""
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
        """The number of rows of the output projection on one rank."""
        size = int(self.model.config.vocab_size)
        if not self.is_megatron:
            return size
        tp = self.engine.megatron.tensor_model_parallel_size
        return padded_vocab_size(size, tp, self.engine.megatron.make_vocab_size_divisible_by) // tp

    # ---- bytes of gathered weights, activations and logits

    def gathered(self, trains: bool) -> Parts:
        """Return FSDP's bytes beyond the shards: the gathered root and layers, and gradients before their reduction."""
        if self.placement not in ("fsdp2", "fsdp"):
            return {}
        size = self.dtype.itemsize
        *units, root = self.units
        layer = max((unit.numel() for unit in units), default=0)
        config = self.engine.fsdp_config
        # Three layers: the one in use, the next one as received, and the next one copied out of the receive buffer.
        held = 3 * layer if config.reshard_after_forward or not trains else sum(u.numel() for u in units)
        parts = {"gathered weights": (root.numel() + held) * size}
        if trains:
            trained = max((unit.numel(True) for unit in units), default=0)
            reduce_size = torch_dtype(config.mixed_precision.reduce_dtype).itemsize
            parts["unreduced gradients"] = (root.numel(True) + trained) * size + trained * reduce_size
        return parts

    def update_parts(self, budget: Budget, stage: int = 0) -> Parts:
        """Return the bytes beyond the states at the peak of a forward and backward."""
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
        """Return the bytes beyond the states at the peak of computing log-probs or values."""
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
        """Return the bytes of the embedding's output, which the first layer keeps."""
        cut = self.engine.megatron.tensor_model_parallel_size if self._shares_sequence else 1
        return tokens * int(self.model.config.hidden_size) * self.dtype.itemsize // cut

    @property
    def _shares_sequence(self) -> bool:
        return self.is_megatron and uses_sequence_parallel(self.engine.megatron)

    def _in_flight(self, stage: int, budget: Budget) -> int:
        """Return the activation bytes of all micro-batches that a stage has run forward but not yet backward."""
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
        """Return the bytes of the head's gradient if embedding and head share one tensor, else 0.

        The head's gradient must wait for the embedding's gradient, which comes last.
        """
        tied = self.model.config.tie_word_embeddings and self.head == "lm" and self.placement.startswith("whole")
        if not tied or self.model.lora is not None:
            return 0
        return int(self.model.config.vocab_size * self.model.config.hidden_size) * self.dtype.itemsize

    def keeps_logits(self, targets: int) -> bool:
        """Return whether a micro-batch's logits are kept for the backward pass instead of computed twice."""
        if self.is_megatron or self.head != "lm":
            return False
        whole = targets * self.vocabulary * self.dtype.itemsize
        return self.dtype.itemsize == 2 and whole <= self.engine.keep_logits_megabytes << 20

    def _head(self, targets: int, trains: bool) -> Parts:
        """Return the bytes of logits and of what their gradient needs.

        The bytes follow the computation of `log_probs` and `vocab_parallel` on a GPU.
        """
        if self.head != "lm":
            return {"logits": targets * FLOAT}
        vocabulary, size = self.vocabulary, self.dtype.itemsize
        whole = targets * vocabulary * size
        # With several chunks the next chunk is allocated before the last one is freed.
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
    """Return the actor and, if the recipe has them, its reference, critic and reward model."""
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
    """Return the largest micro-batch that a data-parallel rank makes of its part of the first `samples`."""
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
    """Return the tokens and targets of the largest micro-batch.

    With a token budget and several micro-batches the whole budget counts, because another step may use it fully.
    """
    tokens = max(int(part.totals[rows].sum()) for rows in plan)
    targets = max(int(part.responses[rows].sum()) for rows in plan)
    if most is None or len(plan) == 1:
        return tokens, targets
    return most, int(most * min(1.0, targets / tokens))


# ---- bytes of parameters, gradients and optimizer states on every rank, by each engine's own sharding rules
#
# FSDP2 splits the rows of every parameter into equal shards, rounded up. Parameters and gradients take memory for
# padded shards, moments for real rows. FSDP1 splits the flat parameter of each unit. A single rank keeps bfloat16
# weights with 16-bit remainders (`MasterAdamW`). Step counters (one number a parameter) and buffers are not counted.

FLOAT = 4
# Megatron-Core's paddings of its buffers with a distributed optimizer, in elements.
PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128


@dataclass(frozen=True)
class States:
    """The bytes of one rank's states. `grads` counts the sharded gradients while they exist."""

    params: int
    grads: int = 0
    optimizer: int = 0
    # The gradients' memory stays allocated between updates.
    keeps_grads: bool = False

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


@dataclass(frozen=True)
class Parameter:
    """A parameter's name, shape, and whether it is trained, as sharding needs them."""

    name: str
    shape: tuple[int, ...]
    trained: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows(self, index: int, parts: int) -> tuple[int, int]:
        """Return the elements that the `index`-th of `parts` ranks holds, and the elements with padding."""
        rows = self.shape[0] if self.shape else 1
        rest = self.numel // max(1, rows)
        step = -(-rows // parts)
        return max(0, min(step, rows - index * step)) * rest, step * rest


@dataclass(frozen=True)
class Unit:
    """An FSDP unit: parameters that are gathered, used and freed together."""

    name: str
    params: tuple[Parameter, ...]

    def numel(self, trained_only: bool = False) -> int:
        return sum(p.numel for p in self.params if p.trained or not trained_only)

    def padded(self, parts: int, trained_only: bool = False) -> int:
        """Return the elements of the unit gathered from `parts` ranks, including padding."""
        return sum(p.rows(0, parts)[1] * parts for p in self.params if p.trained or not trained_only)


def fsdp_units(hf_model: Any, engine: EngineConfig, trains: bool) -> list[Unit]:
    """Return the units that FSDP shards one by one, by the engine's own wrap policy; the last unit is the root."""
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
    """Return how the FSDP engine lays out its parameters: `whole`, `whole-bf16`, `fsdp2` or `fsdp`.

    This repeats the decision of the engine's `initialize`.
    """
    config = engine.fsdp_config
    if world_size > 1 or config.offload_policy or engine.strategy != "fsdp2":
        return engine.strategy
    mixed, kept = config.mixed_precision, torch_dtype(config.model_dtype)
    param, reduce = torch_dtype(mixed.param_dtype), torch_dtype(mixed.reduce_dtype)
    if param == reduce == kept:
        return "whole"
    return "whole-bf16" if (param, kept) == (torch.bfloat16, torch.float32) else "fsdp2"


def fsdp_states(units: Sequence[Unit], engine: EngineConfig, world_size: int, trains: bool = True) -> list[States]:
    """Return the bytes of every rank under strategy `fsdp2` or `fsdp`."""
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
    """Return the bytes of a single rank with bfloat16 weights.

    The weights lie in flat buffers, in which every parameter starts at a multiple of `ALIGNMENT`.
    """
    params = [p for unit in units for p in unit.params]
    frozen = sum(p.numel for p in params if not p.trained)
    trained = sum(-(-p.numel // ALIGNMENT) * ALIGNMENT for p in params if p.trained)
    grad = FLOAT if torch_dtype(config.mixed_precision.reduce_dtype) == torch.float32 else 2
    if not trains:
        return States(2 * (frozen + trained))
    return States(2 * (frozen + trained), grad * trained, (2 + 2 * FLOAT) * trained, keeps_grads=True)


def _sharded(units: Sequence[Unit], place: int, shards: int, size: int, flat: bool) -> States:
    if flat:
        # Each unit is one flat parameter, so a unit with any trained parameter counts as trained as a whole.
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
    """A Megatron parameter on one rank: its virtual chunk, name and number of elements."""

    chunk: int
    name: str
    numel: int

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name


# The order in which Megatron-Core registers a layer's modules. It determines each parameter's offset in a buffer.
LAYER_ORDER = (
    "input_layernorm", "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "q_layernorm", "linear_kv_down_proj", "linear_kv_up_proj", "k_layernorm", "kv_layernorm", "pre_mlp_layernorm",
    "router", "experts", "shared_experts", "linear_fc1", "linear_fc2",
)  # fmt: skip


def megatron_params(hf_config: Any, engine: EngineConfig, rank: int, world_size: int, head: str = "lm") -> list[Any]:
    """Return a rank's Megatron parameters in the order in which Megatron-Core registers them."""
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
    """Return the bytes of one rank under strategy `megatron`."""
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
    """Return the number of elements after which Megatron-Core starts a new bucket, or None for a single bucket."""
    if not engine.megatron.overlap_grad_reduce or chunk > 0 or ranks.pp_rank > 0:
        return None
    return max(40_000_000, 1_000_000 * ranks.dp * ranks.cp)


# A bucket: its start, its end, and the [start, end) of each parameter in it, in elements.
Bucket = tuple[int, int, list[tuple[int, int]]]


def _buckets(params: Sequence[MegatronParameter], group: int, most: int | None, tied: bool) -> list[Bucket]:
    """Return the buckets of one buffer, with the parameters in reverse order and padded bucket ends.

    A tied embedding gets a bucket of its own.
    """
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
    """Return the elements of parameters (not padding) in the `place`-th of `group` equal parts of a bucket."""
    first, last, inside = bucket
    part = (last - first) // group
    low, high = first + place * part, first + (place + 1) * part
    return sum(max(0, min(end, high) - max(start, low)) for start, end in inside)
