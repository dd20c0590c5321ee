"""Validation: accuracy of the policy on held-out prompts."""

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
    """Validation with `val_kwargs.n` responses to each held-out prompt: mean@n and pass@k for each data source.

    A sample's score is the reward function's `acc` if it returns one, or else its score. Without reward functions it is
    the reward model's score.
    """

    def __init__(
        self, config: PPOConfig, rollout: WorkerGroup, data: PromptDataset, reward: RewardManager, samples: SampleLog
    ):
        self.config, self.rollout, self.data, self.reward, self.samples = config, rollout, data, reward, samples
        # The trainer replaces this by its own method, which may restart dead rollout workers.
        self.with_rollout: Callable[[Callable[[], DataProto]], DataProto] = lambda ask: ask()
        # The trainer sets this if only a reward model scores: a function that adds the model's scores to a batch.
        self.add_model_scores: Callable[[DataProto], object] | None = None

    def run(self, step: int) -> dict[str, float]:
        """Return the metrics of one validation over all held-out prompts.

        Samples that could not be scored are counted in `val-aux/reward_errors`. Dropped samples are left out of the
        scores.
        """
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
        """Generate responses to the prompts in `rows`, sampled as `val_kwargs` says."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        repeated = self.data.batch(rows).repeat(n, interleave=True)
        # The same seeds at every validation, so that differences between two validations come from the policy.
        seeds = sample_seeds(self.config.trainer.seed, VALIDATION, 0, len(self.data) * n)
        repeated.batch["seeds"] = seeds[rows[0] * n : (rows[-1] + 1) * n].clone()
        request = repeated.pop(batch_keys=["input_ids", "attention_mask", "seeds"])
        request.meta_info["validate"] = True
        if self.config.actor_rollout_ref.rollout.multi_turn.enable:
            request.non_tensor_batch = {name: repeated.non_tensor_batch[name] for name in SAMPLE_COLUMNS}
        request.non_tensor_batch |= columns_of(repeated, [IMAGES])
        answers = self.with_rollout(lambda: self.rollout.generate_sequences(request))
        return DataProto(answers.batch, {**repeated.non_tensor_batch, **answers.non_tensor_batch}, {})
