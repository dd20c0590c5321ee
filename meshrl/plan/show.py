"""A plan in words and numbers, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from meshrl.config.layout import layout_lines
from meshrl.config.names import count
from meshrl.plan.planner import Plan, RolloutPlan
from meshrl.plan.search import Candidate, Found
from meshrl.plan.timing import EFFICIENCY
from meshrl.weights.show import as_bytes

GIB = 1 << 30
# The order in which parts of the memory are told; what is not here comes last.
ORDER = ("parameters", "gradients", "optimizer", "activations", "logits")


def plan_lines(plan: Plan) -> list[str]:
    """The whole plan as text."""
    return [
        *_head(plan),
        "",
        *_memory(plan),
        "",
        *_time(plan),
        "",
        *_traffic(plan),
        "",
        *_verdict(plan),
    ]


def _head(plan: Plan) -> Iterator[str]:
    cluster, lengths, role, rollout = plan.cluster, plan.lengths, plan.role, plan.rollout
    rates = "measured" if cluster.hardware.measured else "data-sheet rates times calibrated efficiencies"
    yield f"model: {plan.model.num_params / 1e9:.2f}B parameters, from {plan.model.source}"
    yield (
        f"devices: {cluster.devices} x {cluster.hardware.name}, {cluster.per_node} in a machine, "
        f"{cluster.hardware.memory_gib:.1f} GiB each; {rates}"
    )
    yield from layout_lines(role.name, role.engine, role.world_size)
    if rollout is not None:
        yield (
            f"rollout: {rollout.name}, {count(rollout.replicas, 'replica')}, {count(rollout.at_once, 'sequence')} at "
            f"once in each; KV cache {as_bytes(rollout.cache_bytes)} a rank"
        )
    yield (
        f"a step: {count(len(lengths.prompts), 'sample')}, {int(lengths.totals.sum()):,} tokens ({lengths.source}; "
        f"{lengths.response_share:.0%} predicted)"
    )


def _memory(plan: Plan) -> Iterator[str]:
    names = {name for phase in plan.phases for name in phase.memory}
    rows = [name for name in ORDER if name in names] + sorted(names - set(ORDER))
    wide = max(22, *map(len, rows))
    yield "memory of the fullest rank, GiB"
    yield f"{'':>{wide}}" + "".join(f"{phase.name:>15}" for phase in plan.phases)
    for name in rows:
        cells = (phase.memory.get(name, 0) / GIB for phase in plan.phases)
        yield f"{name:>{wide}}" + "".join(f"{cell:>15.2f}" if cell else f"{'':>15}" for cell in cells)
    yield f"{'together':>{wide}}" + "".join(f"{phase.total / GIB:>15.2f}" for phase in plan.phases)
    if any(phase.stage for phase in plan.phases):
        yield f"{'on pipeline stage':>{wide}}" + "".join(f"{phase.stage:>15}" for phase in plan.phases)
    room = plan.capacity / GIB
    yield f"{'left':>{wide}}" + "".join(f"{room - phase.total / GIB:>15.2f}" for phase in plan.phases)
    reserved = plan.cluster.hardware.memory_gib - room
    yield f"of {plan.cluster.hardware.memory_gib:.1f} GiB, {reserved:.0f} are left to driver, links and fragmentation"


def _time(plan: Plan) -> Iterator[str]:
    yield f"{'phase':>22}{'seconds':>15}{'share':>15}"
    for phase in plan.phases:
        hidden = f"  {phase.beside:.2f} of it beside the policy's work" if phase.beside else ""
        yield f"{phase.name:>22}{phase.seconds:>15.2f}{phase.seconds / plan.seconds:>15.0%}{hidden}"
    yield f"{'step':>22}{plan.seconds:>15.2f}{plan.tokens_per_second:>15,.0f} tokens/s"
    if plan.bubble.formula:
        yield (
            f"pipeline bubble: {plan.bubble.formula:.1%} by the formula for equal micro-batches, "
            f"{plan.bubble.replayed:.1%} replayed with these lengths"
        )


def _traffic(plan: Plan) -> Iterator[str]:
    yield f"{'sent by one rank':>22}{'axis':>15}{'ranks':>15}{'a step':>15}{'calls':>15}"
    for phase in plan.phases:
        for traffic in phase.traffic:
            where = "between machines" if traffic.crosses_nodes else "inside a machine"
            yield (
                f"{phase.name:>22}{traffic.axis:>15}{traffic.ranks:>15}{as_bytes(traffic.sent):>15}"
                f"{traffic.calls:>15,}  {where}"
            )
    if plan.rollout is None:
        return
    sync = plan.rollout.sync
    yield (
        f"weight sync ({sync.way}): the busiest rank sends {as_bytes(sync.sent)}, receives {as_bytes(sync.received)}, "
        f"copies {as_bytes(sync.copied)}, in {sync.seconds:.2f} s; buffers {as_bytes(sync.buffers)}"
    )


def _verdict(plan: Plan) -> Iterator[str]:
    fullest, room = plan.fullest, plan.capacity
    if plan.fits:
        yield f"fits: {fullest.name} is fullest with {fullest.total / GIB:.1f} of {room / GIB:.1f} GiB"
        return
    for phase in plan.phases:
        if phase.total > room:
            most = max(phase.memory.items(), key=lambda part: part[1])
            yield (
                f"does not fit: {phase.name} needs {phase.total / GIB:.1f} GiB, {(phase.total - room) / GIB:.1f} more "
                f"than the {room / GIB:.1f} there are; the largest part is {most[0]} with {most[1] / GIB:.1f}"
            )
    if plan.rollout is not None and not plan.rollout.has_cache:
        yield (
            f"does not fit: the KV cache has {as_bytes(plan.rollout.cache_bytes)}, one sequence of full length needs "
            f"{as_bytes(plan.rollout.smallest_cache)}"
        )


def change_lines(candidate: Candidate | None) -> list[str]:
    """The nearest change that fits."""
    if candidate is None:
        return ["no single change, no pair of changes and not all of them together fit: use more devices, or --search"]
    plan = candidate.plan
    return [
        "the nearest change that fits:",
        *(f"  {word}" for word in candidate.overrides),
        f"then {plan.fullest.name} is fullest with {plan.fullest.total / GIB:.1f} of {plan.capacity / GIB:.1f} GiB, "
        f"and a step takes {plan.seconds:.2f} s",
    ]


def search_lines(found: Found) -> list[str]:
    """The best layouts, the fastest first."""
    seen = f"looked at {found.seen} of {found.layouts} layouts"
    if not found.best:
        return [f"{seen}: none fits"]
    lines = [f"{seen}; the best:", f"{'':>4}{'s a step':>10}{'fullest, GiB':>14}  overrides"]
    for number, candidate in enumerate(found.best, 1):
        plan = candidate.plan
        words = " ".join(word.removeprefix("actor_rollout_ref.") for word in candidate.overrides) or "(as it is)"
        lines.append(f"{number:>3}.{plan.seconds:>10.2f}{plan.fullest.total / GIB:>14.1f}  {words}")
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything as plain numbers: bytes and seconds."""
    return {
        "model": {"parameters": plan.model.num_params, "source": plan.model.source},
        "devices": {"count": plan.cluster.devices, "per_node": plan.cluster.per_node} | asdict(plan.cluster.hardware),
        "samples": len(plan.lengths.prompts),
        "tokens": int(plan.lengths.totals.sum()),
        "fits": plan.fits,
        "capacity_bytes": plan.capacity,
        "seconds": plan.seconds,
        "bubble": asdict(plan.bubble),
        **({} if plan.rollout is None else _rollout_json(plan.rollout)),
        "phases": [
            {
                "name": phase.name,
                "seconds": phase.seconds,
                "beside": phase.beside,
                "bytes": phase.total,
                "stage": phase.stage,
                "memory": phase.memory,
                "traffic": [asdict(traffic) for traffic in phase.traffic],
            }
            for phase in plan.phases
        ],
        "efficiencies": asdict(EFFICIENCY),
    }


def _rollout_json(rollout: RolloutPlan) -> dict[str, Any]:
    return {
        "kv_cache_bytes": rollout.cache_bytes,
        "sequences_at_once": rollout.at_once,
        "sync": asdict(rollout.sync),
    }


def candidate_json(candidate: Candidate | None) -> dict[str, Any] | None:
    """A change and what it does."""
    if candidate is None:
        return None
    plan = candidate.plan
    return {"overrides": candidate.overrides, "seconds": plan.seconds, "bytes": plan.fullest.total, "fits": plan.fits}
