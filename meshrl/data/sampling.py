"""In which order rows are visited: a pure function of the seed, the epoch and the position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshrl.config.names import count
from meshrl.data.proto import DataProto


def chosen_rows(count: int, most: int, shuffle: bool, seed: int) -> np.ndarray:
    """Numbers of at most `most` of `count` rows (-1: all), in order: drawn by the seed if shuffled, else the first."""
    if not 0 <= most < count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False)) if shuffle else np.arange(most)


class RowOrder(ABC):
    """Batches of row numbers, epoch after epoch. `epoch` and `position` say where it stands and may be set before."""

    epoch: int
    position: int

    @abstractmethod
    def __iter__(self) -> Iterator[np.ndarray]: ...

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int:
        """How many batches an epoch has; 0: that is not known."""

    @property
    def learns(self) -> bool:
        """Whether `update` changes what comes next."""
        return False

    def update(self, batch: DataProto) -> None:
        """Hears of every batch that was trained on; most orders do not care."""
        del batch

    def metrics(self) -> dict[str, float]:
        """What there is to say of the data at this step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there when it is iterated next."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


@dataclass
class BatchOrder(RowOrder):
    """Every row once an epoch, in an order of its own if shuffled.

    A last batch that is too small is left out, so that every step has the same size.
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        check_enough_rows(self.num_rows, self.batch_size)

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

    def _rows_of_epoch(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_rows)


def check_enough_rows(num_rows: int, batch_size: int) -> None:
    """One batch must be there."""
    if num_rows < batch_size:
        raise ValueError(
            f"the data has {count(num_rows, 'row')}, fewer than one batch of {batch_size}: "
            "add data or lower data.train_batch_size"
        )
