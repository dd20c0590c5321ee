"""Seconds of each phase: floating-point operations, bytes of memory and bytes of links, each divided by its rate.

- `Efficiency`, `Clock`: rates of the hardware table times efficiencies. The efficiencies were set once, so that a
  1.7B step on an H200 matches `docs/performance.md`. Other rows of that page check them (`benchmarks/plan.py`).
- `Bubble`: idle share of a pipeline.
- `AxisTraffic`: bytes that a rank sends over each axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import nn

from meshrl.config.batch_sizes import mesh_axes, shard_axes
from meshrl.engines.megatron.ranks import ranks_of
from meshrl.models.loading import torch_dtype
from meshrl.models.names import expert_count
from meshrl.parallel.context_parallel import kv_copies
from meshrl.parallel.mesh import SEQUENCE_AXES, Layout
from meshrl.parallel.pipeline import bubble, ideal_bubble, replay
from meshrl.telemetry.hardware import Cluster
from meshrl.telemetry.pipeline_timeline import Span
from meshrl.tools.plan.models import Lengths, PlannedModel
from meshrl.tools.plan.roles import FLOAT, Budget, Role


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's data-sheet rates that are reached, and other constants of the time model."""

    products: float = 0.726  # matrix products: 718 of 989 TFLOP/s
    products_8: float = 1.4  # speed-up of FP8 matmuls over 16 bits, quantization included (1.3 to 1.5)
    attention: float = 0.54  # long sequences of equal lengths (cuDNN)
    attention_half: float = 815.0  # the length in tokens at which half of `attention` is reached
    ragged_attention: float = 0.18  # packed rows of unequal lengths (FlashAttention 2)
    memory: float = 0.80  # memory-bound kernels
    sums: float = 0.49  # accumulating gradients, a tensor at a time
    decode: float = 0.56  # a decoding step, by the bytes that it must read
    link: float = 0.75
    host: float = 0.80
    # Matmul speed in Megatron-Core's layers relative to meshrl's own layers.
    megatron: float = 0.95
    # Launches, gaps and unaccounted time, as a factor on all computation.
    gaps: float = 1.08
    # Attention's backward takes this many times its forward.
    attention_backward: float = 2.5
    # Share of the reads and writes between matmuls that remains after a compiler has fused operations.
    fused: float = 0.27
    # Seconds of overhead of every operation, without a compiler.
    operation: float = 4e-6
    # Memory rate of thin matmuls relative to other reads and writes.
    thin: float = 0.6

    def on(self, measured: bool) -> Efficiency:
        """Return the efficiencies to use with data-sheet rates, or relative to rates measured on the device.

        A measured rate of large matmuls counts as 0.8 of the sheet's. Measured link and memory rates count fully.
        """
        if not measured:
            return self
        sheet = 0.8
        return replace(
            self,
            products=self.products / sheet,
            attention=self.attention / sheet,
            ragged_attention=self.ragged_attention / sheet,
            memory=1.0,
            sums=self.sums / 0.8,
            decode=self.decode / 0.8,
            link=1.0,
            host=1.0,
        )


EFFICIENCY = Efficiency()


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward: for a token, a predicted token, and a query-key pair."""

    token: float
    target: float
    pair: float

    def forward(self, tokens: float, targets: float, squares: float) -> tuple[float, float]:
        """Return the operations of matmuls and of attention; `squares` is the sum of the squared lengths."""
        return self.token * tokens + self.target * targets, self.pair * squares / 2


def model_flops(model: PlannedModel) -> Flops:
    """Return a model's operations, from the shapes of all linear layers and of the experts that a token visits.

    The result is cached on the model.
    """
    known: Flops | None = model.notes.get("flops")
    if known is None:
        known = model.notes["flops"] = _count_flops(model)
    return known


def _count_flops(model: PlannedModel) -> Flops:
    config, base = model.config, model.modules.base_model
    experts = expert_count(config)
    visited = config.num_experts_per_tok / experts if experts else 1.0
    weights = 0.0
    for layer in base.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
            elif hasattr(module, "gate_up_proj") and not isinstance(module.gate_up_proj, nn.Module):
                weights += visited * (module.gate_up_proj.numel() + module.down_proj.numel())
    heads, _, dim = model.heads()
    both = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim if model.is_latent else 2 * dim
    return Flops(2.0 * weights, 2.0 * config.vocab_size * config.hidden_size, 2.0 * heads * both * model.num_layers)


@dataclass(frozen=True)
class Work:
    """The amount of work in one pass over samples, in tokens, predicted tokens and squared lengths."""

    tokens: float
    targets: float
    squares: float
    is_ragged: bool = True

    @staticmethod
    def of(lengths: Lengths) -> Work:
        """Return the work of all samples with these lengths."""
        totals = lengths.totals.astype(np.float64)
        ragged = len(set(lengths.totals.tolist())) > 1
        return Work(float(totals.sum()), float(lengths.responses.sum()), float((totals**2).sum()), ragged)

    def shared(self, ranks: float) -> Work:
        """Return one rank's part of the work, if `ranks` ranks share it equally."""
        return Work(self.tokens / ranks, self.targets / ranks, self.squares / ranks, self.is_ragged)


