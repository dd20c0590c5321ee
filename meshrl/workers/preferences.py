"""Learning which of two answers is better, on the same engine as the policy: a policy by itself, or a reward model."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from meshrl.algorithms import BatchStats, agg_loss, compute_answer_scores, compute_preference_loss
from meshrl.config.preferences import PreferenceConfig
from meshrl.controller import Dispatch, nd_dispatch, register
from meshrl.data.proto import DataProto
from meshrl.engines.base import Engine
from meshrl.engines.build import engine_class
from meshrl.telemetry.ledger import booked
from meshrl.workers.resting import awake, send_to_rest
from meshrl.workers.reward_model import with_end
from meshrl.workers.sft import SFTWorker

ROWS = ("input_ids", "attention_mask", "response_mask")
# The column of the reference's log-probs of whole answers.
REFERENCE = "reference_log_probs"


class PreferenceWorker(SFTWorker):
    """One rank of a model that learns pairs. A batch has their chosen and rejected answers by turns."""

    config: PreferenceConfig

    def __init__(self, config: PreferenceConfig, total_steps: int):
        super().__init__(config, total_steps)
        self.head = "value" if config.trains_scores else "lm"
        self.reference: Engine | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine, and one that only answers where the reference is another model."""
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
        """What the reference thinks of each answer: its log-prob."""
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
        """One optimizer step on the mean loss of the pairs."""
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
        """How much the model likes each answer (`scores`)."""
        request = self._request(data)
        output = self.engine.forward(request)
        if not output:  # another rank collects
            return DataProto()
        if REFERENCE in data.batch:
            request.batch[REFERENCE] = data.batch[REFERENCE]
        return DataProto.from_dict({"scores": self._scores(output, request)})

    def _request(self, data: DataProto) -> DataProto:
        """What an engine needs of answers; a reward model's number for an answer is that of what would follow it."""
        rows = data.select(list(ROWS), [])
        rows = with_end(rows) if self.config.trains_scores else rows
        rows.meta_info = self._meta()
        return rows

    def _scores(self, output: dict[str, Tensor], rows: DataProto) -> Tensor:
        """How much the model likes each answer, in the loss's own terms."""
        if self.config.trains_scores:
            return output["values"][:, 0].float()
        log_probs = output["log_probs"]
        mask = rows.batch["response_mask"].to(log_probs.device)
        reference = rows.batch[REFERENCE].to(log_probs.device) if REFERENCE in rows.batch else None
        return compute_answer_scores(self.config.loss.name, (log_probs * mask).sum(1), mask.sum(1), reference)
