"""What an order that learns was told since the place in the data that a checkpoint holds.

With batches begun ahead that place is where the data stood when the last trained batch was begun; the batches that were
trained on since then have taught the order something, which a run that goes on tells it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from meshrl.data.proto import DataProto
from meshrl.data.sampling import RowOrder

NAME = "heard_"


class HeardUpdates:
    """Tells an order of every batch trained on, and keeps those that the place in the data does not know of."""

    def __init__(self, order: RowOrder):
        self.order = order
        self.count = 0
        self._kept = deque[DataProto]()

    def update(self, batch: DataProto) -> None:
        """The order hears of a batch."""
        self.order.update(batch)
        if self.order.learns:
            self.count += 1
            self._kept.append(batch)

    def forget_before(self, count: int) -> None:
        """The place in the data is now one at which the order had heard of so many batches."""
        while self._kept and self.count - len(self._kept) < count:
            self._kept.popleft()

    def state_dict(self) -> dict[str, DataProto]:
        """The batches to tell again, by names that sort as they came."""
        return {f"{NAME}{number:04d}": batch for number, batch in enumerate(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Tells the order, which stands at the place in the data, what it had heard since."""
        for name in sorted(name for name in state if name.startswith(NAME)):
            self.update(state[name])