@dataclass(frozen=True)
class Clock:
    """A conversion of work and traffic into seconds on one kind of device."""

    cluster: Cluster
    efficiency: Efficiency = EFFICIENCY

    @cached_property
    def rates(self) -> Efficiency:
        return self.efficiency.on(self.cluster.hardware.measured)

    def compute(self, role: Role, work: Work, trains: bool, budget: Budget) -> float:
        """Return the seconds that one rank needs to compute this work. Logits that are not kept are computed twice."""
        hardware, rates = self.cluster.hardware, self.rates
        flops = model_flops(role.model)
        if role.head != "lm":
            flops = replace(flops, target=0.0)  # one output a token is negligible compared to a vocabulary
        products, attention = flops.forward(work.tokens, work.targets, work.squares)
        again = trains and role.model_config.enable_gradient_checkpointing
        forwards = 1.0 + again
        if trains:
            # Frozen weights have no gradient, so with adapters the backward has one matmul instead of two.
            backward = 1.0 if role.model.lora is not None else 2.0
            product_passes, attention_passes = forwards + backward, forwards + rates.attention_backward
        else:
            product_passes = attention_passes = 1.0
        peak = hardware.flops(8 * role.dtype.itemsize)
        slower = rates.megatron if role.is_megatron else 1.0
        how = rates.ragged_attention
        if not work.is_ragged and work.tokens:
            length = work.squares / work.tokens
            how = rates.attention * length / (length + rates.attention_half)
        operations = product_passes * products
        if trains and not role.keeps_logits(budget.targets):
            operations += flops.target * work.targets
        if role.engine.rounds and role.engine.use_torch_compile:
            # Forwards and input gradients run in FP8. Weight gradients and the head do not.
            in_8_bits = (forwards + trains) * flops.token * work.tokens
            operations -= in_8_bits * (1 - 1 / rates.products_8)
        seconds = operations / (peak * rates.products * slower) + attention_passes * attention / (peak * how)
        return rates.gaps * (seconds + self._between(role, work, trains, budget.count))

    def _between(self, role: Role, work: Work, trains: bool, micro_batches: int) -> float:
        """Return the seconds of memory-bound operations: norms, rotary embeddings, activations and thin matmuls."""
        again = trains and role.model_config.enable_gradient_checkpointing
        moved = role.trace.moves(range(role.model.num_layers), work.tokens, trains, again)
        thin = moved.thin / (self._memory * self.rates.thin)
        if role.engine.use_torch_compile and not role.is_megatron:
            return self.rates.fused * moved.between / self._memory + thin
        return moved.between / self._memory + thin + micro_batches * moved.operations * self.rates.operation

    def optimizer(self, role: Role, stage: int = 0) -> float:
        """Return the seconds of one optimizer step.

        States are read and written. Gradients are read twice, because their norm comes first.
        """
        states = role.states(stage)
        seconds = (2 * states.params + 2 * states.grads + 2 * states.optimizer) / self._memory
        if role.rests[1]:
            seconds += 2 * states.optimizer / (self.cluster.hardware.host_gbs * 1e9 * self.rates.host)
        return seconds

    def accumulate(self, role: Role, micro_batches: int) -> float:
        """Return the seconds of accumulating the gradients of `micro_batches` micro-batches."""
        rate = self.cluster.hardware.memory_gbs * 1e9 * self.rates.sums
        return micro_batches * 2.5 * role.states().grads / rate if role.trains else 0.0

    @property
    def _memory(self) -> float:
        return self.cluster.hardware.memory_gbs * 1e9 * self.rates.memory

    def wire(self, traffic: AxisTraffic) -> float:
        """Return the seconds of traffic on the axis's slowest link, latency included."""
        link = self.cluster.hardware.link(traffic.crosses_nodes) * self.rates.link
        return traffic.sent / link + traffic.calls * self.cluster.hardware.latency_us * 1e-6

    def exposed(self, traffic: Sequence[AxisTraffic], compute: float) -> float:
        """Return the seconds of traffic that `compute` seconds of computation do not hide."""
        beside = sum(self.wire(t) for t in traffic if t.hidden)
        return sum(self.wire(t) for t in traffic if not t.hidden) + max(0.0, beside - compute)


@dataclass(frozen=True)
class Bubble:
    """The idle share of a pipeline: by the formula for equal micro-batches, and replayed with the actual lengths."""

    formula: float
    replayed: float


