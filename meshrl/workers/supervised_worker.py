"""Workers of supervised fine-tuning, on the same engine as the policy.

    SFTWorker          learns demonstrations
    PreferenceWorker   learns pairs of responses: a policy (DPO and its variants) or a reward model
    JudgedWorker       learns single responses that are labelled good or bad (KTO)

The workers' training loops are in meshrl/trainer/supervised_trainers.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from meshrl.algorithms import BatchStats, agg_loss, compute_answer_scores, compute_kto_loss, compute_preference_loss
from meshrl.config.engine import ModelConfig
from meshrl.config.supervised import PreferenceConfig, SupervisedConfig
from meshrl.controller import Dispatch, nd_dispatch, register
from meshrl.data.batch import DataProto
from meshrl.data.supervised_data import GOOD
from meshrl.engines.engine_class import engine_class
from meshrl.engines.training_engine import Engine, LossFunction
from meshrl.models.saving import save_hf_folder
from meshrl.telemetry.time_ledger import booked
from meshrl.workers.checkpointing import CheckpointedWorker
from meshrl.workers.scoring import with_end
from meshrl.workers.setup import awake, import_external_lib, join_ranks, send_to_rest


class SFTWorker(CheckpointedWorker):
    """One rank of a model that is fine-tuned on demonstrations."""

    head = "lm"

    def __init__(self, config: SupervisedConfig, total_steps: int):
        self.config, self.total_steps = config, total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the training engine and register its data-parallel mesh as `model`."""
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
        """Take one optimizer step on the mean log-likelihood of the tokens to learn."""
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
        """Take one optimizer step on a batch; return the metrics of the loss and of the step."""
        engine = self.engine
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(data, loss_function).metrics
        norm = engine.optimizer_step()
        skipped = float(not np.isfinite(norm))
        lr = engine.lr_scheduler_step()
        return metrics | {"train/grad_norm": norm, "train/skipped_steps": skipped, "train/lr": lr}

    @register(dispatch_mode=nd_dispatch("model"))
    def evaluate(self, data: DataProto) -> DataProto:
        """Compute the log-likelihood and the number of learned tokens of each sequence, both `[B]`."""
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
        """Write the model as a Hugging Face folder: all ranks take part, rank 0 writes."""
        save_hf_folder(folder, self.engine.per_tensor_params(), self.engine.hf_model, writes=self.rank == 0)


# Preference learning from pairs of responses: a policy (DPO and its variants) or a reward model.

ROWS = ("input_ids", "attention_mask", "response_mask")
# The column of the reference's log-probs of whole responses.
REFERENCE = "reference_log_probs"


