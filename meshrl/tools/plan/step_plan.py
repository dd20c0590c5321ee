"""A whole step of a recipe on a cluster: memory, traffic and seconds of every phase, and whether it fits.

`make_plan` plans an RL step, `make_supervised_plan` a supervised one. `Training` computes the phases of the roles that
share devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import BatchUnits, SupervisedBatchUnits, dp_size
from meshrl.config.rl import PPOConfig, roles_apart, uses_reference
from meshrl.config.supervised import PreferenceConfig, SupervisedConfig
from meshrl.engines.batching import split_for_pipeline
from meshrl.telemetry.hardware import Cluster
from meshrl.tools.plan.models import Lengths, PlannedModel
from meshrl.tools.plan.roles import Budget, Cutting, Parts, Role, budget_of, roles_of
from meshrl.tools.plan.rollout_plan import EXTERNAL, Generation, Sync, plan_sync
from meshrl.tools.plan.timing import (
    EFFICIENCY,
    AxisTraffic,
    Bubble,
    Clock,
    Efficiency,
    Work,
    model_flops,
    pass_traffic,
    pipeline_bubble,
    step_traffic,
)
from meshrl.trainer.rl_trainer import needs_old_log_probs

# Bytes of a GPU that tensors cannot use: the driver's context, communication buffers and fragmentation.
RESERVE = 2 << 30


@dataclass(frozen=True)
class RolloutPlan:
    """How a step's samples are generated: replicas, KV cache bytes on a rank, and the weight sync."""

    name: str
    replicas: int
    at_once: int
    cache_bytes: int
    smallest_cache: int  # bytes for one sequence of full length
    sync: Sync

    @property
    def has_cache(self) -> bool:
        """True if the KV cache holds at least one sequence of full length."""
        return self.cache_bytes >= self.smallest_cache


@dataclass(frozen=True)
class Plan:
    """The predicted step of a config. `role` is the model that learns. Supervised runs have no rollout."""

    config: PPOConfig | SupervisedConfig
    role: Role
    cluster: Cluster
    lengths: Lengths
    phases: list[Phase]
    bubble: Bubble
    rollout: RolloutPlan | None = None

    @property
    def model(self) -> PlannedModel:
        return self.role.model

    @property
    def capacity(self) -> int:
        """The bytes of a device that tensors may use."""
        reserve = 0 if self.cluster.hardware.name == "CPU" else RESERVE
        return int(self.cluster.hardware.memory_bytes) - reserve

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.capacity and (self.rollout is None or self.rollout.has_cache)

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step: the sum over phases, less the seconds that overlap with other phases."""
        return sum(phase.seconds - phase.beside for phase in self.phases)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all samples a second, over all devices together."""
        return float(self.lengths.totals.sum()) / self.seconds


def make_plan(
    config: PPOConfig,
    model: PlannedModel,
    cluster: Cluster,
    lengths: Lengths,
    *,
    critic_model: PlannedModel | None = None,
    reward_model: PlannedModel | None = None,
    ref_model: PlannedModel | None = None,
    efficiency: Efficiency = EFFICIENCY,
    quick: bool = False,
) -> Plan:
    """Plan one RL step. The config must be resolved, and `trainer`'s process counts must match the cluster.

    Without a `critic_model` the critic is the policy's model, adapters included. Without a `ref_model` the reference is
    the policy's model without adapters. Without a `reward_model` no reward model is counted. `quick` leaves out the
    plan of the weight sync.
    """
    roles = {role.name: role for role in roles_of(config, model, critic_model, reward_model, ref_model)}
    return _Planner(config, roles, cluster, lengths, efficiency, quick).plan()


