"""What a worker needs to know beyond the config of its roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.config.algorithm import RolloutCorrectionConfig


@dataclass(frozen=True)
class WorkerSettings:
    """Numbers that the trainer derives once for all workers of a role."""

    device: str
    collective_deadline: float
    mini_batches: int
    total_optimizer_steps: int
    with_reference: bool
    seed: int = 0
    with_rollout: bool = True  # whether the actor's workers generate, too
    # Of every token's distribution, the sum of its squares: for the optimal token baselines.
    with_sum_pi_squared: bool = False
    # Where the loss itself compares the policy with the rollout's.
    bypass: RolloutCorrectionConfig | None = None
    # Variables of the chat template, as the prompts were rendered with.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
