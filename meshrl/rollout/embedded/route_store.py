"""Where the tokens of running answers went, kept as their keys and values are: in the slots of the cache's blocks.

So whoever finds a prefix in the cache finds its routes as well. They are small: some hundred bytes a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.models.routes import Routers
from meshrl.rollout.embedded.rows import Rows, Sequence
from meshrl.rollout.embedded.scheduler import Piece
from meshrl.rollout.embedded.slots import untouched_zeros


class RouteStore:
    """The routes of every slot; the block after the last takes those of tokens that nobody wants."""

    def __init__(self, hf_model: PreTrainedModel, rows: Rows, num_blocks: int, block_size: int, device: torch.device):
        self.routers, self.rows = Routers(hf_model), rows
        self.num_slots, self.block_size, self.device = (num_blocks + 1) * block_size, block_size, device
        self._kept: Tensor | None = None

    def write(self, slots: Tensor) -> None:
        """Keeps the routes of the forward that has just been, one token a slot."""
        routes = self.routers.recorded()
        if self._kept is None:
            shape = (self.num_slots, *routes.shape[1:])
            on_host = self.device.type == "cpu"
            self._kept = (
                untouched_zeros(shape, routes.dtype)
                if on_host
                else torch.zeros(shape, dtype=routes.dtype, device=self.device)
            )
        self._kept[slots] = routes

    def write_pieces(self, pieces: Iterable[Piece]) -> None:
        """The same for prefill pieces in the order of their tokens."""
        slots = [self._slots(piece.sequence.blocks, piece.start, piece.end) for piece in pieces]
        self.write(torch.from_numpy(np.concatenate(slots)).to(self.device))

    def copy_to_followers(self, leader: Sequence) -> None:
        """The last block of a prompt is not full: every sample goes on in one of its own."""
        place, used = divmod(leader.computed, self.block_size)
        if leader.followers and used:
            assert self._kept is not None
            blocks = self._kept.unflatten(0, (-1, self.block_size))
            blocks[[follower.blocks[place] for follower in leader.followers]] = blocks[leader.blocks[place]].clone()

    def write_rows(self, alive: np.ndarray) -> None:
        """The same for the next token of alive rows, among those of all rows before the last."""
        lengths = self.rows.length[alive].tolist()
        held = [self.rows.sequences[row] for row in alive.tolist()]
        slots = np.full(int(alive[-1]) + 1, self.num_slots - 1)
        slots[alive] = [
            sequence.blocks[at // self.block_size] * self.block_size + at % self.block_size
            for sequence, at in zip(held, lengths, strict=True)
            if sequence is not None
        ]
        self.write(torch.from_numpy(slots))

    def keep(self, sequence: Sequence) -> None:
        """Hands a sequence the routes that it has not got yet, before it gives its blocks back.

        What it got before stays: weights may have changed since, but its tokens were sampled by way of those.
        """
        if self._kept is None:
            return
        end = len(sequence.prompt) + int(self.rows.count[sequence.row]) - 1
        start = sum(map(len, sequence.routes))
        if start < end:
            slots = torch.from_numpy(self._slots(sequence.blocks, start, end)).to(self.device)
            sequence.routes.append(self._kept[slots].to("cpu", non_blocking=True))

    def drop(self) -> None:
        """Gives the memory back."""
        self._kept = None

    def _slots(self, blocks: Seq[int], start: int, end: int) -> np.ndarray:
        places = np.arange(start, end)
        return np.array(blocks)[places // self.block_size] * self.block_size + places % self.block_size


def whole_routes(parts: list[Tensor]) -> np.ndarray | None:
    """All routes of a sequence that has given its row back; None where none were kept."""
    if not parts:
        return None
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # they may be on their way
    return torch.cat(parts).numpy()
