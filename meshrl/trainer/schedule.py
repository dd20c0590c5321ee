"""How far generation runs ahead of training: the one thing in which synchronous and asynchronous runs differ.

    batches begun:   1 2 │ 3 │ 4 │ ...          batches_ahead = 1: while batch 1 trains, batch 2 is generated
    batches trained:     │ 1 │ 2 │ 3 ...        with the weights that batch 1 is about to change

Batches are trained in the order in which they were begun, whichever answers end first: so every step has the prompts it
has in a synchronous run, long answers are not put off, and a sample is never older than `batches_ahead` versions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from meshrl.config.root import PPOConfig
from meshrl.controller import Future
from meshrl.data.proto import DataProto

# In the prompts' meta_info: the number of their batch, from which the samples' seeds are made.
NUMBER = "number"


@dataclass(frozen=True)
class Schedule:
    """`batches_ahead`: batches begun before the one that is trained; samples older than `max_staleness` are dropped."""

    batches_ahead: int = 0
    max_staleness: int = 0

    @classmethod
    def of(cls, config: PPOConfig) -> Schedule:
        """As the config says."""
        how = config.async_training
        return cls(how.num_ahead, how.max_staleness)

    def drop_stale(self, batch: DataProto, version: int) -> dict[str, float]:
        """Takes samples with a token that is too old out of `response_mask`; how old the batch is."""
        versions, mask = batch.batch["versions"], batch.batch["response_mask"]
        there = mask.bool()
        age = torch.where(there, version - versions, 0)
        oldest, newest = age.amax(1), torch.where(there, age, age.amax(1, keepdim=True)).amin(1)
        dropped = oldest > self.max_staleness
        mask[dropped] = 0
        return {
            "training/staleness_mean": float(age.sum() / there.sum().clamp(min=1)),
            "training/staleness_max": float(age.max()),
            "training/partial_share": float((newest < oldest).float().mean()),
            "training/stale_dropped": float(dropped.sum()),
        }


@dataclass(frozen=True)
class Begun:
    """A batch whose answers are on their way: its prompts, what was asked, and where the data stood after it.

    `columns` are what else is known of the samples. Without `answers` nothing was asked yet. `heard`: of how many
    batches an order that learns had heard by then.
    """

    number: int
    epoch: int
    data: dict[str, Any]
    prompts: DataProto
    request: DataProto
    columns: dict[str, np.ndarray]
    answers: Future[DataProto] | DataProto | None
    begun_at: float = field(default_factory=time.time)
    heard: int = 0

    def finish(self) -> DataProto:
        """Waits for the answers."""
        answers = self.answers.get() if isinstance(self.answers, Future) else self.answers
        assert answers is not None
        return DataProto(answers.batch, {**self.columns, **answers.non_tensor_batch}, answers.meta_info)
