"""Several sources of rows, drawn from in fixed shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshrl.data.sampling import RowOrder, check_enough_rows


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
