"""A whole step of a recipe on a cluster: memory, traffic and seconds of every phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshrl.config.algorithm_checks import uses_reference
from meshrl.config.critic import uses_critic
from meshrl.config.pools import roles_apart
from meshrl.config.preferences import PreferenceConfig
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.units import BatchUnits, SupervisedBatchUnits
from meshrl.plan.generation import EXTERNAL, Generation
from meshrl.plan.hardware import Cluster
from meshrl.plan.lengths import Lengths
from meshrl.plan.model import PlannedModel
from meshrl.plan.roles import Cutting, Parts, Role, roles_of
from meshrl.plan.sync import Sync, plan_sync
from meshrl.plan.timing import EFFICIENCY, Bubble, Clock, Efficiency
from meshrl.plan.training import Phase, Training, fullest
from meshrl.trainer.correction import needs_old_log_probs

# The driver's context, communication buffers and what fragmentation wastes: not for tensors.
RESERVE = 2 << 30


@dataclass(frozen=True)
class RolloutPlan:
    """How a step's samples are generated: bytes of the cache on a rank, and how the weights get there."""

    name: str
    replicas: int
    at_once: int
    cache_bytes: int
    smallest_cache: int  # of one sequence of full length
    sync: Sync

    @property
    def has_cache(self) -> bool:
        """Whether at least one sequence of full length can be generated."""
        return self.cache_bytes >= self.smallest_cache


@dataclass(frozen=True)
class Plan:
    """What a step of this config will take; `role` is the model that learns. Supervised runs need no rollout."""

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
        """Bytes of a device that tensors may take."""
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
        """One step, phase after phase, less what passes beside others."""
        return sum(phase.seconds - phase.beside for phase in self.phases)

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
    reward_model: PlannedModel | None = None,
    ref_model: PlannedModel | None = None,
    efficiency: Efficiency = EFFICIENCY,
    quick: bool = False,
) -> Plan:
    """Plans one step. The config must have its followers filled and `trainer`'s processes set to the cluster's.

    Without a `critic_model` a critic is the policy's, adapters included, and without a `ref_model` a reference is the
    policy's without them; without a `reward_model` none is counted.
    `quick` leaves the plan of the weight sync out.
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
    """Plans one step on demonstrations, pairs or judged answers, see `make_plan`."""
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
        if preferences.is_judged:  # what policy and reference think of answers to other prompts
            own = training.answer("baseline", role, cutting, {})
            phases.append(replace(own, seconds=own.seconds + reference.seconds))
        phases.append(reference)
    phase, bubble = training.update("train", role, cutting, 1, units.rows_per_step * together, {})
    return Plan(config, role, cluster, lengths, [*phases, phase], bubble)


def judge_memory(config: PPOConfig, cluster: Cluster) -> Parts:
    """What a judge on the workers keeps in every phase, where it is known: external engines take their share of all."""
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
        """The devices of a role, and what else is on them."""
        if role not in self.apart:
            return self.training, beside
        return replace(self.training, roles={role: self.roles[role]}, always={}), {}

    def _hidden(self, role: str, phase: Phase, meanwhile: Sequence[Phase]) -> Phase:
        """A phase of a role that, on devices of its own, works while these run on the policy's."""
        others = sum(other.seconds for other in meanwhile)
        return replace(phase, beside=min(phase.seconds, others)) if role in self.apart else phase

    def _beside(self) -> Parts:
        """What a rollout on the same devices keeps while the trainer works."""
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
        """On devices of its own a rollout generates while a version comes, with messages on their way."""
        return self.generation.arriving() + self.sync.buffers if self.generation.is_apart else 0

    def _switch(self) -> Phase:
        own = {"rollout weights": self.generation.weights, "sync buffers": self.sync.buffers}
        if self.generation.is_apart:
            del own["rollout weights"]
        elif self.generation.copies:
            own["weights in 8 bits"] = self.generation.copies
        memory, stage = fullest([self.training.held(stage, "actor") | own for stage in self._stages])
        return Phase("sync", memory, float(self.sync.seconds), stage=stage)