def make_supervised_plan(
    config: SupervisedConfig,
    model: PlannedModel,
    cluster: Cluster,
    lengths: Lengths,
    *,
    ref_model: PlannedModel | None = None,
    efficiency: Efficiency = EFFICIENCY,
) -> Plan:
    """Plan one step on demonstrations, preference pairs or single labelled responses (KTO); see `make_plan`."""
    units, world = SupervisedBatchUnits.from_config(config), config.trainer.world_size
    preferences = config if isinstance(config, PreferenceConfig) else None
    head = "value" if config.trains_scores else "lm"
    role = Role("engine", model, config.model, config.engine, world, head=head)
    roles = {role.name: role}
    if preferences and preferences.has_second_model:
        plain = ref_model or PlannedModel(model.config, model.source)
        rests = preferences.reference.param_offload
        second = Role("reference", plain, config.model, config.engine, world, trains=False, offloads=rests)
        roles[second.name] = second
    training = Training(roles, role.name, lengths, cluster, Clock(cluster, efficiency))
    rows, together = units.rows_per_micro_batch, config.sequences_per_row
    cutting = Cutting(units.tokens_per_micro_batch, None if rows is None else rows * together)
    phases = []
    if preferences and preferences.has_reference:
        reference = training.answer("reference", roles.get("reference", role), cutting, {})
        if preferences.is_judged:  # log-probs of policy and reference for responses to other prompts (KTO's baseline)
            own = training.answer("baseline", role, cutting, {})
            phases.append(replace(own, seconds=own.seconds + reference.seconds))
        phases.append(reference)
    phase, bubble = training.update("train", role, cutting, 1, units.rows_per_step * together, {})
    return Plan(config, role, cluster, lengths, [*phases, phase], bubble)


def judge_memory(config: PPOConfig, cluster: Cluster) -> Parts:
    """Return the bytes that a judge on the workers keeps in every phase, if they are known.

    They are known for external engines, which take a fixed share of all device memory.
    """
    judge = config.reward.judge
    if judge.path is None or judge.engine not in EXTERNAL or judge.has_own_devices:
        return {}
    return {"judge": int(cluster.hardware.memory_bytes * judge.gpu_memory_utilization)}


class _Planner:
    def __init__(
        self, config: PPOConfig, roles: dict[str, Role], cluster: Cluster, lengths: Lengths,
        efficiency: Efficiency, quick: bool,
    ):  # fmt: skip
        self.config, self.lengths = config, lengths
        self.clock = Clock(cluster, efficiency)
        self.units = BatchUnits.from_config(config)
        self.roles, self.actor = roles, roles["actor"]
        self.apart = roles_apart(config)
        here = {name: role for name, role in roles.items() if name not in self.apart}
        self.training = Training(here, "actor", lengths, cluster, self.clock, judge_memory(config, cluster))
        self.generation = Generation(config, self.actor.model, self.actor, cluster)
        self.sync = plan_sync(self.generation, self.clock, quick)

    def plan(self) -> Plan:
        training, policy, units = self.training, self.config.actor_rollout_ref, self.units
        held = max(sum(training.held(stage).values()) for stage in self._stages)
        cache = self.generation.cache_bytes(0 if self.generation.is_apart else held)
        prefill, decode, at_once = self.generation.seconds(self.lengths, cache, self.clock)
        self.rollout_memory = {"rollout weights": self.generation.weights, "KV cache": cache}
        if self.generation.copies:
            self.rollout_memory["weights in 8 bits"] = self.generation.copies
        beside = self._beside()
        phases = [self._generate(prefill + decode)]
        if "reward_model" in self.roles:
            scores = self.config.reward_model
            most = scores.forward_max_token_len_per_gpu if scores.use_dynamic_bsz else None
            cutting = Cutting(most, scores.micro_batch_size_per_gpu)
            where, others = self._where("reward_model", beside)
            phases.append(where.answer("reward", self.roles["reward_model"], cutting, others))
        if needs_old_log_probs(self.config, self.units.optimizer_steps_per_step):
            cutting = Cutting.of(policy.rollout, "log_prob")
            phases.append(training.answer("old_log_prob", self.actor, cutting, beside))
        if uses_reference(self.config):
            cutting = Cutting.of(policy.ref, "log_prob")
            where, others = self._where("ref", beside)
            answer = where.answer("ref", self.roles.get("ref", self.actor), cutting, others)
            phases.append(self._hidden("ref", answer, [phase for phase in phases if phase.name == "old_log_prob"]))
        cutting, samples = Cutting.of(policy.actor), units.samples_per_mini_batch
        steps = units.optimizer_steps_per_step
        update, bubble = training.update("update_actor", self.actor, cutting, steps, samples, beside)
        learning = [update, self._switch()]
        if uses_critic(self.config.critic, self.config.algorithm.adv_estimator):
            critic, cutting = self.roles["critic"], Cutting.of(self.config.critic)
            where, others = self._where("critic", beside)
            values = where.answer("values", critic, cutting, others)
            here = {"old_log_prob", "ref"} - self.apart
            meanwhile = [phase for phase in phases if phase.name in here]
            samples = units.samples_per_step // units.critic_mini_batches_per_epoch
            steps = units.critic_steps_per_step
            critic_update, _ = where.update("update_critic", critic, cutting, steps, samples, others)
            phases += [self._hidden("critic", values, meanwhile), self._hidden("critic", critic_update, learning)]
        phases += learning
        generation = self.generation
        rollout = RolloutPlan(
            policy.rollout.name, generation.replicas, at_once, cache, generation.smallest_cache(), self.sync
        )
        return Plan(self.config, self.actor, training.cluster, self.lengths, phases, bubble, rollout)

    @property
    def _stages(self) -> range:
        return range(len(self.actor.stages))

    def _where(self, role: str, beside: Parts) -> tuple[Training, Parts]:
        """Return the devices of a role, and the memory of the rollout on these devices."""
        if role not in self.apart:
            return self.training, beside
        return replace(self.training, roles={role: self.roles[role]}, always={}), {}

    def _hidden(self, role: str, phase: Phase, meanwhile: Sequence[Phase]) -> Phase:
        """Return a phase with the seconds that overlap with the policy's work.

        Only a role on separate devices overlaps, with the phases in `meanwhile`.
        """
        others = sum(other.seconds for other in meanwhile)
        return replace(phase, beside=min(phase.seconds, others)) if role in self.apart else phase

    def _beside(self) -> Parts:
        """Return the memory that a colocated rollout keeps while the trainer works."""
        rollout, generation = self.config.actor_rollout_ref.rollout, self.generation
        if generation.is_apart or rollout.free_cache_engine:
            return {}
        return self.rollout_memory

    def _generate(self, seconds: float) -> Phase:
        held = [{} if self.generation.is_apart else self.training.held(stage) for stage in self._stages]
        own = self.rollout_memory | {"workspace": self.generation.workspace(), "arriving weights": self._arriving()}
        memory, stage = fullest([parts | own for parts in held])
        return Phase("generate", memory, float(seconds), stage=stage)

    def _arriving(self) -> int:
        """Return the bytes of new weights and of messages in flight on a rollout's own devices.

        A disaggregated rollout generates while a new version arrives.
        """
        return self.generation.arriving() + self.sync.buffers if self.generation.is_apart else 0

    def _switch(self) -> Phase:
        own = {"rollout weights": self.generation.weights, "sync buffers": self.sync.buffers}
        if self.generation.is_apart:
            del own["rollout weights"]
        elif self.generation.copies:
            own["weights in 8 bits"] = self.generation.copies
        memory, stage = fullest([self.training.held(stage, "actor") | own for stage in self._stages])
        return Phase("sync", memory, float(self.sync.seconds), stage=stage)


