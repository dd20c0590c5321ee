"""In which order rows are visited: a pure function of the seed, the epoch and the position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshrl.config.keys import count
from meshrl.data.batch import DataProto


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


# Several sources of rows, drawn from in fixed shares.


class Shares:
    """Says which source is next, so that after any number of draws each has its share to within a row or so."""

    def __init__(self, weights: Sequence[float]):
        total = float(sum(weights))
        if not weights or min(weights) < 0 or not 0 < total < float("inf"):
            raise ValueError(f"data.train_weights must be numbers from 0 up, not all 0; got {list(weights)}")
        self.shares = [weight / total for weight in weights]
        self.drawn = [0] * len(weights)

    def next(self) -> int:
        """The source that is furthest behind its share; the first of equals."""
        count = sum(self.drawn) + 1
        behind = [share * count - drawn for share, drawn in zip(self.shares, self.drawn, strict=True)]
        source = behind.index(max(behind))
        self.drawn[source] += 1
        return source


class MixedOrder(RowOrder):
    """Batches of rows of several sources in the shares of `weights`; each source has epochs of its own.

    `source_of_row` numbers the source of every row. An epoch of the whole is as many batches as all rows fill, in
    which a small source with a large weight may come several times.
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
            if self.position >= per_epoch:  # beyond it after a run with another batch size
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
        """The `number`-th row ever drawn from a source."""
        rows = self.rows_of[source]
        epoch, place = divmod(number, len(rows))
        if not self.shuffle:
            return int(rows[place])
        if self._orders.get(source, (-1, rows))[0] != epoch:
            self._orders[source] = epoch, np.random.default_rng((self.seed, epoch, source)).permutation(rows)
        return int(self._orders[source][1][place])
