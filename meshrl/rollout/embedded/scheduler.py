"""Which sequences compute what in the next step: decoding first, then prefill pieces under the token budget.

Waiting sequences enter in the order they came, as rows, blocks and budget allow. Samples of one prompt enter together
and share its prefill. A sequence whose next block is just being computed by another waits one step and finds it in the
cache. When blocks run out, the sequence that came last gives its blocks back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshrl.rollout.embedded.blocks import BlockManager, Key, Match
from meshrl.rollout.embedded.rows import Rows, Sequence

# Of every so many running rows, one free block is kept back when a new sequence wants in.
ROWS_PER_SPARE_BLOCK = 4
# Prefill is launched as soon as this many tokens have come together.
LAUNCH_TOKENS = 16384
# How far admission looks past sequences that wait for a block of another.
MOST_SKIPPED = 1024


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + len(tokens)) of a sequence to compute; `is_last`: then its next token can be sampled."""

    sequence: Sequence
    tokens: np.ndarray
    start: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Scheduler:
    """Owns the queue; decides who holds rows and blocks."""

    def __init__(self, rows: Rows, blocks: BlockManager, max_tokens: int, *, caching: bool = True):
        self.rows, self.blocks, self.max_tokens, self.caching = rows, blocks, max_tokens, caching
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.preemptions = self.cached_tokens = self.prompt_tokens = 0
        self.loads: list[tuple[Sequence, int]] = []  # rows that take so many tokens over from cached blocks
        # Hears of sequences that have computed something, before they give their blocks back.
        self.before_leaving: Callable[[Sequence], None] | None = None

    def has_work(self) -> bool:
        return bool(self.waiting) or self.rows.num_held > 0

    def rows_to_grow(self) -> np.ndarray:
        """Alive rows whose next token needs a new block."""
        rows = self.rows
        return (rows.alive & (rows.length >= rows.room) & (rows.launched < rows.limit)).nonzero()[0]

    def is_short(self) -> bool:
        """Whether running sequences want more blocks than are free."""
        return len(self.rows_to_grow()) > self.blocks.num_free

    def schedule(self) -> Iterator[list[Piece]]:
        """Gives every running row a place for its next token, then yields the prefill pieces of this step.

        They come in groups, each to be launched before the next is asked for: a device works on the first while later
        ones are admitted.
        """
        self._grow()
        # Long prompts must get on even when the decoding rows alone use up the budget.
        budget = max(self.max_tokens - int(self.rows.alive.sum()), 1)
        group: list[Piece] = []
        size = 0
        in_work: set[Key] = set()
        for piece in self._pieces(budget, in_work):
            group.append(piece)
            size += len(piece.tokens)
            if size >= LAUNCH_TOKENS:
                yield group
                group, size = [], 0
                in_work.clear()
        if group:
            yield group

    def _grow(self) -> None:
        for row in self.rows_to_grow():
            sequence = self.rows.sequences[row]
            while sequence is not None and sequence.row == row:
                if self.blocks.num_free:
                    sequence.blocks += self.blocks.allocate(1)
                    self.rows.room[row] += self.blocks.block_size
                    break
                self.preempt(max(self.rows.held(), key=lambda s: s.arrival))

    def _pieces(self, budget: int, in_work: set[Key]) -> Iterator[Piece]:
        """Pieces of prompts under way, then of new ones. `in_work`: blocks that pieces of the same group compute."""
        for sequence in list(self.prefilling):
            if budget > 0:
                piece = self._piece(sequence, budget)
                budget -= len(piece.tokens)
                yield piece
        skipped: list[Sequence] = []
        try:
            while self.waiting and budget > 0 and self.rows.num_free and len(skipped) < MOST_SKIPPED:
                sequence = self.waiting.popleft()
                tokens = sequence.tokens
                match = self._match(sequence, tokens)
                if match.missing is not None and match.missing in in_work:
                    skipped.append(sequence)
                    continue
                if not self._take_blocks(sequence, len(tokens), match):
                    self.waiting.appendleft(sequence)
                    break
                if match.missing is not None:
                    in_work.add(match.missing)
                piece = self._enter(sequence, len(tokens), len(match.blocks), budget)
                budget -= len(piece.tokens)
                yield piece
        finally:
            self.waiting.extendleft(reversed(skipped))

    def _enter(self, sequence: Sequence, length: int, cached_blocks: int, budget: int) -> Piece:
        """Gives a sequence its row; its followers come along."""
        self.rows.place(sequence)
        self._place_followers(sequence, length)
        sequence.computed = cached_blocks * self.blocks.block_size
        if sequence.computed:
            self.loads.append((sequence, sequence.computed))
        self.cached_tokens += sequence.computed
        self.prompt_tokens += length
        self.prefilling.append(sequence)
        return self._piece(sequence, budget)

    def _piece(self, sequence: Sequence, budget: int) -> Piece:
        tokens = sequence.tokens
        # Images are looked at as a whole, and so are the prompts that have any.
        most = len(tokens) if sequence.images else budget
        start, end = sequence.computed, min(len(tokens), sequence.computed + most)
        sequence.computed = end
        for taker in (sequence, *sequence.followers):
            self.rows.length[taker.row] = end
        if end == len(tokens):
            self.prefilling.remove(sequence)
        return Piece(sequence, tokens[start:end], start, end == len(tokens))

    def _match(self, sequence: Sequence, tokens: np.ndarray) -> Match:
        # At least the last token is computed again: the next one is sampled from its logits.
        if not self.caching or len(tokens) <= self.blocks.block_size or not self._wants_cache(sequence):
            return Match([], 0, None)
        return self.blocks.match(sequence.named(tokens), len(tokens) - 1)

    def _wants_cache(self, sequence: Sequence) -> bool:
        """A batch for training finds nothing in the cache but its own prompts: those of split or restarted groups."""
        return sequence.cacheable or bool(len(sequence.output)) or sequence.index > 0

    def _take_blocks(self, sequence: Sequence, length: int, match: Match) -> bool:
        """Takes the blocks of all tokens and the next, but only while enough are left for the rows that run."""
        self.blocks.share(match.blocks)
        needed = self.blocks.blocks_for(length + 1) - len(match.blocks)
        spare = -(-self.rows.num_held // ROWS_PER_SPARE_BLOCK)
        if needed + spare > self.blocks.num_free:
            self.blocks.release(match.blocks)
            return False
        sequence.blocks = match.blocks + self.blocks.allocate(needed)
        return True

    def _place_followers(self, leader: Sequence, length: int) -> None:
        """Lets waiting samples of the same prompt in that fit; they take over what the leader computes."""
        shared = length // self.blocks.block_size
        spare = -(-self.rows.num_held // ROWS_PER_SPARE_BLOCK)
        while self.waiting and self.rows.num_free and not len(leader.output):
            follower = self.waiting[0]
            if follower.prompt is not leader.prompt or len(follower.output) or 1 + spare > self.blocks.num_free:
                break
            self.waiting.popleft()
            self.blocks.share(leader.blocks[:shared])
            follower.blocks = leader.blocks[:shared] + self.blocks.allocate(1)
            self.rows.place(follower)
            leader.followers.append(follower)

    def start(self, sequence: Sequence) -> None:
        """The sequence's prefill has been launched: from now on it decodes."""
        row = sequence.row
        sequence.computed = self.rows.length[row] = len(sequence.prompt) + int(self.rows.count[row])
        self.rows.room[row] = len(sequence.blocks) * self.blocks.block_size
        self.rows.alive[row] = True

    def register(self, sequence: Sequence, length: int, tokens: np.ndarray) -> list[int]:
        """Makes the first `length` tokens findable; returns the places of blocks that were not."""
        if not self.caching or length < self.blocks.block_size:
            return []
        return self.blocks.register(sequence.named(tokens[:length]), sequence.blocks)

    def remove(self, sequence: Sequence) -> None:
        """Takes row and blocks back."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        followers, sequence.followers = sequence.followers, []
        if followers:
            # The first of them carries the prefill on from nothing.
            for follower in followers:
                self._give_back(follower)
            self.waiting.extendleft(reversed(followers))
        for leader in self.prefilling:
            if sequence in leader.followers:
                leader.followers.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        if self.before_leaving is not None and self.rows.alive[sequence.row]:
            self.before_leaving(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self.rows.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a sequence back to the head of the queue; what it computed is lost, what it sampled is not."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def restart(self) -> None:
        """Sends every running sequence back to the queue, in the order they came, and forgets all cached blocks."""
        for sequence in self.rows.held():
            if sequence.row >= 0:
                self.remove(sequence)
                self.waiting.append(sequence)
        self.blocks.flush()
        self.waiting = deque(sorted(self.waiting, key=lambda s: s.arrival))

    def take(self, wanted: Iterable[str]) -> list[Sequence]:
        """Takes the sequences of these requests out of queue and rows."""
        names = set(wanted)
        taken = [sequence for sequence in self.waiting if sequence.request_id in names]
        if taken:
            self.waiting = deque(sequence for sequence in self.waiting if sequence.request_id not in names)
        running = [sequence for sequence in self.rows.held() if sequence.request_id in names]
        for sequence in running:
            if sequence.row >= 0:
                self.remove(sequence)
        # A follower may have gone back to the queue when its leader left.
        again = {id(s) for s in self.waiting if s.request_id in names}
        if again:
            self.waiting = deque(s for s in self.waiting if id(s) not in again)
        return taken + running