# ---- phases of the roles: one role works while the other roles may be offloaded


@dataclass(frozen=True)
class Phase:
    """One phase of a step: bytes on the fullest rank by kind, seconds, and the traffic of a rank."""

    name: str
    memory: Parts
    seconds: float
    traffic: list[AxisTraffic] = field(default_factory=list)
    stage: int = 0
    beside: float = 0.0  # seconds of this phase that overlap with work on other devices

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Training:
    """The roles that share devices, with the samples of a step.

    `main` is the role whose memory parts have no name prefix. `always` is memory that other programs hold in every
    phase.
    """

    roles: Mapping[str, Role]
    main: str
    lengths: Lengths
    cluster: Cluster
    clock: Clock
    always: Parts = field(default_factory=dict)

    # Memory

    def held(self, stage: int, awake: str = "", optimizer: bool = False) -> Parts:
        """Return the bytes that the roles hold on the device while `awake` works and the other roles are offloaded.

        `optimizer` adds the optimizer states and gradients of `awake`.
        """
        parts = dict(self.always)
        for name, role in self.roles.items():
            states = role.states(min(stage, len(role.stages) - 1))
            on_host = not role.is_megatron and role.engine.fsdp_config.offload_policy
            rests_params, rests_states = role.rests
            works = name == awake
            prefix = "" if name == self.main else f"{name} "
            if not on_host and (works or not rests_params):
                parts[f"{prefix}parameters"] = states.params
            if not on_host and states.optimizer and ((works and optimizer) or not rests_states):
                parts[f"{prefix}optimizer"] = states.optimizer
            grads_leave = rests_states and (not role.is_megatron or role.engine.megatron.grad_offload)
            if not on_host and role.trains and ((works and optimizer) or (states.keeps_grads and not grads_leave)):
                parts[f"{prefix}gradients"] = states.grads
        return parts

    # Phases

    def answer(self, name: str, role: Role, cutting: Cutting, beside: Parts) -> Phase:
        """Return the phase that computes log-probs or values of all samples."""
        budget = budget_of(role, self.lengths, len(self.lengths.totals), cutting)
        stages = range(len(role.stages))
        parts = [self.held(stage, role.name) | role.forward_parts(budget, stage) | beside for stage in stages]
        memory, stage = fullest(parts)
        seconds, traffic = self._pass(role, Work.of(self.lengths), budget, trains=False)
        return Phase(name, memory, float(seconds), traffic, stage)

    def update(
        self, name: str, role: Role, cutting: Cutting, steps: int, samples: int, beside: Parts
    ) -> tuple[Phase, Bubble]:
        """Return the phase of all `steps` optimizer steps, each on `samples` samples, and its pipeline bubble."""
        budget = budget_of(role, self.lengths, samples, cutting)
        stages = range(len(role.stages))
        parts = [
            self.held(stage, role.name, optimizer=True) | role.update_parts(budget, stage) | beside for stage in stages
        ]
        memory, stage = fullest(parts)
        bubble = self._bubble(role, budget, samples, cutting)
        epochs = steps * samples / len(self.lengths.totals)
        work = Work.of(self.lengths)
        every = Work(work.tokens * epochs, work.targets * epochs, work.squares * epochs, work.is_ragged)
        seconds, traffic = self._pass(role, every, budget, trains=True, idle=bubble.replayed, steps=steps)
        seconds += steps * (self.clock.optimizer(role) + self.clock.accumulate(role, budget.count))
        reduced = [t.times(steps) for t in step_traffic(role, self.cluster)]
        seconds += self.clock.exposed(reduced, 0.0)
        return Phase(name, memory, float(seconds), traffic + reduced, stage), bubble

    # Time

    def _pass(
        self, role: Role, work: Work, budget: Budget, *, trains: bool, idle: float = 0.0, steps: int = 1
    ) -> tuple[float, list[AxisTraffic]]:
        mine = work.shared(role.world_size)
        all_of_it = replace(budget, count=budget.count * steps)
        seconds = self.clock.compute(role, mine, trains, all_of_it) / (1.0 - idle)
        # A tensor-parallel rank works on all tokens of its group, and a pipeline stage on all micro-batches.
        copies = dp_size(role.engine, role.world_size)
        count = budget.count * steps
        tokens = work.tokens / copies / count
        if not role.is_megatron:
            tokens /= role.world_size // copies
        else:
            tokens /= role.engine.megatron.context_parallel_size
        traffic = [t.times(count) for t in pass_traffic(role, int(tokens), trains, self.cluster)]
        return seconds + self.clock.exposed(traffic, seconds), traffic

    def _bubble(self, role: Role, budget: Budget, samples: int, cutting: Cutting) -> Bubble:
        if len(role.stages) == 1:
            return Bubble(0.0, 0.0)
        copies = dp_size(role.engine, role.world_size)
        notes, key = role.model.notes, ("bubble", str(role.engine.megatron), cutting, copies, samples, id(self.lengths))
        if key not in notes:
            # Keep the lengths alive: after garbage collection, other lengths could get the same id.
            notes[key] = self.lengths, self._replayed(role, budget, samples, cutting)
        return notes[key][1]

    def _replayed(self, role: Role, budget: Budget, samples: int, cutting: Cutting) -> Bubble:
        megatron = role.engine.megatron
        part = self.lengths.part(0, dp_size(role.engine, role.world_size), samples)
        most = cutting.tokens * megatron.context_parallel_size if cutting.tokens is not None else None
        rows = split_for_pipeline(
            part.totals,
            max_token_len=most,
            micro_batch_size=cutting.samples,
            stages=len(role.stages),
            multiple=len(role.stages) if len(role.stages[0]) > 1 else 1,
            algorithm=megatron.balance_algorithm,
            largest=lambda count: count,
        )
        flops = model_flops(role.model)
        works = []
        for row in rows:
            totals = part.totals[row if row is not None else [0]].astype(np.float64)
            works.append(sum(flops.forward(totals.sum(), 0.0, float((totals**2).sum()))))
        return pipeline_bubble(role, budget, works)


def fullest(parts: Sequence[Parts]) -> tuple[Parts, int]:
    """Return the nonzero parts of the pipeline stage with the most bytes, and the index of that stage."""
    stage = max(range(len(parts)), key=lambda number: sum(parts[number].values()))
    return {name: size for name, size in parts[stage].items() if size}, stage
