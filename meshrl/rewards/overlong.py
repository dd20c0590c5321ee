"""DAPO's soft punishment of answers that come close to the longest allowed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OverlongBuffer:
    """Over the last `length` tokens before `max_length` an answer loses up to `penalty_factor`, in a straight line."""

    max_length: int
    length: int
    penalty_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.length <= self.max_length:
            raise ValueError(
                f"reward_manager.overlong_buffer.len ({self.length}) must be between 1 and data.max_response_length "
                f"({self.max_length})"
            )

    def penalties(self, lengths: Tensor) -> Tensor:
        """0 or below, for each answer by its length in tokens."""
        over = (lengths - (self.max_length - self.length)).clamp(min=0).float()
        return -over / self.length * self.penalty_factor