def pipeline_bubble(role: Role, budget: Budget, works: Sequence[float]) -> Bubble:
    """Return the bubble of one mini-batch; `works` are the forward times of its micro-batches, in any unit."""
    pp, vpp = len(role.stages), len(role.stages[0])
    if pp == 1:
        return Bubble(0.0, 0.0)
    count = max(1, len(works))
    if vpp > 1:
        count = -(-count // pp) * pp
    padded = [*works, *[min(works)] * (count - len(works))]
    spans = [_order(stage, pp, vpp, count) for stage in range(pp)]
    layers = role.model.num_layers

    def work(stage: int, span: Span) -> float:
        share = len(role.stages[stage][span.chunk]) / layers * pp * vpp
        return padded[span.micro_batch] * max(share, 0.05) * (2.0 if span.kind == "backward" else 1.0)

    return Bubble(ideal_bubble(pp, vpp, count), float(bubble(replay(spans, work))))


def _order(stage: int, pp: int, vpp: int, count: int) -> list[Span]:
    """Return the order of a stage's work: a warm-up that fills the pipeline, then one forward, one backward (1F1B)."""
    if vpp == 1:
        forwards = [(0, micro) for micro in range(count)]
        backwards = list(forwards)
        warm = min(count, pp - stage - 1)
    else:
        groups = range(0, count, pp)
        forwards = [(c, m) for g in groups for c in range(vpp) for m in range(g, min(g + pp, count))]
        backwards = [(vpp - 1 - c, m) for c, m in forwards]
        warm = min(len(forwards), 2 * (pp - stage - 1) + (vpp - 1) * pp)
    made = [Span("forward", c, m, 0.0, 0.0) for c, m in forwards[:warm]]
    for number, (chunk, micro) in enumerate(backwards):
        if warm + number < len(forwards):
            made.append(Span("forward", *forwards[warm + number], 0.0, 0.0))
        made.append(Span("backward", chunk, micro, 0.0, 0.0))
    return made


# ---- bytes that a rank sends over each axis of the mesh, from sizes alone
#
# In a ring all-gather or reduce-scatter over n ranks, every rank sends (n - 1) / n of the whole buffer. An all-reduce
# sends twice as much. An all-to-all sends (n - 1) / n of the bytes that a rank holds.


@dataclass(frozen=True)
class AxisTraffic:
    """The bytes that one rank sends along an axis in `calls` calls. `hidden` traffic may overlap with computation."""

    axis: str
    ranks: int
    sent: float
    calls: int
    crosses_nodes: bool
    hidden: bool = False

    def times(self, factor: float) -> AxisTraffic:
        """Return the traffic with bytes and calls multiplied by `factor`."""
        calls = int(self.calls * factor)
        return AxisTraffic(self.axis, self.ranks, self.sent * factor, calls, self.crosses_nodes, self.hidden)


def _ring(size: int) -> float:
    return (size - 1) / size


def pass_traffic(role: Role, tokens: int, trains: bool, cluster: Cluster) -> list[AxisTraffic]:
    """Return one rank's traffic for a micro-batch: the forward, and with `trains` the backward.

    `tokens` are the tokens on this rank.
    """
    found = _megatron_pass(role, tokens, trains) if role.is_megatron else _fsdp_pass(role, tokens, trains)
    return [_placed(traffic, role, cluster) for traffic in found if traffic.ranks > 1 and traffic.sent > 0]


def step_traffic(role: Role, cluster: Cluster) -> list[AxisTraffic]:
    """Return the traffic of one optimizer step that does not recur for every micro-batch."""
    if not role.is_megatron:
        return []  # FSDP reduces gradients after every micro-batch
    ranks = ranks_of(role.engine.megatron, 0, role.world_size)
    states, megatron = role.states(), role.engine.megatron
    size, copies = torch_dtype(megatron.dtype).itemsize, ranks.dp * ranks.cp
    numel = states.grads / FLOAT
    if megatron.use_distributed_optimizer:
        sent, calls = _ring(copies) * numel * (FLOAT + size), 2
    else:
        sent, calls = 2 * _ring(copies) * numel * FLOAT, 1
    traffic = AxisTraffic("dp", copies, sent, calls, False, megatron.overlap_grad_reduce)
    return [_placed(traffic, role, cluster)] if copies > 1 else []


def _fsdp_pass(role: Role, tokens: int, trains: bool) -> list[AxisTraffic]:
    axes = mesh_axes(role.engine, role.world_size)
    config = role.engine.fsdp_config
    found = []
    if role.placement in ("fsdp2", "fsdp"):
        laid = shard_axes(role.engine, role.world_size)
        shards, copies, size = laid["fsdp"], laid["ddp"], role.dtype.itemsize
        reduce_size = torch_dtype(config.mixed_precision.reduce_dtype).itemsize
        whole = sum(unit.padded(shards) for unit in role.units)
        trained = sum(unit.padded(shards, trained_only=True) for unit in role.units)
        gathers = 2 if trains and config.reshard_after_forward else 1
        units = len(role.units)
        found.append(AxisTraffic("fsdp", shards, gathers * _ring(shards) * whole * size, gathers * units, False, True))
        if trains:
            found.append(AxisTraffic("fsdp grads", shards, _ring(shards) * trained * reduce_size, units, False, True))
            sent = 2 * _ring(copies) * trained / shards * reduce_size
            found.append(AxisTraffic("copies", copies, sent, units, False, True))
    return found + _sequence_pass(role, tokens, trains, axes["cp"], axes["sp"])


def _sequence_pass(role: Role, tokens: int, trains: bool, cp: int, sp: int) -> list[AxisTraffic]:
    """Return the traffic of Ulysses and ring attention in all layers.

    With gradient checkpointing the forward runs twice.
    """
    heads, kv_heads, dim = role.model.heads()
    size, layers = role.dtype.itemsize, role.model.num_layers
    forwards = 1 + (trains and role.model_config.enable_gradient_checkpointing)
    kv_heads *= kv_copies(kv_heads, sp)
    exchanged = tokens * dim * (2 * heads + 2 * kv_heads) * size * _ring(sp)
    passes = forwards + trains
    key_values = 2 * tokens * kv_heads // sp * sp * dim
    around = (cp - 1) * size * (forwards + trains) + (cp * FLOAT if trains else 0)
    return [
        AxisTraffic("sp", sp, layers * passes * exchanged, layers * passes * 2, False),
        AxisTraffic("cp", cp, layers * key_values * around, layers * passes * cp, False, True),
    ]


def _megatron_pass(role: Role, tokens: int, trains: bool) -> list[AxisTraffic]:
    ranks = ranks_of(role.engine.megatron, 0, role.world_size)
    config, size = role.model.config, role.dtype.itemsize
    hidden = tokens * int(config.hidden_size) * size
    forwards = 1 + (trains and role.model_config.enable_gradient_checkpointing)
    # The largest stage's layers. Each has two sharded blocks (attention, MLP), gathered before and reduced after.
    layers = max(sum(len(chunk) for chunk in stage) for stage in role.stages)
    regathers = 2 if role.engine.megatron.sequence_parallel else 0
    calls = layers * (4 * forwards + ((4 + regathers) if trains else 0))
    tp = AxisTraffic("tp", ranks.tp, calls * _ring(ranks.tp) * hidden, calls, False)
    shared = ranks.tp if role.engine.megatron.sequence_parallel else 1
    passes = 1 + trains
    pp = AxisTraffic("pp", ranks.pp, passes * ranks.vpp * hidden / shared, passes * ranks.vpp, False)
    found = [tp, pp]
    sparse = role.model.sparse_layers() / role.model.num_layers * layers
    if sparse and ranks.ep > 1:
        rows = hidden / shared * int(config.num_experts_per_tok)
        sent = 2 * sparse * (forwards + trains) * rows * _ring(ranks.ep)
        found.append(AxisTraffic("ep", ranks.ep, sent, int(2 * sparse * (forwards + trains)), False))
    _, kv_heads, dim = role.model.heads()
    key_values = 2 * tokens * max(1, kv_heads // ranks.tp) * dim * size
    around = (ranks.cp - 1) * (forwards + 2 * trains)
    found.append(AxisTraffic("cp", ranks.cp, layers * key_values * around, layers * (forwards + trains), False, True))
    return found


def _placed(traffic: AxisTraffic, role: Role, cluster: Cluster) -> AxisTraffic:
    """Return the traffic with its flag for whether the axis's groups span several machines."""
    if role.is_megatron:
        ranks = ranks_of(role.engine.megatron, 0, role.world_size)
        names = {"dp": ("dp", "cp"), "ep": ("ep",)}.get(traffic.axis, (traffic.axis,))
        layout = ranks.expert_layout if traffic.axis == "ep" else ranks.layout
    elif traffic.axis in SEQUENCE_AXES:
        layout, names = Layout.of(mesh_axes(role.engine, role.world_size)), (traffic.axis,)
    else:
        layout = Layout.of(shard_axes(role.engine, role.world_size))
        names = ("ddp",) if traffic.axis == "copies" else ("fsdp",)
    crosses = any(len({rank // cluster.per_node for rank in group}) > 1 for group in layout.groups(*names))
    return AxisTraffic(traffic.axis, traffic.ranks, traffic.sent, traffic.calls, crosses, traffic.hidden)
