"""In which order rows are visited: a pure function of the seed, the epoch and the position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass
class BatchOrder:
    """Endless batches of row numbers, epoch after epoch. `epoch` and `position` say where it stands and may be set.

    A last batch that is too small is left out, so that every step has the same size.
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self.num_rows < self.batch_size:
            raise ValueError(
                f"the data has {self.num_rows} rows, fewer than one batch of {self.batch_size}: "
                "add data or lower data.train_batch_size"
            )

    @property
    def batches_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            rows = self._rows_of_epoch()
            while self.position + self.batch_size <= self.num_rows:
                start, self.position = self.position, self.position + self.batch_size
                yield rows[start : self.position]
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from where another one stood; takes effect with the next `iter`."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _rows_of_epoch(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_rows)
