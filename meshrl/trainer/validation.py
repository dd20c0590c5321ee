"""Accuracy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshrl.agents.agent_rollout import SAMPLE_COLUMNS
from meshrl.config.rl import PPOConfig
from meshrl.controller import WorkerGroup
from meshrl.data.batch import DataProto, columns_of, scored_rows
from meshrl.data.images import IMAGES
from meshrl.data.prompts import PromptDataset
from meshrl.rewards.manager import RewardManager
from meshrl.rollout.base import VALIDATION, sample_seeds
from meshrl.telemetry.metrics import validation_metrics
from meshrl.telemetry.samples import SampleLog
from meshrl.telemetry.time_ledger import booked


class Validator:
    """Answers every held-out prompt `val_kwargs.n` times and scores the answers: mean@n, pass@k for each data source.

    What counts is the `acc` of a reward function that returns one, or else its score; without functions a reward
    model's.
    """

    def __init__(
        self, config: PPOConfig, rollout: WorkerGroup, data: PromptDataset, reward: RewardManager, samples: SampleLog
    ):
        self.config, self.rollout, self.data, self.reward, self.samples = config, rollout, data, reward, samples
        # The trainer puts its own here, which may start lost rollouts again.
        self.with_rollout: Callable[[Callable[[], DataProto]], DataProto] = lambda ask: ask()
        # And here what adds a reward model's scores, where nothing else scores.
        self.add_model_scores: Callable[[DataProto], object] | None = None

    def run(self, step: int) -> dict[str, float]:
        """The metrics of one validation; samples that failed to be scored are counted, and those dropped left out."""
        size, n = self.config.data.val_batch_size or len(self.data), self.config.actor_rollout_ref.rollout.val_kwargs.n
        sources: list[str] = []
        groups: list[int] = []
        scores: list[float] = []
        errors = 0.0
        for start in range(0, len(self.data), size):
            rows = np.arange(start, min(start + size, len(self.data)))
            batch = self.generate(rows, step)
            with booked("reward"):
                token_scores, infos, metrics = self.reward(batch)
            batch.batch["token_level_scores"] = token_scores
            batch.non_tensor_batch.update(infos)
            if self.add_model_scores is not None:
                self.add_model_scores(batch)
                token_scores = batch.batch["token_level_scores"]
            errors += metrics["reward/errors"]
            scored = scored_rows(batch).nonzero()[0]
            sources += list(batch.non_tensor_batch["data_source"][scored])
            groups += np.repeat(rows, n)[scored].tolist()
            found: list[float] = token_scores.sum(1).tolist()
            pairs = [(found[row], infos["acc"][row] if "acc" in infos else None) for row in scored]
            scores += [score if acc is None else acc for score, acc in pairs]
            self.samples.log_validation(batch, self.reward.decode, step)
        return validation_metrics(sources, groups, scores) | {"val-aux/reward_errors": errors}

    def generate(self, rows: np.ndarray, step: int) -> DataProto:
        """Answers to these prompts, sampled as `val_kwargs` says."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        repeated = self.data.batch(rows).repeat(n, interleave=True)
        # The same seeds at every validation: differences between two are the policy's.
        seeds = sample_seeds(self.config.trainer.seed, VALIDATION, 0, len(self.data) * n)
        repeated.batch["seeds"] = seeds[rows[0] * n : (rows[-1] + 1) * n].clone()
        request = repeated.pop(batch_keys=["input_ids", "attention_mask", "seeds"])
        request.meta_info["validate"] = True
        if self.config.actor_rollout_ref.rollout.multi_turn.enable:
            request.non_tensor_batch = {name: repeated.non_tensor_batch[name] for name in SAMPLE_COLUMNS}
        request.non_tensor_batch |= columns_of(repeated, [IMAGES])
        answers = self.with_rollout(lambda: self.rollout.generate_sequences(request))
        return DataProto(answers.batch, {**repeated.non_tensor_batch, **answers.non_tensor_batch}, {})
