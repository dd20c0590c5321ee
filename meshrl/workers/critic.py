"""The critic of PPO: values of the states before each response token, and their regression towards the returns."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from meshrl.algorithms import BatchStats, agg_loss, compute_value_loss
from meshrl.config.critic import CriticConfig
from meshrl.config.model import ModelConfig
from meshrl.controller import Dispatch, nd_dispatch, register
from meshrl.data.proto import DataProto
from meshrl.engines.base import Engine, LossFunction
from meshrl.engines.build import engine_class
from meshrl.telemetry.ledger import booked
from meshrl.telemetry.memory import MemoryLog, PeakMemory
from meshrl.telemetry.metrics import count_steps, reduce_metrics
from meshrl.workers.checkpointing import CheckpointedWorker
from meshrl.workers.joining import import_external_lib, join_ranks
from meshrl.workers.resting import awake, rests, send_to_rest
from meshrl.workers.settings import WorkerSettings


class CriticWorker(CheckpointedWorker):
    """One rank of the critic. Batches are split over the data-parallel ranks of the mesh `critic`."""

    def __init__(self, config: CriticConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        self.engine = engine_class(self.config)(
            self.config.model,
            self.config,
            self.config.optim,
            device=self.device,
            head="value",
            total_steps=self.settings.total_optimizer_steps,
            seed=self.settings.seed,
        )
        self.engine.initialize()
        self.register_mesh("critic", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)
        send_to_rest(self.engine, *rests(self.config))

    def _checkpointed(self) -> tuple[Engine, ModelConfig]:
        return self.engine, self.config.model

    def _engine_awake(self) -> AbstractContextManager[None]:
        model, optimizer = rests(self.config)
        return awake(self.engine, self.device, model=model, optimizer=optimizer)

    @register(dispatch_mode=nd_dispatch("critic"))
    @booked("value")
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` [batch, response]: what the critic expects of each state before a response token."""
        request = data.select(["input_ids", "attention_mask", "response_mask"], [])
        request.meta_info = self._meta()
        resting = awake(self.engine, self.device, model=rests(self.config)[0], optimizer=False)
        with MemoryLog("values", self.device), resting:
            return DataProto.from_dict(self.engine.forward(request))

    @register(dispatch_mode=nd_dispatch("critic", pad=False))
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """One update: epochs → mini-batches → micro-batches. Returns its metrics, the same on every rank."""
        collected: dict[str, list[float]] = {}
        mini_batches = data.chunk(self.settings.mini_batches)
        memory = PeakMemory(self.device)
        model, optimizer = rests(self.config)
        with awake(self.engine, self.device, model=model, optimizer=optimizer):
            for _ in range(self.config.ppo_epochs or 1):
                for mini_batch in mini_batches:
                    for name, value in self._update_on(mini_batch).items():
                        collected.setdefault(name, []).append(value)
            self.engine.optimizer_zero_grad()
        counts = count_steps("critic", collected)
        return reduce_metrics(collected) | counts | memory.metrics("update_critic")

    def _update_on(self, data: DataProto) -> dict[str, float]:
        """One optimizer step on this rank's part of a mini-batch."""
        engine = self.engine
        mask = data.batch["response_mask"]
        tokens, sequences = engine.sum_over_data_parallel(torch.stack([mask.sum(), mask.any(1).sum()])).tolist()
        # A mini-batch may have lost all its samples: its loss is 0 then.
        stats = BatchStats(engine.gradient_ranks, max(1, tokens), max(1, sequences), float(mask.shape[1]))
        data.meta_info = self._meta()
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(data, make_value_loss(self.config, stats)).metrics
        norm = engine.optimizer_step()
        return metrics | {
            "critic/grad_norm": norm,
            "critic/skipped_steps": float(not np.isfinite(norm)),
            "critic/lr": engine.lr_scheduler_step(),
        }

    def _meta(self) -> dict[str, object]:
        return {
            "use_dynamic_bsz": self.config.use_dynamic_bsz,
            "max_token_len": self.config.ppo_max_token_len_per_gpu,
            "micro_batch_size": self.config.ppo_micro_batch_size_per_gpu,
        }


def make_value_loss(config: CriticConfig, stats: BatchStats) -> LossFunction:
    """The clipped regression of one mini-batch, which has `stats` over all ranks."""
    mode = config.loss_agg_mode or "token-mean"
    watched = BatchStats(dp_size=1, num_tokens=stats.num_tokens, num_sequences=stats.num_sequences)

    def loss_function(output: dict[str, Tensor], data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        batch = data.to(output["values"].device).batch
        mask = batch["response_mask"]
        loss, clipped = compute_value_loss(
            output["values"], batch["returns"], batch["values"], mask, config.cliprange_value, mode, stats=stats
        )
        mean = agg_loss(output["values"].detach(), mask, "token-mean", stats=watched)
        metrics = {
            "critic/vf_loss": loss.detach() / stats.dp_size,
            "critic/vf_clipfrac": clipped,
            "critic/vpred_mean": mean,
        }
        return loss, metrics

    return loss_function
