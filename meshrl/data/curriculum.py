"""A curriculum: a sampler class of the user that chooses the next prompts, and may adapt to the trained batches."""

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

# The key of the sampler's own state in the state of its order.
STATE = "sampler_state"


class SamplerOrder(RowOrder):
    """An order of batches from the row numbers that a user's sampler yields. An epoch is one iteration of the sampler.

    The sampler is `data.sampler.class_name(data_source, data_config)`. It may have `update(batch)`, which is called
    with every trained batch before the next batch is drawn. It may have `state_dict` and `load_state_dict`. If it does
    not have both, a resumed run skips the row numbers that the earlier run took.
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
        goes_on = self.position > 0  # the rest of a resumed sampler's epoch may be smaller than a batch
        # A sampler that was saved at the end of its epoch may begin the next epoch at once, or first end this epoch.
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
        """Return the sampler's state as plain data for JSON.

        JSON alone would change the keys of dicts and cannot hold tensors.
        """
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
        elif "sampler" in state:  # a state from an older version of meshrl
            self.sampler.load_state_dict(state["sampler"])

    @property
    def _has_state(self) -> bool:
        return hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict")
