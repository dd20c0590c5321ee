"""The models of a run at work: bytes, traffic and seconds while one of them trains or answers and the others rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshrl.config.layout import dp_size
from meshrl.engines.megatron.micro_batches import split_for_pipeline
from meshrl.plan.hardware import Cluster
from meshrl.plan.lengths import Lengths
from meshrl.plan.roles import Budget, Cutting, Parts, Role, budget_of
from meshrl.plan.timing import Bubble, Clock, Work, model_flops, pipeline_bubble
from meshrl.plan.traffic import AxisTraffic, pass_traffic, step_traffic


@dataclass(frozen=True)
class Phase:
    """One phase of a step: bytes on the fullest rank by what they are, seconds, and what a rank sends."""

    name: str
    memory: Parts
    seconds: float
    traffic: list[AxisTraffic] = field(default_factory=list)
    stage: int = 0
    beside: float = 0.0  # how many of its seconds pass while other devices work

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Training:
    """All roles on the same devices, with the samples of a step. `main` is the role that is told without its name,
    `always` what others hold there in every phase."""

    roles: Mapping[str, Role]
    main: str
    lengths: Lengths
    cluster: Cluster
    clock: Clock
    always: Parts = field(default_factory=dict)

    # Memory

    def held(self, stage: int, awake: str = "", optimizer: bool = False) -> Parts:
        """What the roles hold on the device while `awake` works (with its `optimizer`) and the others rest."""
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
        """Log-probs or values of all samples."""
        budget = budget_of(role, self.lengths, len(self.lengths.totals), cutting)
        stages = range(len(role.stages))
        parts = [self.held(stage, role.name) | role.forward_parts(budget, stage) | beside for stage in stages]
        memory, stage = fullest(parts)
        seconds, traffic = self._pass(role, Work.of(self.lengths), budget, trains=False)
        return Phase(name, memory, float(seconds), traffic, stage)

    def update(
        self, name: str, role: Role, cutting: Cutting, steps: int, samples: int, beside: Parts
    ) -> tuple[Phase, Bubble]:
        """All optimizer steps on the samples of a step, `samples` in each."""
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

    def _bubble(self, role: Role, budget: Budget, samples: int, cutting: Cutting) -> Bubble:
        if len(role.stages) == 1:
            return Bubble(0.0, 0.0)
        copies = dp_size(role.engine, role.world_size)
        notes, key = role.model.notes, ("bubble", str(role.engine.megatron), cutting, copies, samples, id(self.lengths))
        if key not in notes:
            # With the lengths themselves: once they were gone, others might get their id.
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
    """Of the pipeline's stages the one that holds most, and its number."""
    stage = max(range(len(parts)), key=lambda number: sum(parts[number].values()))
    return {name: size for name, size in parts[stage].items() if size}, stage