class PreferenceWorker(SFTWorker):
    """One rank of a model that learns pairs. The rows of a batch alternate between chosen and rejected responses."""

    config: PreferenceConfig

    def __init__(self, config: PreferenceConfig, total_steps: int):
        super().__init__(config, total_steps)
        self.head = "value" if config.trains_scores else "lm"
        self.reference: Engine | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the training engine, and a frozen engine if the reference is another model."""
        super().init_model()
        config = self.config
        path = config.reference.path
        if not config.has_second_model:
            return
        model = replace(config.model, lora_rank=0, lora_adapter_path=None)
        model = model if path is None else replace(model, path=path, random_init=False)
        self.reference = engine_class(config.engine)(model, config.engine, None, device=self.device)
        self.reference.initialize()
        send_to_rest(self.reference, config.reference.param_offload, False)

    @register(dispatch_mode=nd_dispatch("model"))
    @booked("ref")
    def compute_reference(self, data: DataProto) -> DataProto:
        """Compute the reference's log-prob of each response, `[B]`."""
        request = self._request(data)
        if self.reference is None:
            with self.engine.adapters_off():
                output = self.engine.forward(request)
        else:
            with awake(self.reference, self.device, model=self.config.reference.param_offload, optimizer=False):
                output = self.reference.forward(request)
        return DataProto.from_dict({REFERENCE: output["log_probs"].sum(1)} if output else {})

    @register(dispatch_mode=nd_dispatch("model", pad=False))
    def train_batch(self, data: DataProto) -> dict[str, float]:
        """Take one optimizer step on the mean loss of the pairs."""
        engine, config = self.engine, self.config.loss
        chosen = data.batch["response_mask"][::2]
        pairs, tokens = (int(engine.sum_over_data_parallel(n[None])) for n in (chosen.any(1).sum(), chosen.sum()))
        stats = BatchStats(engine.gradient_ranks, tokens, pairs)

        def loss_function(output: dict[str, Tensor], micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            scores = self._scores(output, micro_batch)
            better, worse = scores[::2], scores[1::2]
            losses, margin = compute_preference_loss(config.name, better, worse, **config.options)
            loss = losses.sum() / pairs
            metrics = {"train/accuracy": (margin > 0).sum() / pairs, "train/margin": margin.sum() / pairs}
            metrics |= {"train/chosen_score": better.sum() / pairs, "train/rejected_score": worse.sum() / pairs}
            if config.likelihood_weight:
                mask = micro_batch.batch["response_mask"].to(scores.device)[::2]
                likelihood = agg_loss(-output["log_probs"][::2], mask, "token-mean", stats=stats) / stats.dp_size
                metrics["train/sft_loss"] = likelihood
                loss = loss + config.likelihood_weight * likelihood
            metrics["train/loss"] = loss
            return loss * stats.dp_size, {name: value.detach() for name, value in metrics.items()}

        request = self._request(data)
        if REFERENCE in data.batch:
            request.batch[REFERENCE] = data.batch[REFERENCE]
        request.meta_info["rows_together"] = 2
        return self._step(request, loss_function)

    @register(dispatch_mode=nd_dispatch("model"))
    def evaluate(self, data: DataProto) -> DataProto:
        """Compute the `scores` `[B]` of the responses, in the terms of the loss."""
        request = self._request(data)
        output = self.engine.forward(request)
        if not output:  # another rank collects
            return DataProto()
        if REFERENCE in data.batch:
            request.batch[REFERENCE] = data.batch[REFERENCE]
        return DataProto.from_dict({"scores": self._scores(output, request)})

    def _request(self, data: DataProto) -> DataProto:
        """Return the columns and settings that an engine needs.

        A reward model reads its score of a response on an appended token, see `with_end`.
        """
        rows = data.select(list(ROWS), [])
        rows = with_end(rows) if self.config.trains_scores else rows
        rows.meta_info = self._meta()
        return rows

    def _scores(self, output: dict[str, Tensor], rows: DataProto) -> Tensor:
        """Return the score of each response `[B]`, in the terms of the loss.

        The score is a reward model's value, or computed from the log-probs of policy and reference.
        """
        if self.config.trains_scores:
            return output["values"][:, 0].float()
        log_probs = output["log_probs"]
        mask = rows.batch["response_mask"].to(log_probs.device)
        reference = rows.batch[REFERENCE].to(log_probs.device) if REFERENCE in rows.batch else None
        return compute_answer_scores(self.config.loss.name, (log_probs * mask).sum(1), mask.sum(1), reference)


# KTO: learning from single responses that are labelled good or bad.


class JudgedWorker(PreferenceWorker):
    """One rank of a policy that learns by KTO from responses labelled good or bad."""

    @register(dispatch_mode=nd_dispatch("model", pad=False))
    def train_batch(self, data: DataProto) -> dict[str, float]:
        """Take one optimizer step on the mean loss of the responses; `meta_info` has the KL baseline."""
        engine, config, baseline = self.engine, self.config.loss, float(data.meta_info["baseline"])
        counts = torch.stack([data.batch[GOOD].sum(), (~data.batch[GOOD]).sum()])
        all_good, all_bad = (int(n) for n in engine.sum_over_data_parallel(counts))
        answers = all_good + all_bad

        def loss_function(output: dict[str, Tensor], micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            scores = self._scores(output, micro_batch)
            good = micro_batch.batch[GOOD].to(scores.device)
            losses, lead = compute_kto_loss(scores, good, baseline, **config.options)
            loss = losses.sum() / answers
            better, worse = (scores * good).sum() / max(1, all_good), (scores * ~good).sum() / max(1, all_bad)
            metrics = {
                "train/loss": loss,
                "train/accuracy": (lead > 0).sum() / answers,
                "train/margin": config.beta * (better - worse),
                "train/chosen_score": better,
                "train/rejected_score": worse,
            }
            return loss * engine.gradient_ranks, {name: value.detach() for name, value in metrics.items()}

        request = self._request(data)
        request.batch[REFERENCE], request.batch[GOOD] = data.batch[REFERENCE], data.batch[GOOD]
        return self._step(request, loss_function)
