"""Orders in which rows of the data are visited: pure functions of the seed, the epoch and the position.

* `RowOrder`: the interface of all orders.
* `BatchOrder`: every row once in an epoch.
* `MixedOrder`, `Shares`: rows of several sources in fixed shares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshrl.config.keys import count
from meshrl.data.batch import DataProto


def chosen_rows(count: int, most: int, shuffle: bool, seed: int) -> np.ndarray:
    """Return the sorted numbers of at most `most` of `count` rows (-1: all).

    The rows are drawn by the seed with `shuffle`. Otherwise they are the first rows.
    """
    if not 0 <= most < count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False)) if shuffle else np.arange(most)


class RowOrder(ABC):
    """An endless iterator of batches of row numbers `[batch_size]`, epoch after epoch.

    `epoch` and `position` (rows taken in the epoch) are its state, and may be set before the iteration.
    """

    epoch: int
    position: int

    @abstractmethod
    def __iter__(self) -> Iterator[np.ndarray]: ...

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int:
        """The number of batches of an epoch, or 0 if the number is not known."""

    @property
    def learns(self) -> bool:
        """True if `update` changes the next batches."""
        return False

    def update(self, batch: DataProto) -> None:
        """Adapt the order to a batch that was trained. Most orders do nothing."""
        del batch

    def metrics(self) -> dict[str, float]:
        """Return metrics of the data for the present step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the epoch and the position. The next iteration continues from there."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


@dataclass
class BatchOrder(RowOrder):
    """An order with every row once in an epoch. With `shuffle`, each epoch has another order.

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
    """Raise `ValueError` if there are fewer rows than one batch needs."""
    if num_rows < batch_size:
        raise ValueError(
            f"the data has {count(num_rows, 'row')}, fewer than one batch of {batch_size}: "
            "add data or lower data.train_batch_size"
        )


# Rows of several sources in fixed shares.


class Shares:
    """A deterministic choice of the next source. After any number of draws, shares are exact to about one row."""

    def __init__(self, weights: Sequence[float]):
        total = float(sum(weights))
        if not weights or min(weights) < 0 or not 0 < total < float("inf"):
            raise ValueError(f"data.train_weights must be numbers from 0 up, not all 0; got {list(weights)}")
        self.shares = [weight / total for weight in weights]
        self.drawn = [0] * len(weights)

    def next(self) -> int:
        """Draw the source that is furthest behind its share (the first of equals), and return its index."""
        count = sum(self.drawn) + 1
        behind = [share * count - drawn for share, drawn in zip(self.shares, self.drawn, strict=True)]
        source = behind.index(max(behind))
        self.drawn[source] += 1
        return source


class MixedOrder(RowOrder):
    """An order that mixes rows of several sources in the shares of `weights`. Each source has its own epochs.

    `source_of_row` `[rows]` has the index of each row's source. An epoch of the mixture has as many batches as all rows
    fill. In an epoch, rows of a small source with a large weight may occur several times.
    """

    def __init__(
        self, source_of_row: np.ndarray, weights: Sequence[float], batch_size: int, shuffle: bool, seed: int
    ) -> None:
        check_enough_rows(len(source_of_row), batch_size)
        self.rows_of = [np.flatnonzero(source_of_row == source) for source in range(len(weights))]
        empty = [at for at, rows in enumerate(self.rows_of) if len(rows) == 0 and weights[at] > 0]
        if empty:
            raise ValueError(
                f"data.train_weights: file {empty[0] + 1} of {len(weights)} has no row left to draw (weight "
                f"{weights[empty[0]]})"
            )
        self.num_rows, self.weights = len(source_of_row), list(weights)
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.epoch = self.position = 0
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def batches_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        shares = Shares(self.weights)
        per_epoch = self.batches_per_epoch * self.batch_size
        for _ in range(self.epoch * per_epoch + self.position):
            shares.next()
        while True:
            if self.position >= per_epoch:  # it may be above after a resumed run with another batch size
                self.epoch, self.position = self.epoch + 1, 0
            batch = np.empty(self.batch_size, dtype=np.int64)
            for at in range(self.batch_size):
                source = shares.next()
                batch[at] = self._row(source, shares.drawn[source] - 1)
            if self.shuffle:
                batch = np.random.default_rng((self.seed, self.epoch, self.position)).permutation(batch)
            self.position += self.batch_size
            yield batch

    def _row(self, source: int, number: int) -> int:
        """Return the row of the `number`-th draw from a source, counted from 0 over all its epochs."""
        rows = self.rows_of[source]
        epoch, place = divmod(number, len(rows))
        if not self.shuffle:
            return int(rows[place])
        if self._orders.get(source, (-1, rows))[0] != epoch:
            self._orders[source] = epoch, np.random.default_rng((self.seed, epoch, source)).permutation(rows)
        return int(self._orders[source][1][place])
