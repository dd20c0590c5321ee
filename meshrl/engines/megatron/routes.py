"""MoE routes through Megatron-Core's routers (see `meshrl.models.moe_routing`): this rank's tokens, this stage's
layers.

A pipeline has several micro-batches in flight. The routes of a micro-batch are set when it enters a chunk, and set
again when its gradient enters. So layers that are recomputed in the backward pass get the routes of their forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from meshrl.engines.megatron.packed_rows import SharedRow
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.models.moe_routing import (
    Choice,
    check_layers,
    choose,
    over_ranks,
    packed_routes,
    tensor_dtype,
    unknown,
    unpacked_routes,
)

# Megatron-Core's own choice of experts, as a function of the scores and the number of experts to choose.
ChooseFunction = Callable[..., tuple[Tensor, Tensor]]


class MegatronRouters:
    """The routers of this rank's chunks, with their routes to replay and their recorded routes."""

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig, ranks: ParallelRanks):
        if config.moe_router_fusion or config.moe_router_load_balancing_type == "sinkhorn":
            raise ValueError(
                "fused and sinkhorn routers do not let their choice be replayed: take moe_router_fusion and "
                "moe_router_load_balancing_type=sinkhorn out of megatron.override_transformer_config, or set "
                "actor.router_replay.mode to disabled"
            )
        if not config.num_moe_experts:
            raise ValueError("this model has no experts: set actor.router_replay.mode to disabled")
        assert isinstance(config.moe_layer_freq, list)
        self.sparse = [layer for layer, has_experts in enumerate(config.moe_layer_freq) if has_experts]
        self.num_experts = config.num_moe_experts
        self.parts, self.part = ranks.tp if config.sequence_parallel else 1, ranks.tp_rank
        self.choice = Choice()
        self.given: Tensor | None = None
        self.made: dict[int, Tensor] | None = None  # by the layer's index among the layers with experts
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    assert module.layer_number is not None
                    module.router_replay = _LayerReplay(self, self.sparse.index(module.layer_number - 1))

    def local(self, column: np.ndarray, row: SharedRow) -> Tensor | None:
        """Return the routes of this rank's tokens of a row, or None if the row has none.

        Shape: `[local tokens, layers, experts per token]`.
        """
        packed = packed_routes(column, row.row)
        if packed is None:
            return None
        check_layers(packed, len(self.sparse))
        mine = row.take(packed.to(row.device), torch.iinfo(packed.dtype).max)
        return mine if self.parts == 1 else mine.chunk(self.parts)[self.part]

    def enter(self, routes: Tensor | None) -> None:
        """Set the routes to replay from now on, when a micro-batch enters a chunk."""
        self.given = routes

    def enter_again_with_gradient(self, output: Tensor, routes: Tensor | None) -> None:
        """Set the same routes again when the gradient of the micro-batch's output arrives."""
        if output.requires_grad:
            output.register_hook(lambda gradient: self.enter(routes))

    def take_made(self) -> dict[int, Tensor]:
        """Return and clear the experts that a chunk's routers chose for the last micro-batch, by layer."""
        assert self.made is not None
        made, self.made = self.made, {}
        return made

    def whole(self, made: dict[int, Tensor], row: SharedRow) -> list[np.ndarray]:
        """Return the routes of a row's samples, from this rank's recorded routes; every rank must call this."""
        layers = sorted(made)
        samples = []
        if layers:
            mine = torch.stack([made[layer] for layer in layers], 1).to(tensor_dtype(self.num_experts))
            samples = unpacked_routes(self._whole_row(mine, row), row.row)
        found = [(layers, samples)]
        if (stages := parallel_state.get_pipeline_model_parallel_world_size()) > 1:
            found = [([], [])] * stages
            dist.all_gather_object(found, (layers, samples), group=parallel_state.get_pipeline_model_parallel_group())
        return self._over_stages(found)

    def _whole_row(self, mine: Tensor, row: SharedRow) -> Tensor:
        if self.parts > 1:
            mine = gathered(mine, parallel_state.get_tensor_model_parallel_group())
        if row.zigzag is not None:
            mine = gathered(mine, parallel_state.get_context_parallel_group())[row.zigzag.order]
        return mine[row.place_of]

    def _over_stages(self, found: Sequence[tuple[list[int], list[np.ndarray]]]) -> list[np.ndarray]:
        some = next(samples for _, samples in found if samples)
        whole = []
        for number, sample in enumerate(some):
            shape = (len(sample), len(self.sparse), sample.shape[2])
            routes = np.full(shape, unknown(sample.dtype), sample.dtype)
            for layers, samples in found:
                if layers:
                    routes[:, layers] = samples[number]
            whole.append(routes)
        return whole


class _LayerReplay:
    """The replay object that one router calls for its top-k.

    It replaces Megatron-Core's own replay, which cannot handle tokens without a route.
    """

    def __init__(self, routers: MegatronRouters, layer: int):
        self.routers, self.layer = routers, layer

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose_itself: ChooseFunction
    ) -> tuple[Tensor, Tensor]:
        values, own = choose_itself(scores, topk, num_groups, group_topk)
        routers = self.routers
        taken = own
        if routers.given is not None:
            values, taken = choose(scores, own, routers.given[:, self.layer], routers.choice)
        if routers.made is not None:
            routers.made[self.layer] = taken.detach()
        return values, taken


def gathered(routes: Tensor, group: Any) -> Tensor:
    """Concatenate the routes of all ranks of a group, in rank order."""

    def gather(values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, values, group=group)
        return torch.cat(parts)

    return over_ranks(routes, gather)
