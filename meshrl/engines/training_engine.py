"""The interface of a training engine: a sharded model with its optimizer, whatever shards the model."""

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

# (model output, micro-batch) -> (loss to back-propagate, metrics). Metrics are added over micro-batches and ranks (see
# meshrl.algorithms.BatchStats), except metrics whose name ends in `_max`.
LossFunction = Callable[[dict[str, Tensor], DataProto], tuple[Tensor, dict[str, Tensor]]]

# The possible contents of a checkpoint: the weights; optimizer states; schedule and random states.
CONTENTS = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class BatchOutput:
    """The result of a batch: reduced metrics, equal on every rank, and per-sample tensors in batch order.

    `tensors` holds the outputs of a `forward_only` pass (`log_probs`, `entropys`, `values`), on collecting ranks only.
    `routes` holds the experts that the tokens of each sample were routed to, if `record_routes` was set.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    routes: np.ndarray | None = None


def rows_together(data: DataProto) -> int:
    """Return how many neighbouring rows of a batch the loss needs together, such as the two responses of a pair."""
    return int(data.meta_info.get("rows_together", 1))


class Engine(ABC):
    """A sharded model with its optimizer. Every rank of the group must call every method, in the same order.

    `head`: `lm` for log-probs, `value` for one number per token. Without `optim` the model only runs forward. With
    `replays_routes`, tokens are routed to the experts that a batch names.
    """

    module: nn.Module
    # The Hugging Face model that gives config, class and parameter names; its parameters may be on the meta device.
    hf_model: PreTrainedModel
    has_adapters: bool = False
    sight: Sight | None = None  # the image side of a VLM
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
        """Compute this rank's position on the parallel axes, before any weights are loaded."""

    @abstractmethod
    def initialize(self) -> None:
        """Load, shard and move the model, and build the optimizer if there is one."""

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """The index of the batch shard that this rank works on."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """The number of shards that a batch is cut into."""

    @property
    @abstractmethod
    def is_collect(self) -> bool:
        """True if this rank returns the outputs of its shard; its peers along other axes would return the same."""

    @property
    @abstractmethod
    def gradient_ranks(self) -> int:
        """The number of ranks over which gradients are averaged; losses are multiplied by it (`BatchStats.dp_size`)."""

    @property
    def is_sharded(self) -> bool:
        """True if the model is anything other than a plain module on this rank."""
        return True

    def adapters_off(self) -> AbstractContextManager[None]:
        """Return a context manager that disables the adapters, so that the model acts as the reference policy."""
        raise ValueError("this model has no adapters to turn off")

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Put the model into training mode (dropout on) for the duration of the context."""
        self._switch(training=True)
        yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Put the model into evaluation mode for the duration of the context."""
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
        """Run a whole mini-batch, micro-batch by micro-batch, and accumulate the gradient of its loss.

        With `forward_only`, compute without gradients and return the model's outputs. A loss is then optional and only
        measured. A column `routed_experts` (see `meshrl.models.moe_routing`) is replayed.

        `data` holds `input_ids`, `attention_mask` `[batch, length]` and `response_mask` `[batch, columns]` over the
        last columns.

        `data.meta_info` holds `temperature`, `calculate_entropy`, and how to cut micro-batches: `use_dynamic_bsz`,
        `max_token_len`, `micro_batch_size`, `rows_together` (so many neighbouring rows stay together and count as one).
        With `record_routes`, a `forward_only` pass also returns the routes.
        """

    def routes_of(self, data: DataProto) -> np.ndarray | None:
        """Return the routes of a batch by sample, if it has any.

        Raise a `ValueError` if there are routes but the engine was not built to replay them.
        """
        routes = data.non_tensor_batch.get(ROUTED_EXPERTS)
        if routes is not None and not self.replays_routes:
            raise ValueError(f"a batch has {ROUTED_EXPERTS}, but this engine was not built to replay them")
        return routes

    def count_flops(self, data: DataProto, forward_only: bool) -> None:
        """Count this rank's share of a batch's operations; peers that share its samples count their own share."""
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
            # Frozen weights get no gradient; only their inputs do.
            flops *= 2 if self.has_adapters else 3
        if self.sight is not None and self._shape.tower is not None and IMAGES in data.non_tensor_batch:
            tower = tower_of(self.hf_model)
            trains = not forward_only and any(param.requires_grad for param in tower.parameters())
            looks = (2 if self.has_adapters else 3) if trains else 1
            flops += looks * self._shape.tower.forward(self.sight.grids(data.non_tensor_batch[IMAGES]))
        count_flops(flops * self.dp_size / dist.get_world_size())

    def forward(self, data: DataProto) -> dict[str, Tensor]:
        """Return the model's outputs for a batch, computed without gradients."""
        return self.forward_backward_batch(data, None, forward_only=True).tensors

    @abstractmethod
    def optimizer_zero_grad(self) -> None: ...

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and apply the gradient; return its norm before clipping. A non-finite gradient is not applied."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step and return the learning rate of the step just taken."""

    @abstractmethod
    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        """Add a small tensor of counts over the data-parallel ranks."""

    @abstractmethod
    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move this rank's part of model and optimizer to a device, such as to host memory between phases."""

    @abstractmethod
    def per_tensor_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole, one at a time, under its Hugging Face name."""

    @torch.no_grad()
    def copy_weights_from(self, other: Engine) -> None:
        """Copy the weights of an engine of the same kind and layout, rank by rank, without communication."""
        pairs = zip(named_weights(self.module).items(), named_weights(other.module).items(), strict=True)
        for (name, mine), (_, theirs) in pairs:
            if mine.shape != theirs.shape:
                raise ValueError(f"cannot copy {name}: it is {tuple(mine.shape)} here and {tuple(theirs.shape)} there")
            mine.copy_(theirs)

    @abstractmethod
    def snapshot(self, contents: Sequence[str] = CONTENTS) -> Snapshot:
        """Return the part of this model's state that this rank has to write; all ranks must take part."""

    def save_checkpoint(self, folder: Path, contents: Sequence[str] = CONTENTS) -> None:
        """Write this model's sharded state into a folder that all ranks share; all ranks must take part."""
        entries: list[list[Entry]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(entries, write_snapshot(self.snapshot(contents), folder, dist.get_rank()).entries)
        if dist.get_rank() == 0:
            write_index(folder, entries)
        dist.barrier()

    @abstractmethod
    def load_checkpoint(self, folder: Path, contents: Sequence[str] = CONTENTS) -> None:
        """Load what `save_checkpoint` wrote, also on another layout or in another engine."""
