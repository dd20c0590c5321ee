"""ReMax's baseline: what the policy's likeliest answer to the same prompt is worth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshrl.data.proto import DataProto
from meshrl.rewards.manager import DROPPED, drop_samples

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
    baselines = answers.batch["token_level_scores"].sum(1)
    batch.batch["reward_baselines"] = baselines.repeat_interleave(samples_per_prompt)
    if DROPPED in answers.non_tensor_batch:
        drop_samples(batch, np.repeat(answers.non_tensor_batch[DROPPED].astype(bool), samples_per_prompt))
    return {
        "reward/baseline/mean": float(baselines.mean()),
        "reward/baseline/errors": found.get("reward/errors", 0.0),
    }
