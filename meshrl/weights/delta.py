"""Sending only what changed since the last version, bit for bit.

A step of reinforcement learning in bfloat16 leaves most elements as they were. A message is then a bit for each 16-bit
unit (changed or not) and the units that changed; where that is no shorter, the message itself. Senders keep what they
last sent, receivers have it in place. The sums of a sync cover the outcome as they always do.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshrl.weights.exchange import Exchange, write_piece

UNITS = {1: torch.uint8, 2: torch.int16}


class DeltaExchange(Exchange):
    """An exchange whose messages may be shorter than planned. `sizes` says how long each is on its way."""

    def prepare(self, memory: dict[int, Tensor], *, is_known: bool) -> None:
        """Packs and compares all messages that start here; `memory` has what was last sent, and is brought up to date.

        `is_known`: whether the receivers still have that.
        """
        self.sizes: dict[int, int] = {}
        self.memory = memory
        self._changed: dict[int, Tensor] = {}
        for message, pieces in self.part.packs.items():
            new = torch.empty(super()._size(message), dtype=torch.uint8, device=self._device())
            super()._pack(new, pieces)
            old = memory.get(message)
            memory[message] = new
            self.sizes[message] = len(new)
            if is_known and old is not None:
                changed = _units(old, self._unit(pieces)) != _units(new, self._unit(pieces))
                size = -(-len(changed) // 8) + int(changed.sum()) * self._unit(pieces)
                if size < len(new):
                    self.sizes[message], self._changed[message] = size, pack_bits(changed)

    def learn(self, messages: np.ndarray, sizes: Tensor) -> None:
        """Takes in how long another rank's messages are."""
        self.sizes |= dict(zip(messages.tolist(), sizes.tolist(), strict=True))

    def sizes_for(self, rank: int) -> Tensor:
        return torch.tensor([self.sizes[number] for number in messages_of(self.part.sent[rank])], dtype=torch.int64)

    def _device(self) -> torch.device:
        assert self.source is not None
        return self.source.device

    def _size(self, message: int) -> int:
        return self.sizes[message]

    def _unit(self, pieces: np.ndarray) -> int:
        return min(2, int(self.plan.itemsize[pieces["tensor"]].min()))

    def _pack(self, buffer: Tensor, pieces: np.ndarray) -> None:
        message = int(pieces["message"][0])
        bits = self._changed.get(message)
        if bits is None:
            buffer.copy_(self.memory[message])
            return
        unit = self._unit(pieces)
        new = _units(self.memory[message], unit)
        buffer[: len(bits)].copy_(bits)
        buffer[len(bits) :].copy_(new[unpack_bits(bits, len(new))].view(torch.uint8))

    def _unpack(self, buffer: Tensor, pieces: np.ndarray) -> None:
        message = int(pieces["message"][0])
        whole = super()._size(message)
        if len(buffer) == whole:
            super()._unpack(buffer, pieces)
            return
        assert self.destination is not None
        unit = self._unit(pieces)
        held = torch.empty(whole, dtype=torch.uint8, device=buffer.device)
        for piece in pieces:
            region = self.destination.region(self.plan.destination.slices[piece["slice"]], piece)
            write_piece(held, piece, region, self.dtype_of[piece["tensor"]])
        count = whole // unit
        border = -(-count // 8)
        changed = unpack_bits(buffer[:border], count)
        _units(held, unit)[changed] = _units(buffer[border:].clone(), unit)
        super()._unpack(held, pieces)


def messages_of(pieces: np.ndarray) -> list[int]:
    """The messages that pieces come in, in order."""
    return np.unique(pieces["message"]).tolist()


def pack_bits(mask: Tensor) -> Tensor:
    """Eight booleans a byte."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (padded * _powers(mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`."""
    return (packed[:, None] & _powers(packed.device)).ne(0).view(-1)[:count]


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _units(data: Tensor, unit: int) -> Tensor:
    return data.view(UNITS[unit])
