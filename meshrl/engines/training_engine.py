"""What every training engine offers to the workers, whatever shards the model inside."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.data.batch import DataProto
from meshrl.data.images import IMAGES
from meshrl.engines.state_files import Entry, Snapshot, write_index, write_snapshot
from meshrl.models.loading import named_weights
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.models.vision import Sight, tower_of
from meshrl.telemetry.flops import ModelShape, count_flops
from meshrl.telemetry.time_ledger import current_ledger

logger = logging.getLogger(__name__)

# (model output, micro-batch) -> (loss to back-propagate, metrics). Metrics add up over micro-batches and ranks (see
# meshrl.algorithms.BatchStats), but for those whose name ends in `_max`.
LossFunction = Callable[[dict[str, Tensor], DataProto], tuple[Tensor, dict[str, Tensor]]]

# What a checkpoint may hold: the weights; optimizer states; schedule and random states.
CONTENTS = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class BatchOutput:
    """What a batch gave: reduced metrics, the same on every rank, and per-sample tensors in the batch's own order.

    `tensors` holds what `forward_only` computed (`log_probs`, `entropys`, `values`), on collecting ranks only, and
    `routes` which experts the tokens of each sample went to, where that was asked for.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    routes: np.ndarray | None = None


def rows_together(data: DataProto) -> int:
    """How many neighbouring rows of a batch a loss looks at together, such as the two answers of a pair."""
    return int(data.meta_info.get("rows_together", 1))


