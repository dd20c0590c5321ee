"""The single rewards of a sample, for estimators that do not want them added up (GDPO)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.config.algorithm import AlgorithmConfig
from meshrl.data.proto import DataProto
from meshrl.rewards.calling import RewardFunctionSpec

# The column of a reward model's scores, before their weight.
RM_SCORE = "rm_score"
Components = tuple[dict[str, np.ndarray], list[float]]


def reward_components(
    batch: DataProto, config: AlgorithmConfig, functions: Sequence[RewardFunctionSpec], rm_weight: float
) -> Components | None:
    """Rewards by name with their weights: `gdpo_reward_keys`, or each function's own score; None: there is but one."""
    columns, keys = batch.non_tensor_batch, list(config.gdpo_reward_keys)
    if keys:
        missing = [name for name in keys if name not in columns]
        if missing:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {', '.join(missing)}, which no reward function returned; there are "
                f"{', '.join(sorted(columns))}"
            )
        weights = list(config.gdpo_reward_weights) or [1.0] * len(keys)
        return {name: _numbers(name, columns[name]) for name in keys}, weights
    if len(functions) > 1:
        found = {spec.label: _numbers(spec.label, columns[f"{spec.label}/score"]) for spec in functions}
        weights = [spec.weight for spec in functions]
    elif RM_SCORE in columns:
        whole = batch.batch["token_level_scores"].sum(1).double().numpy()
        found, weights = {functions[0].label: whole - rm_weight * columns[RM_SCORE]}, [1.0]
    else:
        return None
    if RM_SCORE in columns:
        found[RM_SCORE], weights = columns[RM_SCORE], [*weights, rm_weight]
    return found, weights


def _numbers(name: str, column: np.ndarray) -> np.ndarray:
    """A column as numbers; a sample whose reward failed said nothing and counts as 0."""
    if all(value is None for value in column):
        raise ValueError(f"algorithm.gdpo_reward_keys: no sample has a value of {name}")
    try:
        return np.array([0.0 if value is None else float(value) for value in column])
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm.gdpo_reward_keys: {name} must be a number of each sample: {error}") from error
