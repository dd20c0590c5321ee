"""Which sequences compute what in the next step: decoding first, then prefill pieces under the token budget.

Waiting sequences enter in the order they came, as rows, blocks and budget allow. Samples of one prompt enter together
and share its prefill. A sequence whose next block is just being computed by another waits one step and finds it in the
cache. When blocks run out, the sequence that came last gives its blocks back and is computed again later.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from meshrl.data.images import Images
from meshrl.rollout.requests import SamplingParams

# Of every so many running rows, one free block is kept back when a new sequence wants in.
ROWS_PER_SPARE_BLOCK = 4
# Prefill is launched as soon as this many tokens have come together.
LAUNCH_TOKENS = 16384
# How far admission looks past sequences that wait for a block of another.
MOST_SKIPPED = 1024


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + len(tokens)) of a sequence to compute; `is_last`: then its next token can be sampled."""

    sequence: RunningSequence
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
        self.waiting: deque[RunningSequence] = deque()
        self.prefilling: list[RunningSequence] = []
        self.preemptions = self.cached_tokens = self.prompt_tokens = 0
        self.loads: list[tuple[RunningSequence, int]] = []  # rows that take so many tokens over from cached blocks
        # Hears of sequences that have computed something, before they give their blocks back.
        self.before_leaving: Callable[[RunningSequence], None] | None = None

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
        skipped: list[RunningSequence] = []
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

    def _enter(self, sequence: RunningSequence, length: int, cached_blocks: int, budget: int) -> Piece:
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

    def _piece(self, sequence: RunningSequence, budget: int) -> Piece:
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

    def _match(self, sequence: RunningSequence, tokens: np.ndarray) -> Match:
        # At least the last token is computed again: the next one is sampled from its logits.
        if not self.caching or len(tokens) <= self.blocks.block_size or not self._wants_cache(sequence):
            return Match([], 0, None)
        return self.blocks.match(sequence.named(tokens), len(tokens) - 1)

    def _wants_cache(self, sequence: RunningSequence) -> bool:
        """A batch for training finds nothing in the cache but its own prompts: those of split or restarted groups."""
        return sequence.cacheable or bool(len(sequence.output)) or sequence.index > 0

    def _take_blocks(self, sequence: RunningSequence, length: int, match: Match) -> bool:
        """Takes the blocks of all tokens and the next, but only while enough are left for the rows that run."""
        self.blocks.share(match.blocks)
        needed = self.blocks.blocks_for(length + 1) - len(match.blocks)
        spare = -(-self.rows.num_held // ROWS_PER_SPARE_BLOCK)
        if needed + spare > self.blocks.num_free:
            self.blocks.release(match.blocks)
            return False
        sequence.blocks = match.blocks + self.blocks.allocate(needed)
        return True

    def _place_followers(self, leader: RunningSequence, length: int) -> None:
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

    def start(self, sequence: RunningSequence) -> None:
        """The sequence's prefill has been launched: from now on it decodes."""
        row = sequence.row
        sequence.computed = self.rows.length[row] = len(sequence.prompt) + int(self.rows.count[row])
        self.rows.room[row] = len(sequence.blocks) * self.blocks.block_size
        self.rows.alive[row] = True

    def register(self, sequence: RunningSequence, length: int, tokens: np.ndarray) -> list[int]:
        """Makes the first `length` tokens findable; returns the places of blocks that were not."""
        if not self.caching or length < self.blocks.block_size:
            return []
        return self.blocks.register(sequence.named(tokens[:length]), sequence.blocks)

    def remove(self, sequence: RunningSequence) -> None:
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

    def _give_back(self, sequence: RunningSequence) -> None:
        if self.before_leaving is not None and self.rows.alive[sequence.row]:
            self.before_leaving(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self.rows.remove(sequence)

    def preempt(self, sequence: RunningSequence) -> None:
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

    def take(self, wanted: Iterable[str]) -> list[RunningSequence]:
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


# Sequences and the rows they hold while they run. Numbers of all rows lie in arrays: no loop over rows in a step.

_arrivals = itertools.count()
FIRST_WIDTH = 64


@dataclass(eq=False)
class RunningSequence:
    """One answer in the making. While it holds a row, its tokens lie there; else in `output` and `log_probs`."""

    request_id: str
    index: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    limit: int  # most tokens to sample: max_tokens, or what the context leaves
    sink: Any = None  # where the answer goes at its end, if not into chunks
    streams: bool = False
    cacheable: bool = True
    images: Images = ()
    names: np.ndarray | None = None  # of the prompt's tokens in the cache, where ids do not tell
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are (being) computed
    followers: list[RunningSequence] = field(
        default_factory=list
    )  # samples of the same prompt that wait for its prefill
    sent: int = 0  # tokens handed out in chunks
    output: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    log_probs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token, version)
    routes: list[Tensor] = field(default_factory=list)  # where its first tokens went, in pieces; see RouteStore
    arrival: int = field(default_factory=lambda: next(_arrivals))

    def __post_init__(self) -> None:
        p = self.params
        # Whether a token may need other logits than the model's, or more sampling than a temperature.
        self.adjusts = p.repetition_penalty != 1 or bool(p.logit_bias) or p.min_tokens > 0
        self.is_special = self.adjusts or p.top_k > 0 or p.top_p < 1 or p.min_p > 0 or p.top_log_probs > 0

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and answer so far, of a sequence without a row."""
        return np.concatenate([self.prompt, self.output]) if len(self.output) else self.prompt

    def named(self, tokens: np.ndarray) -> np.ndarray:
        """First tokens of this sequence by the names that the cache knows them by."""
        if self.names is None:
            return tokens
        return np.concatenate([self.names, tokens[len(self.names) :]])[: len(tokens)]

    def tokens_with(self, rows: Rows) -> np.ndarray:
        """Prompt and answer so far, of a sequence with a row."""
        return np.concatenate([self.prompt, rows.answer(self)[0]])

    def mark(self, count: int, version: int) -> None:
        """From its token number `count` on, this answer is sampled with `version`."""
        if self.spans and self.spans[-1][0] == count:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((count, version))

    def versions(self, start: int, end: int) -> np.ndarray:
        """The version of each token in [start, end)."""
        made = np.empty(end - start, np.int32)
        for first, version in self.spans:
            made[max(first - start, 0) :] = version
        return made


class Rows:
    """Rows of the running batch. `length` counts tokens with keys and values, `count` sampled tokens.

    A row is empty, waiting for its prefill, or alive (`alive`: it decodes). `launched` counts tokens whose sampling has
    been started; on a GPU that runs ahead of `count`. The position of a token behind images is its place in the
    sequence less `shift`.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.sequences: list[RunningSequence | None] = [None] * capacity
        self.length, self.count, self.launched, self.limit, self.floor, self.room, self.seed, self.shift = (
            np.zeros(capacity, np.int64) for _ in range(8)
        )
        self.alive = np.zeros(capacity, bool)
        self.placement = np.zeros(capacity, np.int64)  # which sequence, by the number of placements before it
        self.stops = np.full((capacity, 1), -1, np.int64)
        self.tokens = np.zeros((capacity, FIRST_WIDTH), np.int64)
        self.log_probs = np.zeros((capacity, FIRST_WIDTH), np.float32)
        self._free = list(range(capacity))
        self.composition = 0  # moves on whenever a row changes hands

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.capacity - len(self._free)

    @property
    def end(self) -> int:
        """All rows from here on are empty or wait for their prefill."""
        alive = self.alive.nonzero()[0]
        return int(alive[-1]) + 1 if len(alive) else 0

    def held(self) -> list[RunningSequence]:
        """All sequences that hold a row."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def place(self, sequence: RunningSequence) -> None:
        """Gives the sequence the first free row."""
        row = sequence.row = heapq.heappop(self._free)
        self.sequences[row] = sequence
        params, count = sequence.params, len(sequence.output)
        self.length[row], self.alive[row] = 0, False
        self.count[row] = self.launched[row] = count
        self.limit[row], self.floor[row], self.seed[row] = sequence.limit, params.min_tokens, sequence.seed
        stops = params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.capacity, len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        if count:
            self._widen(count)
            self.tokens[row, :count], self.log_probs[row, :count] = sequence.output, sequence.log_probs
        self.composition += 1
        self.placement[row] = self.composition

    def remove(self, sequence: RunningSequence) -> None:
        """Takes the row back; the sequence keeps its answer so far."""
        row = sequence.row
        sequence.output, sequence.log_probs = self.answer(sequence)
        self.sequences[row] = None
        self.alive[row] = False
        self.length[row] = self.room[row] = 0
        sequence.row = -1
        heapq.heappush(self._free, row)

    def answer(self, sequence: RunningSequence, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """A copy of the tokens and log-probs from number `start` on."""
        row = sequence.row
        part = slice(start, int(self.count[row]))
        return self.tokens[row, part].copy(), self.log_probs[row, part].copy()

    def write(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """Appends one token to each of these rows; returns which of them have ended (1: stop, 2: length, 0: not)."""
        places = self.count[rows]
        self._widen(int(places.max()) + 1)
        self.tokens[rows, places] = tokens
        self.log_probs[rows, places] = log_probs
        places = places + 1
        self.count[rows] = places
        stopped = (tokens[:, None] == self.stops[rows]).any(1) & (places > self.floor[rows])
        return np.where(stopped, 1, np.where(places >= self.limit[rows], 2, 0))

    def gaps(self) -> list[tuple[int, int]]:
        """Moves (from, to) of the last alive rows into gaps, after which no gap is left."""
        alive = self.alive.nonzero()[0]
        empty = [row for row in range(len(alive)) if not self.alive[row]]
        # A row that waits for its prefill is no gap; it stays where it is.
        targets = [row for row in empty if self.sequences[row] is None]
        sources = [int(row) for row in alive[::-1] if row >= len(alive)]
        return list(zip(sources, targets, strict=False))

    def move(self, source: int, target: int) -> None:
        """Moves a sequence to an empty row."""
        sequence = self.sequences[source]
        assert sequence is not None
        for x in (self.length, self.count, self.launched, self.limit, self.floor, self.room, self.seed, self.shift):
            x[target] = x[source]
        self.alive[target], self.placement[target] = self.alive[source], self.placement[source]
        self.stops[target], self.tokens[target], self.log_probs[target] = (
            x[source] for x in (self.stops, self.tokens, self.log_probs)
        )
        self.sequences[target], self.sequences[source] = sequence, None
        self.alive[source] = False
        self.length[source] = self.room[source] = 0
        sequence.row = target
        self._free.remove(target)
        heapq.heapify(self._free)
        heapq.heappush(self._free, source)
        self.composition += 1

    def _widen(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            more = max(width, 2 * self.tokens.shape[1]) - self.tokens.shape[1]
            self.tokens = np.pad(self.tokens, ((0, 0), (0, more)))
            self.log_probs = np.pad(self.log_probs, ((0, 0), (0, more)))


# The bookkeeping of the KV cache: blocks of tokens that are free, in use by several sequences, or kept for later.
#
# A full block whose tokens are known can be *registered* under its content: the tokens and the block before it. When
# nobody uses it any more it stays findable until its memory is needed (the longest unused goes first).

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
