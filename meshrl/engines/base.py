"""What every training engine offers to the workers, whatever shards the model inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshrl.data.proto import DataProto

# (model output, micro-batch) -> (loss to back-propagate, metrics). Metrics add up over micro-batches and ranks (see
# meshrl.algorithms.BatchStats), but for those whose name ends in `_max`.
LossFunction = Callable[[dict[str, Tensor], DataProto], tuple[Tensor, dict[str, Tensor]]]


class Engine(ABC):
    """A sharded model with its optimizer. Every rank of the group calls every method, in the same order."""

    module: nn.Module

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

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Inside, the model trains (dropout on, gradients recorded)."""
        self.module.train()
        yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside, the model only answers."""
        self.module.eval()
        yield

    @abstractmethod
    def forward(self, data: DataProto) -> dict[str, Tensor]:
        """Runs the model over a batch without gradients: `log_probs` (and `entropys`) in the batch's own order."""

    @abstractmethod
    def forward_backward_batch(self, data: DataProto, loss_function: LossFunction) -> dict[str, float]:
        """Accumulates the gradient of a whole mini-batch, micro-batch by micro-batch; returns its reduced metrics."""

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
