"""The images of a packed row, as a model takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NOT_AN_IMAGE = -1
# Of a sample, encoded, in the order of their places.
Images = tuple[bytes, ...]


@dataclass(frozen=True)
class Seen:
    """The images of a packed row.

    `positions` [3, tokens] and `square_of` [tokens] (which of the squares of all images, or `NOT_AN_IMAGE`) are of the
    row's tokens; `pixels` and `grids` of its distinct images. `shifts`: how many positions each document ends earlier.
    """

    positions: Tensor
    square_of: Tensor
    pixels: Tensor
    grids: Tensor
    shifts: list[int]

    def to(self, device: torch.device) -> Seen:
        """On a device; from the host through pinned memory, so that nothing waits."""
        if device.type == "cpu":
            return self
        names = ("positions", "square_of", "pixels", "grids")
        return replace(self, **{n: getattr(self, n).pin_memory().to(device, non_blocking=True) for n in names})

    def part(self, take: Callable[..., Tensor]) -> Seen:
        """For a rank's tokens of a row that several ranks share, which it takes; all of them look at all images."""
        positions = take(self.positions.T).T
        return replace(self, positions=positions, square_of=take(self.square_of, NOT_AN_IMAGE))
