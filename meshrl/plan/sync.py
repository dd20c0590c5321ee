"""The weight sync: bytes by the very plan that a run would make, or of a stream of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrl.config.families import MEGATRON_FAMILIES
from meshrl.config.layout import shard_axes
from meshrl.engines.megatron.ranks import ParallelRanks, ranks_of
from meshrl.engines.megatron.weight_map import describe, padded_vocab_size
from meshrl.models.buffers import named_weights
from meshrl.parallel.layout import Layout
from meshrl.plan.generation import EXTERNAL, Generation
from meshrl.plan.timing import Clock
from meshrl.weights.placement import Placement, fsdp2, megatron, replicas
from meshrl.weights.plan import MEGABYTE, plan_reshard
from meshrl.weights.rollout_placement import rollout

# Rectangles of a placement beyond which a plan of all ranks would take too long; then its lower bound is told.
MOST_SLICES = 400_000


@dataclass(frozen=True)
class Sync:
    """What the busiest rank moves, in bytes and seconds, and which way the weights go."""

    way: str
    sent: int
    received: int
    copied: int
    buffers: int
    seconds: float


def plan_sync(generation: Generation, clock: Clock, quick: bool = False) -> Sync:
    """From the actor's layout to the rollout's; `quick` tells no more than what a rank must receive at least."""
    actor, model = generation.actor, generation.model
    bucket = generation.rollout.update_weights_bucket_megabytes * MEGABYTE
    if generation.shares_weights:
        return Sync("none: the rollout generates with the trainer's own weights", 0, 0, 0, 0, 0.0)
    whole = model.num_params * generation.itemsize
    is_external = generation.rollout.name in EXTERNAL
    has_no_plan = model.config.model_type not in MEGATRON_FAMILIES or actor.placement == "fsdp"
    if not generation.is_apart and has_no_plan:
        received = whole * (actor.world_size - 1) // actor.world_size
        return _timed("a stream of whole tensors", received, received, whole, 2 * bucket, generation, clock)
    if not generation.is_apart and actor.placement.startswith("whole"):
        buffers = generation.two_parts() if is_external else 2 * bucket
        return _timed("a copy on the device", 0, 0, whole, buffers, generation, clock)
    if quick or has_no_plan:
        received = generation.weights
        return _timed("at least", received, received, 0, 2 * bucket, generation, clock)
    layout = generation.layout
    source = _source(generation, MOST_SLICES - len(model.tensors) * layout.world_size)
    if source is None:
        received = generation.weights
        return _timed("too many parts to plan here: at least", received, received, 0, 2 * bucket, generation, clock)
    target, step = rollout(model.tensors, model.config, layout), 1
    if generation.rollout.is_elsewhere:  # of a replica's ranks the first takes whole tensors for its engine
        step = generation.ranks
        target = replicas(model.tensors, layout.world_size // step)
    start = source.world_size if generation.is_apart else 0
    plan = plan_reshard(
        source,
        target,
        itemsize=generation.itemsize,
        bucket_bytes=bucket // 2 if is_external else bucket,
        destination_ranks=range(start, start + layout.world_size, step),
    )
    sent, received, copied = (int(column.max()) for column in (plan.sent(), plan.received(), plan.copied()))
    if generation.is_apart or is_external:  # what arrives beside the engine is taken over by it
        copied += generation.weights
    buffers = 4 * min(plan.slot_bytes, int(plan.message_bytes.max(initial=0)))
    if is_external and not generation.is_apart:
        buffers += generation.two_parts()
    way = "a plan for each bucket of tensors" if is_external else "a plan"
    return _timed(f"{way}, fed {plan.feed}", sent, received, copied, buffers, generation, clock)


def _source(generation: Generation, most: int) -> Placement | None:
    """Where the actor's weights lie; None if that takes more than about `most` slices to say."""
    actor, config = generation.actor, generation.model.config
    if actor.is_megatron:
        ranks = ranks_of(actor.engine.megatron, 0, actor.world_size)
        padded = padded_vocab_size(config.vocab_size, ranks.tp, actor.engine.megatron.make_vocab_size_divisible_by)
        too_many = _count_slices(config, ranks, padded) > most
        return None if too_many else megatron(config, ranks, vocab_size=padded)
    params = {
        name.replace(".base_layer.", "."): tuple(weight.shape)
        for name, weight in named_weights(generation.model.modules).items()
        if ".lora_" not in name
    }
    if actor.placement.startswith("whole"):
        found = replicas(params, 1, config.model_type, "one rank")
    else:
        found = fsdp2(params, Layout.of(shard_axes(actor.engine, actor.world_size)), config.model_type)
    return None if len(found.slices) > most else found


def _count_slices(config: Any, ranks: ParallelRanks, padded_vocab: int) -> int:
    """How many slices all ranks hold, counted on one rank of each pipeline stage: its other ranks hold as many."""
    there = [ranks.at(rank) for rank in range(ranks.world_size)]
    one_each = {each.pp_rank: each for each in there}
    counts = {stage: len(describe(config, each, vocab_size=padded_vocab)) for stage, each in one_each.items()}
    return sum(counts[each.pp_rank] for each in there)


def _timed(way: str, sent: int, received: int, copied: int, buffers: int, generation: Generation, clock: Clock) -> Sync:
    hardware, rates = clock.cluster.hardware, clock.rates
    crosses = generation.world_size > clock.cluster.per_node or generation.is_apart
    link = hardware.link(crosses and clock.cluster.nodes > 1) * rates.link
    memory = hardware.memory_gbs * 1e9 * rates.memory
    seconds = max(sent, received) / link + 2 * (copied + sent + received) / memory
    if generation.actor.rests[0]:
        seconds += 2 * generation.actor.states().params / (hardware.host_gbs * 1e9 * rates.host)
    return Sync(way, sent, received, copied, buffers, seconds)
