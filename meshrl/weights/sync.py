"""Bringing the policy's weights from the training engine into the rollout, under a version number."""

from __future__ import annotations

from meshrl.engines.base import Engine
from meshrl.rollout.base import Rollout


def sync_weights(engine: Engine, rollout: Rollout, version: int) -> None:
    """Streams every parameter to the rollout, one whole tensor at a time, and stamps it with `version`."""
    if version <= rollout.version:
        raise ValueError(f"weight sync: version {version} is not newer than the rollout's {rollout.version}")
    rollout.update_weights(engine.per_tensor_params(), version)
