"""Scoring that overlaps with generation: parts are scored as they come and collected in the batch's order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np

from meshrl.config.names import count
from meshrl.data.proto import DataProto
from meshrl.rewards.manager import RewardManager
from meshrl.rewards.results import Scores


class ScoredParts:
    """The parts of one batch on their way through a reward manager.

    `add` returns at once. The result is the same as that of the whole batch at once, in whatever order parts came.
    """

    def __init__(self, manager: RewardManager):
        self.manager = manager
        self._futures: list[Future[Scores]] = []
        self._rows: list[np.ndarray] = []
        self._next = 0

    def add(self, part: DataProto, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Begins to score a part, which is `rows` of the batch; without them, the rows after those added so far."""
        if rows is None:
            rows = np.arange(self._next, self._next + len(part))
        if len(rows) != len(part):
            raise ValueError(f"a part of {count(len(part), 'sample')} came with {count(len(rows), 'row')}")
        self._next += len(part)
        self._rows.append(np.asarray(rows, dtype=np.int64))
        self._futures.append(self.manager.submit(part))

    def collect(self, timeout: float | None = None) -> Scores:
        """The scores of all parts in the order of the batch's rows; `timeout` is for all of them together."""
        if not self._futures:
            raise ValueError("no parts were added to collect scores of")
        rows = np.concatenate(self._rows)
        if not np.array_equal(np.sort(rows), np.arange(len(rows))):
            raise ValueError(f"the parts' rows must be 0 to {len(rows) - 1}, each once; got {sorted(rows.tolist())}")
        deadline = None if timeout is None else time.monotonic() + timeout
        found = []
        for at, future in enumerate(self._futures):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                found.append(future.result(left))
            except FutureTimeout:
                if future.done():
                    raise  # the function's own
                late = sum(not other.done() for other in self._futures)
                raise TimeoutError(
                    f"{late} of {len(self._futures)} parts were not scored within {timeout} s; the first is part {at}"
                ) from None
        return Scores.concat(found).reorder(rows)

    def add_scores(self, batch: DataProto, timeout: float | None = None) -> dict[str, float]:
        """Collects, and writes the scores into the whole batch as `RewardManager.add_scores` does."""
        return self.manager.write(self.collect(timeout), batch)
