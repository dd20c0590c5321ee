"""Which samples of a batch have a score."""

import numpy as np

from meshrl.data.proto import DataProto

# The column that marks samples whose reward failed and which are not trained on.
DROPPED = "reward_dropped"


def scored_rows(batch: DataProto) -> np.ndarray:
    """Which samples have a score, [samples] bool: the 0 of one that is dropped for a failed reward is none."""
    dropped = batch.non_tensor_batch.get(DROPPED)
    return np.ones(len(batch), dtype=bool) if dropped is None else ~dropped.astype(bool)
