"""An order of the user's own: a sampler class that says which prompts come next, and may learn from how they went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshrl.config.data import DataConfig
from meshrl.config.keys import count
from meshrl.config.user_code import load_function
from meshrl.data import plain_data
from meshrl.data.batch import DataProto
from meshrl.data.prompts import PromptDataset
from meshrl.data.sampling import RowOrder, check_enough_rows

# Under this name the sampler's own state lies in that of its order.
STATE = "sampler_state"


class SamplerOrder(RowOrder):
    """Batches of the row numbers that a sampler yields; an epoch is one iteration of it.

    The sampler is `data.sampler.class_name(data_source, data_config)`. It may have `update(batch)`, called with every
    batch that was trained on, and `state_dict` with `load_state_dict`; without both a resumed run passes over what an
    earlier one took. The next batch is drawn after the update.
    """

    def __init__(self, data: PromptDataset, config: DataConfig, batch_size: int):
        check_enough_rows(len(data), batch_size)
        make = load_function(config.sampler.class_path or "", config.sampler.class_name or "")
        self.sampler: Any = make(data_source=data, data_config=config)
        self.num_rows, self.batch_size = len(data), batch_size
        self.name = config.sampler.class_name
        self.epoch = self.position = 0

    @property
    def batches_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        passed_over = 0 if self._has_state else self.position
        goes_on = self.position > 0  # what a resumed sampler has left may be less than a batch
        # at the end of its pass, its state may have it begin the next one at once, or first end this one
        begun = goes_on and self._has_state and self.position == self.batches_per_epoch * self.batch_size
        if begun:
            self.epoch, self.position = self.epoch + 1, 0
        while True:
            numbers, taken = iter(self.sampler), 0
            for _ in range(passed_over):
                next(numbers, None)
            while (batch := self._next(numbers)) is not None:
                taken += 1
                self.position += self.batch_size
                yield batch
            if not taken and not goes_on:
                raise ValueError(
                    f"data.sampler: {self.name} yielded fewer than {count(self.batch_size, 'row')}, one batch"
                )
            if taken or not begun:
                self.epoch += 1
            self.position, passed_over, goes_on, begun = 0, 0, False, False

    def _next(self, numbers: Iterator[Any]) -> np.ndarray | None:
        batch: list[int] = []
        for number in numbers:
            if not isinstance(number, int | np.integer) or not 0 <= number < self.num_rows:
                raise ValueError(f"data.sampler: {self.name} yielded {number!r}, no row of 0 to {self.num_rows - 1}")
            batch.append(int(number))
            if len(batch) == self.batch_size:
                return np.array(batch)
        return None

    @property
    def learns(self) -> bool:
        return hasattr(self.sampler, "update")

    def update(self, batch: DataProto) -> None:
        if self.learns:
            self.sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        if not self._has_state:
            return super().state_dict()
        return super().state_dict() | {STATE: self._own_state()}

    def _own_state(self) -> Any:
        """The sampler's state as plain data for JSON, which alone would change a dict's keys and has no tensors."""
        try:
            return plain_data.to_json(self.sampler.state_dict(), f"{self.name}.state_dict()")
        except plain_data.NotPlainError as error:
            raise ValueError(f"data.sampler: {error}; checkpoints hold plain data only") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self._has_state:
            return
        if STATE in state:
            self.sampler.load_state_dict(plain_data.from_json(state[STATE]))
        elif "sampler" in state:  # of an older version
            self.sampler.load_state_dict(state["sampler"])

    @property
    def _has_state(self) -> bool:
        return hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict")
