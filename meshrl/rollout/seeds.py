"""Seeds of samples: numbers that depend on the run's seed, the step and the sample's place alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TRAINING, VALIDATION = 0, 1


def sample_seeds(run_seed: int, purpose: int, step: int, count: int) -> Tensor:
    """An int64 seed for each of `count` samples of a step; the layout and the number of ranks play no part."""
    rng = np.random.default_rng((run_seed, purpose, step))
    return torch.from_numpy(rng.integers(0, 2**62, size=count, dtype=np.int64))
