"""A whole step of a recipe on a cluster: memory, traffic and seconds of every phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshrl.config.critic import uses_critic
from meshrl.config.layout import dp_size
from meshrl.config.rollout import READERS
from meshrl.config.root import PPOConfig
from meshrl.config.units import BatchUnits
from meshrl.engines.megatron.micro_batches import split_for_pipeline
from meshrl.plan.generation import Generation
from meshrl.plan.hardware import Cluster
from meshrl.plan.lengths import Lengths
from meshrl.plan.model import PlannedModel
from meshrl.plan.roles import Budget, Parts, Role, budget_of, roles_of, uses_reference
from meshrl.plan.sync import Sync, plan_sync
from meshrl.plan.timing import EFFICIENCY, Bubble, Clock, Efficiency, Work, model_flops, pipeline_bubble
from meshrl.plan.traffic import AxisTraffic, pass_traffic, step_traffic

# The driver's context, communication buffers and what fragmentation wastes: not for tensors.
RESERVE = 2 << 30


@dataclass(frozen=True)
class Phase:
    """One phase of a step: bytes on the fullest rank by what they are, seconds, and what a rank sends."""

    name: str
    memory: Parts
    seconds: float
    traffic: list[AxisTraffic] = field(default_factory=list)
    stage: int = 0

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What a step of this config will take."""

    config: PPOConfig
    model: PlannedModel
    cluster: Cluster
    lengths: Lengths
    phases: list[Phase]
    bubble: Bubble
    sync: Sync
    cache_bytes: int
    at_once: int
    replicas: int
    smallest_cache: int

    @property
    def capacity(self) -> int:
        """Bytes of a device that tensors may take."""
        reserve = 0 if self.cluster.hardware.name == "CPU" else RESERVE
        return int(self.cluster.hardware.memory_bytes) - reserve

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def has_cache(self) -> bool:
        """Whether at least one sequence of full length can be generated."""
        return self.cache_bytes >= self.smallest_cache

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.capacity and self.has_cache

    @cached_property
    def seconds(self) -> float:
        """One step, phase after phase."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all samples, over all devices."""
        return float(self.lengths.totals.sum()) / self.seconds


def make_plan(
    config: PPOConfig,
    model: PlannedModel,
    cluster: Cluster,
    lengths: Lengths,
    *,
    critic_model: PlannedModel | None = None,
    efficiency: Efficiency = EFFICIENCY,
    quick: bool = False,
) -> Plan:
    """Plans one step. The config must have its followers filled and `trainer`'s processes set to the cluster's.

    `quick` leaves the plan of the weight sync out.
    """
    return _Planner(config, model, cluster, lengths, critic_model, efficiency, quick).plan()