class Engine(ABC):
    """A sharded model with its optimizer. Every rank of the group calls every method, in the same order.

    `head`: `lm` for log-probs, `value` for one number a token. Without `optim` the model only answers. With
    `replays_routes` tokens go to the experts that a batch names.
    """

    module: nn.Module
    # The Hugging Face model whose config, class and parameter names this is; its parameters may be without memory.
    hf_model: PreTrainedModel
    has_adapters: bool = False
    sight: Sight | None = None  # how the model takes images, if it does
    _shape: ModelShape | None = None
    _is_measured: bool = False

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None,
        *,
        device: torch.device,
        head: str = "lm",
        total_steps: int = 0,
        seed: int = 0,
        replays_routes: bool = False,
    ):
        self.model_config, self.engine_config, self.optim_config = model, engine, optim
        self.device, self.head, self.total_steps, self.seed = device, head, total_steps, seed
        self.replays_routes = replays_routes
        self.lay_out()

    @abstractmethod
    def lay_out(self) -> None:
        """Finds this rank's place on the axes; nothing is loaded yet."""

    @abstractmethod
    def initialize(self) -> None:
        """Loads, shards and moves the model, and builds the optimizer if there is one."""

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """Which shard of a batch this rank works on."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """Into how many shards a batch is cut."""

    @property
    @abstractmethod
    def is_collect(self) -> bool:
        """Whether this rank answers for its shard; its peers along other axes hold the same answer."""

    @property
    @abstractmethod
    def gradient_ranks(self) -> int:
        """Over how many ranks gradients are averaged: losses are multiplied by it (`BatchStats.dp_size`)."""

    @property
    def is_sharded(self) -> bool:
        """Whether the model is anything but a plain module of this rank."""
        return True

    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside, the model answers without its adapters, as the reference policy."""
        raise ValueError("this model has no adapters to turn off")

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Inside, the model trains (dropout on, gradients recorded)."""
        self._switch(training=True)
        yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside, the model only answers."""
        self._switch(training=False)
        yield

    def _switch(self, *, training: bool) -> None:
        # Walking through all modules takes a millisecond; a rollout may have switched the inner model alone.
        inner = getattr(self, "hf_model", self.module)
        if self.module.training != training or inner.training != training:
            self.module.train(training)

    @abstractmethod
    def forward_backward_batch(
        self, data: DataProto, loss_function: LossFunction | None, forward_only: bool = False
    ) -> BatchOutput:
        """Runs a whole mini-batch, micro-batch by micro-batch, and accumulates the gradient of its loss.

        `forward_only` computes without gradients and gives back the model's outputs; a loss is then optional and only
        measured. `data` holds `input_ids`, `attention_mask` [batch, length] and `response_mask` [batch, columns] over
        the last columns; `data.meta_info` says `temperature`, `calculate_entropy` and how to cut micro-batches
        (`use_dynamic_bsz`, `max_token_len`, `micro_batch_size`; `rows_together` neighbouring rows stay together and
        count as one). A column `routed_experts` (see `meshrl.models.moe_routing`) is replayed; `record_routes` asks a
        `forward_only` pass for one.
        """

    def routes_of(self, data: DataProto) -> np.ndarray | None:
        """The routes that a batch brings, by sample; an engine that would not take them says so."""
        routes = data.non_tensor_batch.get(ROUTED_EXPERTS)
        if routes is not None and not self.replays_routes:
            raise ValueError(f"a batch has {ROUTED_EXPERTS}, but this engine was not built to replay them")
        return routes

    def count_flops(self, data: DataProto, forward_only: bool) -> None:
        """Counts this rank's share of what a batch takes; peers that share its samples take theirs."""
        if current_ledger() is None:
            return
        if not self._is_measured:
            self._is_measured, config = True, self.hf_model.config
            self._shape = ModelShape.of(config, values=self.head == "value")
            if self._shape is None and dist.get_rank() == 0:
                logger.warning(
                    "the operations of model_type '%s' are not counted: perf/tflops/* and mfu/* are left out",
                    config.model_type,
                )
        if self._shape is None:
            return
        targets = data.batch["response_mask"]
        lengths = data.batch["attention_mask"].sum(1)[targets.any(1)].numpy()
        flops = self._shape.forward(lengths, int(targets.sum()))
        if not forward_only:
            # Frozen weights get no gradient, only what they were given does.
            flops *= 2 if self.has_adapters else 3
        if self.sight is not None and self._shape.tower is not None and IMAGES in data.non_tensor_batch:
            tower = tower_of(self.hf_model)
            trains = not forward_only and any(param.requires_grad for param in tower.parameters())
            looks = (2 if self.has_adapters else 3) if trains else 1
            flops += looks * self._shape.tower.forward(self.sight.grids(data.non_tensor_batch[IMAGES]))
        count_flops(flops * self.dp_size / dist.get_world_size())

    def forward(self, data: DataProto) -> dict[str, Tensor]:
        """The model's outputs for a batch, without gradients."""
        return self.forward_backward_batch(data, None, forward_only=True).tensors

    @abstractmethod
    def optimizer_zero_grad(self) -> None: ...

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clips and applies the gradient; returns its norm before clipping. A non-finite gradient is not applied."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Moves the schedule on by one optimizer step; returns the learning rate that the step just taken had."""

    @abstractmethod
    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        """Adds a small tensor of counts over the data-parallel ranks."""

    @abstractmethod
    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Brings this rank's part of model and optimizer to a device, such as the host's memory between phases."""

    @abstractmethod
    def per_tensor_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter whole, under its Hugging Face name, one at a time."""

    @torch.no_grad()
    def copy_weights_from(self, other: Engine) -> None:
        """Takes the weights of an engine of the same kind and layout, rank by rank; nothing travels."""
        pairs = zip(named_weights(self.module).items(), named_weights(other.module).items(), strict=True)
        for (name, mine), (_, theirs) in pairs:
            if mine.shape != theirs.shape:
                raise ValueError(f"cannot copy {name}: it is {tuple(mine.shape)} here and {tuple(theirs.shape)} there")
            mine.copy_(theirs)

    @abstractmethod
    def snapshot(self, contents: Sequence[str] = CONTENTS) -> Snapshot:
        """What this rank has to write of this model's state; all ranks take part."""

    def save_checkpoint(self, folder: Path, contents: Sequence[str] = CONTENTS) -> None:
        """Writes this model's sharded state; all ranks take part and the folder is shared by them."""
        entries: list[list[Entry]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(entries, write_snapshot(self.snapshot(contents), folder, dist.get_rank()).entries)
        if dist.get_rank() == 0:
            write_index(folder, entries)
        dist.barrier()

    @abstractmethod
    def load_checkpoint(self, folder: Path, contents: Sequence[str] = CONTENTS) -> None:
        """Reads back what `save_checkpoint` wrote, also on another layout or by another engine."""
