"""The bookkeeping of the KV cache: blocks of tokens that are free, in use by several sequences, or kept for later.

A full block whose tokens are known can be *registered* under its content: the tokens and the block before it. When
nobody uses it any more it stays findable until its memory is needed (the longest unused goes first).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# The block before (its serial number; 0: none) and the tokens. Serial numbers are never used twice, so a key names
# one exact prefix: nothing is hashed away and no two prefixes can be mistaken for each other.
Key = tuple[int, bytes]
ROOT = 0


@dataclass(frozen=True)
class Match:
    """Cached blocks of a prefix, the serial number of the last, and the key of the first block that is missing."""

    blocks: list[int]
    serial: int
    missing: Key | None


class BlockManager:
    """Hands out blocks by number. Every block is free, in use (with a count of its users), or idle but findable."""

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"the KV cache needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._found: dict[Key, tuple[int, int]] = {}  # block and serial number
        self._key_of: dict[int, Key] = {}
        self._serial = ROOT

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: never used, given back, or idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._found)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes blocks, from the idle ones last; there must be enough (`num_free`)."""
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a user to each of these blocks."""
        for block in blocks:
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a user from each of these blocks; of a sequence's idle blocks, the last will be evicted first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} was given back twice"
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def match(self, tokens: Sequence[int] | np.ndarray, most: int) -> Match:
        """The longest cached prefix of `tokens` within its first `most` tokens; takes no block."""
        blocks: list[int] = []
        serial, missing = ROOT, None
        for place, content in enumerate(self._contents(tokens)):
            key = (serial, content)
            found = self._found.get(key)
            if found is None or (place + 1) * self.block_size > most:
                missing = key if found is None else None
                break
            blocks.append(found[0])
            serial = found[1]
        return Match(blocks, serial, missing)

    def register(self, tokens: Sequence[int] | np.ndarray, blocks: Sequence[int]) -> list[int]:
        """Makes the full blocks of `tokens` findable; returns the places in `blocks` of those that are new."""
        serial, new = ROOT, []
        for place, content in enumerate(self._contents(tokens)):
            key = (serial, content)
            found = self._found.get(key)
            if found is None:
                if blocks[place] in self._key_of:
                    break  # registered after a prefix that has been evicted since: cannot be reached again
                self._serial += 1
                found = self._found[key] = (blocks[place], self._serial)
                self._key_of[blocks[place]] = key
                new.append(place)
            serial = found[1]
        return new

    def _contents(self, tokens: Sequence[int] | np.ndarray) -> Iterator[bytes]:
        """The tokens of each full block."""
        data, width = np.asarray(tokens, np.int64).tobytes(), 8 * self.block_size
        return (data[start : start + width] for start in range(0, len(data) - width + 1, width))

    def flush(self) -> None:
        """Forgets all contents, as after new weights."""
        self._found.clear()
        self._key_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        del self._found[self._key_of.pop(block)]
