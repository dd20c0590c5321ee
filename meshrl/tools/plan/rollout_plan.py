"""The rollout of a plan and its weight sync.

- `Generation`: weights, KV cache, number of concurrent sequences, and seconds of prefill and decoding.
- `plan_sync`: bytes and seconds of the weight sync, from the reshard plan that a run would make or from estimates.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshrl.config.batch_sizes import shard_axes
from meshrl.config.families import CUT_FAMILIES, MEGATRON_FAMILIES
from meshrl.config.rl import PPOConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.engines.megatron.ranks import ParallelRanks, ranks_of
from meshrl.engines.megatron.weight_map import describe, padded_vocab_size
from meshrl.models.loading import named_weights, torch_dtype
from meshrl.models.names import expert_count
from meshrl.parallel.mesh import Layout
from meshrl.rollout.embedded.capacity import CUDA_BLOCK, SCALE_BYTES
from meshrl.telemetry.hardware import Cluster
from meshrl.tools.plan.models import Lengths, PlannedModel
from meshrl.tools.plan.roles import Role
from meshrl.tools.plan.timing import Clock, model_flops
from meshrl.weights.placement import Placement, RolloutLayout, fsdp2, megatron, replicas, rollout
from meshrl.weights.planner import MEGABYTE, plan_reshard

# Seconds of host work and launches in one decoding step that CUDA graphs do not hide.
STEP_OVERHEAD = 5e-4
# Speed of FP8 matmuls relative to 16-bit matmuls, at 256 rows of Qwen3-1.7B on an H200 (at 16,384 rows: 1.7).
PRODUCTS_8 = 1.5
# Engines that keep their own memory and weights, separate from the trainer's.
EXTERNAL = ("vllm", "sglang")


@dataclass(frozen=True)
class Generation:
    """The rollout of a run: `replicas` of `ranks` ranks each, colocated with the trainer or on separate devices."""

    config: PPOConfig
    model: PlannedModel
    actor: Role
    cluster: Cluster

    @property
    def rollout(self) -> RolloutConfig:
        return self.config.actor_rollout_ref.rollout

    @property
    def is_apart(self) -> bool:
        """True if the rollout is disaggregated, on devices of its own."""
        return not self.config.actor_rollout_ref.hybrid_engine

    @property
    def world_size(self) -> int:
        if self.is_apart:
            return max(1, self.rollout.nnodes * self.rollout.n_gpus_per_node)
        return self.config.trainer.world_size

    @property
    def ranks(self) -> int:
        """The number of ranks of one replica."""
        return min(self.world_size, self.rollout.replica_size)

    @property
    def replicas(self) -> int:
        return max(1, self.world_size // self.ranks)

    @property
    def itemsize(self) -> int:
        return torch_dtype(self.rollout.dtype).itemsize

    @property
    def shares_weights(self) -> bool:
        """True if the embedded rollout generates with the trainer's own module."""
        actor = self.actor
        return (
            self.rollout.name == "embedded"
            and not self.is_apart
            and actor.placement.startswith("whole")
            and actor.model.lora is None
            and not actor.rests[0]
            and actor.dtype == torch_dtype(self.rollout.dtype)
            and self.ranks == 1
            and not (actor.engine.rounds and self.model.config.model_type not in CUT_FAMILIES)
        )

    @cached_property
    def layout(self) -> RolloutLayout:
        """The rollout layout: how the ranks of a replica hold the model."""
        tp = min(self.rollout.tensor_model_parallel_size, self.world_size)
        spreads = self.rollout.expert_parallel_size > 1
        spread = self.ranks if spreads and expert_count(self.model.config) else 0
        return RolloutLayout(tp, self.world_size // tp, spread)

    @property
    def spreads_alone(self) -> bool:
        """True if expert parallelism is the only sharding of a replica.

        The replica's ranks then hold and compute everything alike, except the experts.
        """
        return self.layout.tp == 1 and self.rollout.expert_parallel_size > 1

    def _on_one_rank(self, whole: float, experts: float) -> float:
        """Return one rank's share of a replica's amount `whole`, of which `experts` belongs to experts."""
        return whole - experts + experts / self.ranks if self.spreads_alone else whole / self.ranks

    @cached_property
    def weights(self) -> int:
        """The bytes of the rollout's own weights on the fullest rank, 0 if it shares the trainer's."""
        if self.shares_weights:
            return 0
        if self.ranks == 1:
            return self.model.num_params * self.itemsize
        if self.model.config.model_type not in MEGATRON_FAMILIES:
            return int(self._on_one_rank(self.model.num_params, self.model.expert_params)) * self.itemsize
        one = RolloutLayout(self.layout.tp, max(1, self.ranks // self.layout.tp), self.layout.ep)
        if one not in self.model.notes:
            # Experts have equal size, so every rank holds the same share. Only the other tensors need their placement.
            tensors = {name: shape for name, shape in self.model.tensors.items() if ".experts." not in name}
            held = rollout(tensors, self.model.config, one).elements_of_ranks()
            self.model.notes[one] = int(held.max()) + self.model.expert_params // (one.ep or one.tp)
        return self.model.notes[one] * self.itemsize

    @cached_property
    def copies(self) -> int:
        """The bytes of the quantized 8-bit matrices on the fullest rank, kept in addition to the weights."""
        if self.rollout.quantization is None:
            return 0
        tensors, tower = self.model.tensors, self.model.tower_tensors
        rounded = [name for name in tensors if name.endswith("_proj.weight") and name not in tower]
        return sum(math.prod(tensors[name]) for name in rounded) // self.layout.tp

    @cached_property
    def bytes_per_token(self) -> int:
        """The bytes of KV cache for one token on one rank."""
        config = self.model.config
        if self.model.is_latent:
            return self.model.num_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * self.itemsize
        _, kv_heads, dim = self.model.heads()
        local = max(1, kv_heads // self.rollout.tensor_model_parallel_size)
        of_head = dim + SCALE_BYTES if self.rollout.kv_cache_dtype == "fp8" else dim * self.itemsize
        return 2 * self.model.num_layers * local * of_head

    @property
    def longest(self) -> int:
        data = self.config.data
        return self.rollout.max_model_len or data.max_prompt_length + data.max_response_length

    def cache_bytes(self, held: int) -> int:
        """Return the bytes of the KV cache if other things hold `held` bytes of the device.

        The cache is a share (`gpu_memory_utilization`) of the free memory. External engines count the share of all
        memory.
        """
        total = int(self.cluster.hardware.memory_bytes)
        if self.rollout.name == "hf":
            return int(self.rollout.max_num_seqs * self.longest * self.bytes_per_token)
        if self.rollout.name in EXTERNAL:
            room = int(total * self.rollout.gpu_memory_utilization) - self.weights
        else:
            room = int(max(0, total - held - self.weights - self.copies) * self.rollout.gpu_memory_utilization)
        blocks = max(0, room) // (self.bytes_per_token * CUDA_BLOCK)
        most = self.rollout.max_num_seqs * -(-self.longest // CUDA_BLOCK)
        if self.rollout.name == "embedded":
            blocks = min(blocks, most)
        return blocks * self.bytes_per_token * CUDA_BLOCK

    def smallest_cache(self) -> int:
        """Return the bytes of KV cache that one sequence of full length needs."""
        return -(-self.longest // CUDA_BLOCK) * CUDA_BLOCK * self.bytes_per_token

    def arriving(self) -> int:
        """Return the bytes of a new version's weights beside the engine, on a rollout's own devices.

        External engines hold at most two parts of tensors at a time, every other engine holds the whole version.
        """
        if not self.is_apart:
            return 0
        return self.two_parts() if self.rollout.name in EXTERNAL else self.weights

    def two_parts(self) -> int:
        """Return the bytes of whole tensors in transfer to an external engine, which shards them itself.

        Two parts of half a bucket each are held at a time.
        """
        bucket = self.rollout.update_weights_bucket_megabytes * MEGABYTE
        largest = max((param.numel() for param in self.model.modules.parameters()), default=0) * self.itemsize
        return min(self.model.num_params * self.itemsize, max(bucket, 2 * largest))

    def workspace(self) -> int:
        """Return the bytes of one engine step's hidden states and of the logits of its last tokens."""
        hidden = int(self.model.config.hidden_size)
        tokens, rows = self.rollout.max_num_batched_tokens, self.rollout.max_num_seqs
        tp = self.rollout.tensor_model_parallel_size
        wide = 3 * int(self.model.config.intermediate_size) // tp + 4 * hidden
        return tokens * wide * self.itemsize + rows * int(self.model.config.vocab_size) * (4 + self.itemsize)

    def seconds(self, lengths: Lengths, cache: int, clock: Clock) -> tuple[float, float, int]:
        """Return the seconds of prefill and of decoding, and the number of concurrent sequences.

        The times are those of the first replica, which has at least as many samples as any other.
        """
        part = lengths.part(0, self.replicas, len(lengths.prompts))
        # Data-parallel ranks inside a replica decode separate sequences.
        groups = max(1, self.ranks // max(self.layout.tp, self.rollout.expert_parallel_size))
        mean = float(part.totals.mean())
        fit = int(cache // max(1, self.bytes_per_token) // mean) if cache else 1
        at_once = max(1, min(self.rollout.max_num_seqs, fit))
        rates, hardware = clock.rates, self.cluster.hardware
        flops = model_flops(self.model)
        prompts = part.prompts if not self.rollout.enable_prefix_caching else part.prompts[:: self.rollout.n]
        products, attention = flops.forward(prompts.sum(), len(part.prompts), float((prompts**2.0).sum()))
        peak = hardware.flops(8 * self.itemsize)
        experts = self._expert_flops()  # for one token
        rate = peak * rates.products * (PRODUCTS_8 if self.copies else 1.0)
        prefill = self._on_one_rank(products, experts * prompts.sum()) / rate
        prefill += self._on_one_rank(attention, 0.0) / (peak * rates.ragged_attention)
        active, context = _decoding(part.responses, part.prompts, at_once * groups)
        weights = self.weights or self.model.num_params * self.itemsize
        weights -= self.model.tower_params * self.itemsize  # decoding does not read the vision tower
        weights -= self.copies * (self.itemsize - 1)  # the 8-bit copy is read instead
        read = (weights + context / groups * self.bytes_per_token) / (hardware.memory_gbs * 1e9 * rates.decode)
        busy = active * self._on_one_rank(flops.token + flops.target, experts) / rate
        # Tensor parallelism needs two collectives a layer, expert parallelism one.
        calls = self.model.num_layers * (2 if self.rollout.tensor_model_parallel_size > 1 else self.spreads_alone)
        decode = float(np.maximum(read, busy).sum()) + len(active) * (
            STEP_OVERHEAD + calls * hardware.latency_us * 1e-6
        )
        return prefill, decode, at_once

    def _expert_flops(self) -> float:
        """Return the floating-point operations of one token in the experts that it visits."""
        experts = expert_count(self.model.config)
        visited = self.model.config.num_experts_per_tok / experts if experts else 0.0
        return 2.0 * visited * self.model.expert_params


def _decoding(responses: np.ndarray, prompts: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every decoding step of a replica, the running sequences and the tokens in their contexts."""
    free = [0] * slots
    starts = np.zeros(len(responses), np.int64)
    for number, length in enumerate(responses.tolist()):
        starts[number] = heapq.heappop(free)
        heapq.heappush(free, int(starts[number]) + length)
    steps = int((starts + responses).max())
    change, growth = np.zeros(steps + 1), np.zeros(steps + 1)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + responses, -1)
    np.add.at(growth, starts, prompts)
    np.add.at(growth, starts + responses, -(prompts + responses))
    active = change.cumsum()
    # Every running sequence grows by a token a step. When it ends, its growth is subtracted again.
    context = (growth + np.concatenate([[0.0], active[:-1]])).cumsum()
    return active[:steps], context[:steps]


# ---- weight sync

# Slices of a placement beyond which planning all ranks would take too long. Then a lower bound is given instead.
MOST_SLICES = 400_000


@dataclass(frozen=True)
class Sync:
    """The weight sync: the path of the weights, and the bytes and seconds of the busiest rank."""

    way: str
    sent: int
    received: int
    copied: int
    buffers: int
    seconds: float


def plan_sync(generation: Generation, clock: Clock, quick: bool = False) -> Sync:
    """Plan the weight sync from the actor's layout to the rollout's.

    With `quick`, no reshard plan is made for a sync that needs one. The result is then the bytes that a rank must
    receive at least.
    """
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
    if generation.rollout.is_elsewhere:  # the first rank of each replica receives whole tensors for its engine
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
    if generation.is_apart or is_external:  # the engine copies the weights that arrive beside it
        copied += generation.weights
    buffers = 4 * min(plan.slot_bytes, int(plan.message_bytes.max(initial=0)))
    if is_external and not generation.is_apart:
        buffers += generation.two_parts()
    way = "a plan for each bucket of tensors" if is_external else "a plan"
    return _timed(f"{way}, fed {plan.feed}", sent, received, copied, buffers, generation, clock)


def _source(generation: Generation, most: int) -> Placement | None:
    """Return the placement of the actor's weights, or None if it needs more than about `most` slices."""
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
    """Return the number of slices on all ranks.

    Only one rank of each pipeline stage is examined, because the stage's other ranks hold equally many.
    """
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
