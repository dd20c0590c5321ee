"""ReMax's baseline: what the policy's likeliest answer to the same prompt is worth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meshrl.data.proto import DataProto
from meshrl.data.scored import scored_rows
from meshrl.rewards.manager import drop_samples

GREEDY = "greedy"


def add_greedy_baselines(
    batch: DataProto,
    prompts: DataProto,
    samples_per_prompt: int,
    generate: Callable[[DataProto], DataProto],
    score: Callable[[DataProto], dict[str, float]],
) -> dict[str, float]:
    """Adds `reward_baselines` [samples]; a prompt whose greedy answer cannot be scored is dropped with its samples.

    `generate` answers every prompt once, and greedily where `meta_info["greedy"]` says so.
    """
    asked = DataProto(prompts.batch, dict(prompts.non_tensor_batch), {**prompts.meta_info, GREEDY: True})
    answers = generate(asked)
    found = score(answers)
    baselines, scored = answers.batch["token_level_scores"].sum(1), scored_rows(answers)
    batch.batch["reward_baselines"] = baselines.repeat_interleave(samples_per_prompt)
    drop_samples(batch, np.repeat(~scored, samples_per_prompt))
    metrics = {"reward/baseline/errors": found.get("reward/errors", 0.0)}
    if scored.any():
        metrics["reward/baseline/mean"] = float(baselines[torch.from_numpy(scored)].mean())
    return metrics
