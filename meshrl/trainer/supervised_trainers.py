"""Training loops of supervised runs: SFT on demonstrations, preference learning on pairs, and KTO.

    batch → (reference log-probs) → optimizer step → metrics, with validation on held-out rows every few steps

The workers are in meshrl/workers/supervised_worker.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from meshrl.algorithms import compute_kto_loss, compute_preference_loss
from meshrl.balance import order_for_data_parallel
from meshrl.config.batch_sizes import SupervisedBatchUnits
from meshrl.config.supervised import PreferenceConfig, SupervisedConfig, SupervisedRunConfig
from meshrl.controller import WorkerGroup
from meshrl.data.batch import DataProto
from meshrl.data.sampling import BatchOrder
from meshrl.data.supervised_data import GOOD, OTHER, DemonstrationDataset, JudgedDataset, PairDataset
from meshrl.telemetry.metrics import compute_throughput_metrics
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.telemetry.trackers import Tracker
from meshrl.trainer.run_state import Keeper
from meshrl.trainer.time_accounting import Bookkeeper
from meshrl.workers.supervised_worker import ROWS

Rows = DemonstrationDataset | PairDataset | JudgedDataset


class SFTTrainer:
    """A trainer on demonstrations, with the same engine, packing and balancing as the policy."""

    def __init__(
        self,
        config: SupervisedConfig,
        model: WorkerGroup,
        train_data: Rows,
        order: BatchOrder,
        val_data: Rows | None,
        tracker: Tracker,
        timer: PhaseTimer,
        steps: int,
        keeper: Keeper,
    ):
        self.keeper, self.step = keeper, 0
        self.config, self.model, self.tracker, self.timer, self.steps = config, model, tracker, timer, steps
        self.train_data, self.order, self.val_data = train_data, order, val_data
        self.units = SupervisedBatchUnits.from_config(config)
        self.books: Bookkeeper | None = None  # set if the time of all processes is recorded

    def state_dict(self) -> dict[str, Any]:
        """Return all state besides the workers' that the rest of the run depends on."""
        return {"step": self.step, "data": self.order.state_dict(), **self.keeper.nonfinite.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, so that the run continues from that step."""
        self.step = state["step"]
        self.keeper.nonfinite.load_state_dict(state)
        self.order.load_state_dict(state["data"])

    def fit(self) -> None:
        """Run the training loop from the current step to the last, with validation, checkpoints and logging."""
        for step, rows in zip(range(self.step + 1, self.steps + 1), self.order, strict=False):
            self.step = step
            self.timer.reset()
            batch = self.train_data.batch(rows)
            lengths = batch.batch["attention_mask"].sum(1).numpy()
            together = self.config.sequences_per_row
            batch.reorder(order_for_data_parallel(lengths, self.units.dp_size, group_size=together))
            metrics = self.learn(batch)
            metrics["train/epoch"] = float(self.order.epoch)
            every = self.config.trainer.test_freq
            if self.val_data and every > 0 and (step % every == 0 or step == self.steps):
                with self.timer.phase("testing"):
                    metrics |= self.validate(self.val_data)
            metrics |= self.keeper.after_step(self, metrics)
            times = self.timer.metrics()
            aside = times.get("timing_s/testing", 0.0) + times.get("timing_s/save_checkpoint", 0.0)
            seconds = times["timing_s/step"] - aside
            throughput = compute_throughput_metrics(int(lengths.sum()), seconds, self.config.trainer.world_size)
            end = self.timer.began + times["timing_s/step"]
            booked = self.books.close_step(step, self.timer.began, end) if self.books else {}
            self.tracker.log(metrics | times | throughput | booked, step)
            self.keeper.after_log(self)

    def learn(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step on a batch and return its metrics."""
        with self.timer.phase("train"):
            return self.model.train_batch(batch)[0]

    def validate(self, data: Rows) -> dict[str, float]:
        """Compute the mean negative log-likelihood of the held-out tokens."""
        total = tokens = 0.0
        for batch in self.batches(data):
            answer = self.model.evaluate(batch)
            total -= float(answer.batch["log_likelihood"].sum())
            tokens += float(answer.batch["tokens"].sum())
        return {"val/loss": total / tokens}

    def batches(self, data: Rows) -> Iterator[DataProto]:
        """Yield all rows in their order, one batch at a time."""
        size = self.config.data.train_batch_size
        for start in range(0, len(data), size):
            yield data.batch(np.arange(start, min(start + size, len(data))))


def epochs_in_steps(trainer: SupervisedRunConfig, steps_per_epoch: int) -> None:
    """Set `test_freq` and `save_freq` to the steps of one epoch, if validation or saving is wanted after each epoch."""
    if trainer.test_after_epoch:
        trainer.test_freq = steps_per_epoch
    if trainer.save_after_epoch:
        trainer.save_freq = steps_per_epoch


def total_supervised_steps(config: SupervisedConfig, rows: int) -> int:
    """Return the number of optimizer steps of the run: as configured, or computed from the epochs over the data."""
    per_epoch = rows // config.data.train_batch_size
    return config.trainer.total_training_steps or per_epoch * config.trainer.total_epochs


# Preference learning from pairs of responses: reference log-probs → optimizer step → metrics.


class PreferenceTrainer(SFTTrainer):
    """A trainer on pairs of chosen and rejected responses."""

    config: PreferenceConfig

    def learn(self, batch: DataProto) -> dict[str, float]:
        """Compute the reference's log-probs if the loss has a reference, and take one optimizer step."""
        if self.config.has_reference:
            with self.timer.phase("reference"):
                batch = batch.union(self.model.compute_reference(batch))
        return super().learn(batch)

    def validate(self, data: Rows) -> dict[str, float]:
        """Compute the mean loss of the held-out pairs, the share whose chosen response leads, and the mean margin."""
        scores = torch.cat([self._scores(batch) for batch in self.batches(data)])
        loss = self.config.loss
        losses, margin = compute_preference_loss(loss.name, scores[::2], scores[1::2], **loss.options)
        found = {"loss": losses, "accuracy": (margin > 0).float(), "margin": margin}
        return {f"val/{name}": float(values.mean()) for name, values in found.items()}

    def _scores(self, batch: DataProto) -> torch.Tensor:
        if self.config.has_reference:
            batch = batch.union(self.model.compute_reference(batch))
        return self.model.evaluate(batch).batch["scores"]


# KTO: KL baseline from responses to other prompts → reference log-probs → optimizer step → metrics.


class JudgedTrainer(PreferenceTrainer):
    """A trainer by KTO on single responses that are labelled good or bad."""

    def learn(self, batch: DataProto) -> dict[str, float]:
        """Compute the KL baseline and take one optimizer step."""
        with self.timer.phase("baseline"):
            baseline = self._take_baseline(batch)
        batch.meta_info["baseline"] = baseline
        return super().learn(batch) | {"train/kl": baseline}

    def validate(self, data: Rows) -> dict[str, float]:
        """Compute the mean loss of the held-out responses, the accuracy and the margin.

        Accuracy is the share of responses on the right side of the baseline. The margin is `beta` times the difference
        between the mean scores of good and bad responses.
        """
        losses, leads, scores, good = [], [], [], []
        options = self.config.loss.options
        for batch in self.batches(data):
            baseline = self._take_baseline(batch)
            scores.append(self._scores(batch))
            good.append(batch.batch[GOOD])
            loss, lead = compute_kto_loss(scores[-1], good[-1], baseline, **options)
            losses.append(loss)
            leads.append(lead)
        scored, is_good = torch.cat(scores), torch.cat(good)
        margin = self.config.loss.beta * (_mean(scored[is_good]) - _mean(scored[~is_good]))
        accuracy = float((torch.cat(leads) > 0).float().mean())
        return {"val/loss": float(torch.cat(losses).mean()), "val/accuracy": accuracy, "val/margin": margin}

    def _take_baseline(self, batch: DataProto) -> float:
        """Remove the responses to other prompts from the batch, and return their mean score, or 0 if that is negative.

        The mean score estimates the KL between policy and reference.
        """
        names = [f"{OTHER}{name}" for name in ROWS]
        others = batch.pop(names).rename(names, list(ROWS))
        return max(0.0, float(self._scores(others).mean()))


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
