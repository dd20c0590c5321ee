"""Supervised fine-tuning on the same engine as the policy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
from torch import Tensor

from meshrl.algorithms import BatchStats, agg_loss
from meshrl.config.model import ModelConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.controller import Dispatch, nd_dispatch, register
from meshrl.data.proto import DataProto
from meshrl.engines.base import Engine, LossFunction
from meshrl.engines.build import engine_class
from meshrl.models.saving import save_hf_folder
from meshrl.telemetry.ledger import booked
from meshrl.workers.checkpointing import CheckpointedWorker
from meshrl.workers.joining import import_external_lib, join_ranks


class SFTWorker(CheckpointedWorker):
    """One rank of a model that learns demonstrations."""

    head = "lm"

    def __init__(self, config: SupervisedConfig, total_steps: int):
        self.config, self.total_steps = config, total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        trainer = self.config.trainer
        import_external_lib(self.config.model)
        self.device = join_ranks(trainer.device, self.local_rank, trainer.deadlines.collective)
        self.engine = engine_class(self.config.engine)(
            self.config.model,
            self.config.engine,
            self.config.optim,
            device=self.device,
            head=self.head,
            total_steps=self.total_steps,
            seed=trainer.seed,
        )
        self.engine.initialize()
        self.register_mesh("model", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)

    def _checkpointed(self) -> tuple[Engine, ModelConfig]:
        return self.engine, self.config.model

    def _engine_awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    @register(dispatch_mode=nd_dispatch("model", pad=False))
    def train_batch(self, data: DataProto) -> dict[str, float]:
        """One optimizer step on the mean log-likelihood of the tokens to learn."""
        engine = self.engine
        counts = engine.sum_over_data_parallel(data.batch["response_mask"].sum(1).gt(0).sum()[None])
        tokens = engine.sum_over_data_parallel(data.batch["response_mask"].sum()[None])
        stats = BatchStats(engine.gradient_ranks, int(tokens), int(counts))

        def loss_function(output: dict[str, Tensor], micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            mask = micro_batch.batch["response_mask"].to(output["log_probs"].device)
            loss = agg_loss(-output["log_probs"], mask, "token-mean", stats=stats)
            return loss, {"train/loss": loss.detach() / stats.dp_size}

        data.meta_info = self._meta()
        return self._step(data, loss_function)

    def _step(self, data: DataProto, loss_function: LossFunction) -> dict[str, float]:
        """An optimizer step on a batch; what the loss and the step tell."""
        engine = self.engine
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(data, loss_function).metrics
        norm = engine.optimizer_step()
        skipped = float(not np.isfinite(norm))
        lr = engine.lr_scheduler_step()
        return metrics | {"train/grad_norm": norm, "train/skipped_steps": skipped, "train/lr": lr}

    @register(dispatch_mode=nd_dispatch("model"))
    def evaluate(self, data: DataProto) -> DataProto:
        """The log-likelihood and the number of learned tokens of each sequence."""
        data.meta_info = self._meta()
        output = self.engine.forward(data)
        if not output:  # another rank collects
            return DataProto()
        log_probs = output["log_probs"]
        return DataProto.from_dict({"log_likelihood": log_probs.sum(1), "tokens": data.batch["response_mask"].sum(1)})

    def _meta(self) -> dict[str, object]:
        data = self.config.data
        return {
            "temperature": 1.0,
            "use_dynamic_bsz": data.micro_batch_size_per_gpu is None,
            "max_token_len": data.max_token_len_per_gpu,
            "micro_batch_size": data.micro_batch_size_per_gpu,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def save_model(self, folder: str) -> None:
        """Writes the model as a Hugging Face folder: all ranks take part, rank 0 writes."""
        save_hf_folder(folder, self.engine.per_tensor_params(), self.engine.hf_model, writes=self.rank == 0)