class _Planner:
    def __init__(
        self, config: PPOConfig, model: PlannedModel, cluster: Cluster, lengths: Lengths,
        critic_model: PlannedModel | None, efficiency: Efficiency, quick: bool,
    ):  # fmt: skip
        self.config, self.model, self.cluster, self.lengths = config, model, cluster, lengths
        self.clock = Clock(cluster, efficiency)
        self.units = BatchUnits.from_config(config)
        self.roles = {role.name: role for role in roles_of(config, model, critic_model)}
        self.actor = self.roles["actor"]
        self.generation = Generation(config, model, self.actor, cluster)
        self.sync = plan_sync(self.generation, self.clock, quick)

    def plan(self) -> Plan:
        held = max(self._resting(stage) for stage in self._stages)
        cache = self.generation.cache_bytes(0 if self.generation.is_apart else held)
        prefill, decode, at_once = self.generation.seconds(self.lengths, cache, self.clock)
        self.rollout_memory = {"rollout weights": self.generation.weights, "KV cache": cache}
        phases = [self._generate(cache, prefill + decode)]
        policy = self.config.actor_rollout_ref
        if self._needs_old_log_probs:
            phases.append(self._answer("old_log_prob", self.actor, policy.rollout, "log_prob"))
        if uses_reference(self.config):
            phases.append(self._answer("ref", self.roles.get("ref", self.actor), policy.ref, "log_prob"))
        bubble = Bubble(0.0, 0.0)
        if uses_critic(self.config.critic, self.config.algorithm.adv_estimator):
            critic = self.config.critic
            phases.append(self._answer("values", self.roles["critic"], critic, "ppo"))
            steps = self.units.critic_steps_per_step
            samples = self.units.samples_per_step // self.units.critic_mini_batches_per_epoch
            phase, _ = self._update("update_critic", self.roles["critic"], critic, steps, samples)
            phases.append(phase)
        actor = policy.actor
        steps, samples = self.units.optimizer_steps_per_step, self.units.samples_per_mini_batch
        phase, bubble = self._update("update_actor", self.actor, actor, steps, samples)
        phases += [phase, self._switch()]
        return Plan(
            self.config, self.model, self.cluster, self.lengths, phases, bubble, self.sync, cache, at_once,
            self.generation.replicas, self.generation.smallest_cache(),
        )  # fmt: skip

    @property
    def _stages(self) -> range:
        return range(len(self.actor.stages))

    @property
    def _needs_old_log_probs(self) -> bool:
        """As the trainer decides it, but for rarer estimators and losses, which also need them."""
        algorithm = self.config.algorithm
        if algorithm.rollout_correction.bypass_mode:
            return False
        return self.units.optimizer_steps_per_step > 1 or algorithm.use_kl_in_reward

    # Memory

    def _resting(self, stage: int, awake: str = "", optimizer: bool = False) -> int:
        return sum(self._held(stage, awake, optimizer).values())

    def _held(self, stage: int, awake: str = "", optimizer: bool = False) -> Parts:
        """What the roles hold on the device while `awake` works (with its `optimizer`) and the others rest."""
        parts: Parts = {}
        for name, role in self.roles.items():
            states = role.states(min(stage, len(role.stages) - 1))
            on_host = not role.is_megatron and role.engine.fsdp_config.offload_policy
            rests_params, rests_states = role.rests
            if name == "ref":
                rests_params = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
            works = name == awake
            prefix = "" if name == "actor" else f"{name} "
            if not on_host and (works or not rests_params):
                parts[f"{prefix}parameters"] = states.params
            if not on_host and states.optimizer and ((works and optimizer) or not rests_states):
                parts[f"{prefix}optimizer"] = states.optimizer
            grads_leave = rests_states and (not role.is_megatron or role.engine.megatron.grad_offload)
            if not on_host and role.trains and ((works and optimizer) or (states.keeps_grads and not grads_leave)):
                parts[f"{prefix}gradients"] = states.grads
        return parts

    def _beside(self) -> Parts:
        """What a rollout on the same devices keeps while the trainer works."""
        rollout, generation = self.config.actor_rollout_ref.rollout, self.generation
        if generation.is_apart or (rollout.free_cache_engine and rollout.name in READERS["free_cache_engine"]):
            return {}
        return self.rollout_memory

    def _fullest(self, parts: Sequence[Parts]) -> tuple[Parts, int]:
        stage = max(range(len(parts)), key=lambda number: sum(parts[number].values()))
        return {name: size for name, size in parts[stage].items() if size}, stage

    def _generate(self, cache: int, seconds: float) -> Phase:
        held = [{} if self.generation.is_apart else self._held(stage) for stage in self._stages]
        own = self.rollout_memory | {"workspace": self.generation.workspace()}
        memory, stage = self._fullest([parts | own for parts in held])
        return Phase("generate", memory, float(seconds), stage=stage)

    def _switch(self) -> Phase:
        own = {"rollout weights": self.generation.weights, "sync buffers": self.sync.buffers}
        if self.generation.is_apart:
            del own["rollout weights"]
        memory, stage = self._fullest([self._held(stage, "actor") | own for stage in self._stages])
        return Phase("sync", memory, float(self.sync.seconds), stage=stage)

    def _answer(self, name: str, role: Role, how: object, prefix: str) -> Phase:
        """Log-probs or values of all samples."""
        budget = budget_of(role.engine, self.lengths, role.world_size, self.units.samples_per_step, how, prefix)
        stages = range(len(role.stages))
        parts = [self._held(stage, role.name) | role.forward_parts(budget, stage) | self._beside() for stage in stages]
        memory, stage = self._fullest(parts)
        seconds, traffic = self._pass(role, Work.of(self.lengths), budget, trains=False)
        return Phase(name, memory, float(seconds), traffic, stage)

    def _update(self, name: str, role: Role, how: object, steps: int, samples: int) -> tuple[Phase, Bubble]:
        """All optimizer steps on the samples of a step."""
        budget = budget_of(role.engine, self.lengths, role.world_size, samples, how)
        stages = range(len(role.stages))
        parts = [
            self._held(stage, role.name, optimizer=True) | role.update_parts(budget, stage) | self._beside()
            for stage in stages
        ]
        memory, stage = self._fullest(parts)
        bubble = self._bubble(role, budget, samples, how)
        epochs = steps * samples / self.units.samples_per_step
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
        # A tensor-parallel rank takes part in all of its group's tokens, a pipeline stage in all micro-batches.
        copies = dp_size(role.engine, role.world_size)
        count = budget.count * steps
        tokens = work.tokens / copies / count
        if not role.is_megatron:
            tokens /= role.world_size // copies
        else:
            tokens /= role.engine.megatron.context_parallel_size
        traffic = [t.times(count) for t in pass_traffic(role, int(tokens), trains, self.cluster)]
        return seconds + self.clock.exposed(traffic, seconds), traffic

    def _bubble(self, role: Role, budget: Budget, samples: int, how: object) -> Bubble:
        if len(role.stages) == 1:
            return Bubble(0.0, 0.0)
        copies = dp_size(role.engine, role.world_size)
        sizes = how.ppo_max_token_len_per_gpu, how.use_dynamic_bsz, how.ppo_micro_batch_size_per_gpu  # type: ignore[attr-defined]
        key = ("bubble", str(role.engine.megatron), sizes, copies, samples, id(self.lengths))
        if key not in self.model.notes:
            self.model.notes[key] = self._replayed(role, budget, samples, how)
        return self.model.notes[key]

    def _replayed(self, role: Role, budget: Budget, samples: int, how: object) -> Bubble:
        megatron = role.engine.megatron
        part = self.lengths.part(0, dp_size(role.engine, role.world_size), samples)
        most = how.ppo_max_token_len_per_gpu * megatron.context_parallel_size if how.use_dynamic_bsz else None  # type: ignore[attr-defined]
        rows = split_for_pipeline(
            part.totals,
            max_token_len=most,
            micro_batch_size=how.ppo_micro_batch_size_per_gpu,  # type: ignore[attr-defined]
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
