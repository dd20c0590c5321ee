"""Bytes that a rank sends over each axis of the mesh, from sizes alone.

A ring collective over n ranks sends (n - 1) / n of the whole buffer from every rank (all-gather, reduce-scatter), an
all-reduce twice that, an all-to-all (n - 1) / n of what a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.config.layout import mesh_axes, shard_axes
from meshrl.engines.megatron.ranks import ranks_of
from meshrl.models.loading import torch_dtype
from meshrl.parallel.layout import SEQUENCE_AXES, Layout
from meshrl.parallel.ulysses import kv_copies
from meshrl.plan.hardware import Cluster
from meshrl.plan.roles import Role
from meshrl.plan.states import FLOAT


@dataclass(frozen=True)
class AxisTraffic:
    """What one rank sends along an axis, in so many calls; `hidden` may run beside the computation."""

    axis: str
    ranks: int
    sent: float
    calls: int
    crosses_nodes: bool
    hidden: bool = False

    def times(self, factor: float) -> AxisTraffic:
        """The same so many times."""
        calls = int(self.calls * factor)
        return AxisTraffic(self.axis, self.ranks, self.sent * factor, calls, self.crosses_nodes, self.hidden)


def _ring(size: int) -> float:
    return (size - 1) / size


def pass_traffic(role: Role, tokens: int, trains: bool, cluster: Cluster) -> list[AxisTraffic]:
    """One micro-batch forward, and with `trains` backward, on one rank; `tokens` are its own."""
    found = _megatron_pass(role, tokens, trains) if role.is_megatron else _fsdp_pass(role, tokens, trains)
    return [_placed(traffic, role, cluster) for traffic in found if traffic.ranks > 1 and traffic.sent > 0]


def step_traffic(role: Role, cluster: Cluster) -> list[AxisTraffic]:
    """One optimizer step: what is not done for every micro-batch."""
    if not role.is_megatron:
        return []  # FSDP reduces after every micro-batch
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
    """Ulysses and ring attention of all layers; with checkpointing the forward runs twice."""
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
    # A stage's share of the layers; two cut products (attention, MLP) in each, gathered before and reduced behind.
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
    """With whether the axis's groups reach over several machines."""
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
