"""Scoring beside generation: a sample's reward is computed while others are still being generated."""

from __future__ import annotations

import time

import numpy as np

from meshrl.controller import WorkerGroup
from meshrl.controller.dispatch import check_mesh
from meshrl.data.proto import DataProto
from meshrl.rewards.manager import RewardManager
from meshrl.rewards.parts import ScoredParts

# How long a worker waits for a first sample before it says that there is none yet.
POLL_SECONDS = 0.1


def generate_beside_scoring(
    actor: WorkerGroup, request: DataProto, columns: dict[str, np.ndarray], reward: RewardManager, deadline: float
) -> tuple[DataProto, ScoredParts, dict[str, float]]:
    """Answers to a request, with `columns` of its rows, and their scores on the way: collect them with `add_scores`.

    Both are what generating and then scoring gives. `deadline` is for the generation, in seconds.
    """
    until = time.monotonic() + deadline
    actor.start_generation(request)
    # Every rollout has as many rows, but for the last ones; one rank of it answers.
    num_rollouts, answering = check_mesh("rollout", actor.mesh_entries("rollout"))
    share = -(-len(request) // num_rollouts)
    scored, parts, places = ScoredParts(reward), [], []
    left = len(request)
    while left:
        if time.monotonic() > until:
            raise TimeoutError(f"{left} of {len(request)} samples were not generated within {deadline:.0f} s")
        taken = actor.take_generated(POLL_SECONDS)
        for number, rank in enumerate(answering):
            found = taken[rank]
            if found is None:
                continue
            rows = found[0] + number * share
            part = DataProto(found[1].batch, _columns_of(rows, columns) | found[1].non_tensor_batch, {})
            scored.add(part, rows)
            parts.append(part)
            places.append(rows)
            left -= len(rows)
    batch = DataProto.concat(parts)
    batch.reorder(np.argsort(np.concatenate(places), kind="stable"))
    return batch, scored, {"reward/overlapped_share": 1 - len(places[-1]) / len(batch)}


def _columns_of(rows: np.ndarray, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in columns.items()}
