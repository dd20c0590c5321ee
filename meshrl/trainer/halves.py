"""The two halves of a run: generation without training, and training without generation."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from meshrl.config.errors import ConfigError, told_without_traceback
from meshrl.config.root import PPOConfig
from meshrl.data.proto import DataProto
from meshrl.data.scored import scored_rows
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.batches import batch_files, load_batch
from meshrl.trainer.ppo import PPOTrainer
from meshrl.trainer.run import train

BATCHES = "RUN/batches/step_N.dataproto"
SCORE_DIFFERENCE = "replay/score_difference"


class TrainOnly(PPOTrainer):
    """Trains on batches from files, one a step, and generates nothing."""

    files: Sequence[Path] = ()
    # The step that the first file is of; by default the one after the checkpoint's.
    first_step: int | None = None
    token: tuple[int, int] | None = None
    last: DataProto | None = None

    def fit(self) -> None:
        """A step on each file."""
        self.gates = None  # whoever takes a step again wants to see what happens
        self.sync_weights()
        if self.first_step is not None:
            self.step = self.first_step - 1
        for file in self.files:
            self.step += 1
            self.begin_step()
            batch, metrics = load_batch(file)
            metrics[SCORE_DIFFERENCE] = self.score_difference(batch)
            if self.token is not None and file == self.files[-1]:
                watched = torch.zeros_like(batch.batch["response_mask"])
                watched[self.token] = 1
                batch.batch["watched"] = watched
            self.last = batch
            metrics |= self.train_step(batch)
            metrics |= self.keeper.after_step(self, metrics)
            self.tracker.log(metrics | self.time_metrics(metrics), self.step)
            self.keeper.after_log(self)

    def score_difference(self, batch: DataProto) -> float:
        """By how much rewards computed again differ from those that were kept with the batch."""
        again = copy.copy(batch)
        with self.phase("reward"):
            again.batch["token_level_scores"] = self.reward.score(batch, again=True).token_level
            self.add_model_scores(again, self.begin_model_scores(again))
        kept = batch.batch["response_mask"].any(1)  # samples that were dropped have nothing left to score
        difference = (again.batch["token_level_scores"] - batch.batch["token_level_scores"])[kept]
        return float(difference.abs().max()) if len(difference) else 0.0

    def sync_weights(self) -> dict[str, float]:
        """Nothing generates: the weights only get their number."""
        self.version += 1
        return {}

    def add_advantages(self, batch: DataProto) -> dict[str, float]:
        """As ever; what is known of the batch by now is kept to look at."""
        metrics = super().add_advantages(batch)
        self.last = batch
        return metrics


class RolloutOnly(PPOTrainer):
    """Generates, scores and keeps the batches of every step; the weights stay as they are."""

    def train_step(self, batch: DataProto) -> dict[str, Any]:
        """Nothing but a look at the samples."""
        tensors = batch.batch
        scored = torch.from_numpy(scored_rows(batch))
        self.samples.log_training(batch, self.reward.decode, self.step)
        return {
            "training/global_step": self.step,
            "critic/score/mean": float(tensors["token_level_scores"][scored].sum(1).mean()),
            "response_length/mean": float(tensors["response_mask"].sum(1).float().mean()),
            "perf/total_num_tokens": int(tensors["attention_mask"].sum()),
        }


def rollout_only(config: PPOConfig, sources: Mapping[str, str] | None = None, console: Console | None = None) -> Path:
    """Generates the batches of all steps with the weights there are; returns the folder that has them."""
    config.trainer.save_final_model = False
    config.trainer.save_freq = -1  # a checkpoint would say that these steps were trained

    def make_loop(*parts: Any) -> RolloutOnly:
        loop = RolloutOnly(*parts)
        loop.gates = None
        loop.keeper.saves = False
        loop.keeper.batches.megabytes = None
        return loop

    return RunFiles(train(config, sources, console, make_loop)).batches


def train_only(
    config: PPOConfig, batches: str | Path, sources: Mapping[str, str] | None = None, console: Console | None = None
) -> Path:
    """Takes a step on a kept batch, or one on each of a folder of them; returns the run's folder."""
    path = Path(batches)
    files = list(batch_files(path).values()) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError([f"--train-only: there are no batches at {path}; trainer.keep_batches_megabytes keeps some"])
    with told_without_traceback(f"--train-only needs a batch that a run has kept ({BATCHES})"):
        load_batch(files[0])

    def make_loop(*parts: Any) -> TrainOnly:
        loop = TrainOnly(*parts)
        loop.files = files
        return loop

    return train(config, sources, console, make_loop)
