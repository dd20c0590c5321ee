"""The models of a run on the devices: how each is sharded, and what each takes while it works or rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from meshrl.config import pools
from meshrl.config.algorithm_checks import uses_reference
from meshrl.config.critic import uses_critic
from meshrl.config.engine import EngineConfig
from meshrl.config.layout import dp_size, sequence_ranks
from meshrl.config.model import ModelConfig
from meshrl.config.root import PPOConfig
from meshrl.engines.log_probs import CHUNK_ELEMENTS_ON_GPU
from meshrl.engines.megatron.ranks import ranks_of, uses_sequence_parallel
from meshrl.engines.megatron.weight_map import padded_vocab_size
from meshrl.engines.micro_batches import split_into_micro_batches
from meshrl.models.loading import torch_dtype
from meshrl.parallel.pipeline import layer_offsets
from meshrl.plan.activations import LayerSettings
from meshrl.plan.layers import TRACED_TOKENS, Cut, ModelTrace, trace_model
from meshrl.plan.lengths import Lengths
from meshrl.plan.model import PlannedModel
from meshrl.plan.states import FLOAT, States, Unit, fsdp_placement, fsdp_states, fsdp_units, megatron_states

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
        ranks = pools.ranks_of(config, policy.ref)
        found.append(Role("ref", plain, policy.model, engine, ranks, trains=False, offloads=offloads))
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        own, ranks = config.critic, pools.ranks_of(config, config.critic)
        found.append(Role("critic", critic_model or model, own.model, own, ranks, head="value"))
    if reward_model is not None:
        scorer, ranks = config.reward_model, pools.ranks_of(config, config.reward_model)
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
