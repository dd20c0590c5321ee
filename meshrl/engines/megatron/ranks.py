"""The position of a rank in a Megatron layout, as plain numbers, without a process group.

Megatron numbers ranks with tp fastest, then cp, dp and pp. Inside each pipeline stage, the same ranks have a second
layout for the experts: etp fastest, then ep, then the experts' own data parallelism (edp).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshrl.config.engine import MegatronConfig
from meshrl.parallel.mesh import Layout
from meshrl.parallel.pipeline import PipelineSplit, layer_offsets


@dataclass(frozen=True)
class ParallelRanks:
    """The sizes of all axes, and this rank's index on each axis. An `etp` of 0 means `tp`."""

    rank: int = 0
    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    split: PipelineSplit = field(default_factory=PipelineSplit)

    def __post_init__(self) -> None:
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        for name in ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"axis {name} must have at least one rank, got {getattr(self, name)}")
        if self.world_size % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"n_gpus ({self.world_size}) must be divisible by tensor_model_parallel_size * "
                f"pipeline_model_parallel_size * context_parallel_size "
                f"({self.tp} * {self.pp} * {self.cp} = {self.tp * self.pp * self.cp})"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"n_gpus ({self.world_size}) must be divisible by expert_tensor_parallel_size * "
                f"expert_model_parallel_size * pipeline_model_parallel_size "
                f"({self.etp} * {self.ep} * {self.pp} = {self.etp * self.ep * self.pp})"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")

    @property
    def dp(self) -> int:
        """The number of data-parallel copies of all weights except the experts."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """The number of data-parallel copies of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @cached_property
    def layout(self) -> Layout:
        """The layout of all ranks by pp, dp, cp and tp."""
        return Layout.of({"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp})

    @cached_property
    def expert_layout(self) -> Layout:
        """The layout of the same ranks for the experts: pp, edp, ep and etp."""
        return Layout.of({"pp": self.pp, "edp": self.edp, "ep": self.ep, "etp": self.etp})

    @property
    def tp_rank(self) -> int:
        return self.layout.index(self.rank, "tp")

    @property
    def cp_rank(self) -> int:
        return self.layout.index(self.rank, "cp")

    @property
    def dp_rank(self) -> int:
        return self.layout.index(self.rank, "dp")

    @property
    def pp_rank(self) -> int:
        return self.layout.index(self.rank, "pp")

    @property
    def ep_rank(self) -> int:
        return self.expert_layout.index(self.rank, "ep")

    @property
    def etp_rank(self) -> int:
        return self.expert_layout.index(self.rank, "etp")

    @property
    def edp_rank(self) -> int:
        return self.expert_layout.index(self.rank, "edp")

    @property
    def is_collect(self) -> bool:
        """True if this rank returns the outputs of its batch shard: the last stage's first tp and cp rank."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp - 1

    def at(self, rank: int) -> ParallelRanks:
        """Return the same layout as seen from another rank."""
        return replace(self, rank=rank)

    def layers(self, num_layers: int, chunk: int) -> range:
        """Return the global layers that this rank's chunk holds."""
        return layer_offsets(num_layers, self.pp, self.vpp, self.split)[self.pp_rank][chunk]

    def has_embedding(self, chunk: int) -> bool:
        return self.pp_rank == 0 and chunk == 0

    def has_output(self, chunk: int) -> bool:
        return self.pp_rank == self.pp - 1 and chunk == self.vpp - 1


def pipeline_split(override: dict[str, Any]) -> PipelineSplit:
    """Return the division of layers among stages that `override_transformer_config` sets."""
    layout = override.get("pipeline_model_parallel_layout")
    return PipelineSplit(
        first=override.get("num_layers_in_first_pipeline_stage"),
        last=override.get("num_layers_in_last_pipeline_stage"),
        embedding=bool(override.get("account_for_embedding_in_pipeline_split", False)),
        loss=bool(override.get("account_for_loss_in_pipeline_split", False)),
        layout=layout if layout is None or isinstance(layout, str) else tuple(tuple(chunk) for chunk in layout),
    )


def ranks_of(config: MegatronConfig, rank: int, world_size: int) -> ParallelRanks:
    """Return this rank's index on every axis of the configured layout."""
    return ParallelRanks(
        rank=rank,
        world_size=world_size,
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        cp=config.context_parallel_size,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size or 0,
        split=pipeline_split(config.override_transformer_config),
    )


def uses_sequence_parallel(config: MegatronConfig) -> bool:
    """Return whether sequence parallelism is on; with one tensor-parallel rank it never is."""
    return config.sequence_parallel and config.tensor_model_parallel_size > 1
