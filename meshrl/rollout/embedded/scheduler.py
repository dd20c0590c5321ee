"""The scheduler of the embedded rollout, its table of running sequences (`Rows`), and its block manager.

Every step decodes all running sequences first, then computes prefill chunks under the token budget. Waiting sequences
enter in the order of arrival, as rows, blocks and budget allow. Samples of one prompt enter together and share its
prefill. A sequence whose next block is being computed by another sequence waits one step and finds the block in the
cache. If blocks run out, the sequence that arrived last releases its blocks and is recomputed later.
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

# One free block per this many held rows is kept in reserve when a new sequence is admitted.
ROWS_PER_SPARE_BLOCK = 4
# Prefill is launched as soon as its chunks have this many tokens.
LAUNCH_TOKENS = 16384
# The largest number of sequences waiting for another sequence's block that admission skips.
MOST_SKIPPED = 1024


@dataclass(frozen=True)
class Piece:
    """A prefill chunk: tokens [start, start + len(tokens)) of a sequence.

    If `is_last`, the sequence's next token can be sampled after the chunk.
    """

    sequence: RunningSequence
    tokens: np.ndarray
    start: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Scheduler:
    """The owner of the queue, which decides which sequences hold rows and blocks."""

    def __init__(self, rows: Rows, blocks: BlockManager, max_tokens: int, *, caching: bool = True):
        self.rows, self.blocks, self.max_tokens, self.caching = rows, blocks, max_tokens, caching
        self.waiting: deque[RunningSequence] = deque()
        self.prefilling: list[RunningSequence] = []
        self.preemptions = self.cached_tokens = self.prompt_tokens = 0
        self.loads: list[tuple[RunningSequence, int]] = []  # and how many cached tokens to load
        # Called with each sequence that has decoded, before the sequence releases its blocks.
        self.before_leaving: Callable[[RunningSequence], None] | None = None

    def has_work(self) -> bool:
        return bool(self.waiting) or self.rows.num_held > 0

    def rows_to_grow(self) -> np.ndarray:
        """Return the alive rows whose next token needs a new block."""
        rows = self.rows
        return (rows.alive & (rows.length >= rows.room) & (rows.launched < rows.limit)).nonzero()[0]

    def is_short(self) -> bool:
        """Return whether running sequences need more blocks than are free."""
        return len(self.rows_to_grow()) > self.blocks.num_free

    def schedule(self) -> Iterator[list[Piece]]:
        """Allocate a place for every running row's next token, then yield the prefill chunks of this step.

        The chunks come in groups. Each group must be launched before the next one is requested, so that a device works
        on the first group while later sequences are admitted.
        """
        self._grow()
        # At least 1, so that long prompts advance even if the decoding rows alone use up the budget.
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
        """Yield chunks of prompts in progress, then of new prompts.

        `in_work` has the keys of blocks that chunks of the same group compute.
        """
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
        """Assign rows to a sequence and to its followers, and return the sequence's first prefill chunk."""
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
        # A prompt with images is computed in one chunk, because its images are encoded as a whole.
        most = len(tokens) if sequence.images else budget
        start, end = sequence.computed, min(len(tokens), sequence.computed + most)
        sequence.computed = end
        for taker in (sequence, *sequence.followers):
            self.rows.length[taker.row] = end
        if end == len(tokens):
            self.prefilling.remove(sequence)
        return Piece(sequence, tokens[start:end], start, end == len(tokens))

    def _match(self, sequence: RunningSequence, tokens: np.ndarray) -> Match:
        # At least the last token is recomputed, because the next token is sampled from its logits.
        if not self.caching or len(tokens) <= self.blocks.block_size or not self._wants_cache(sequence):
            return Match([], 0, None)
        return self.blocks.match(sequence.named(tokens), len(tokens) - 1)

    def _wants_cache(self, sequence: RunningSequence) -> bool:
        """Return whether to look for a sequence's prefix in the cache.

        Sequences of a training batch only reuse prompts of their own batch, if a group of samples was split or
        restarted.
        """
        return sequence.cacheable or bool(len(sequence.output)) or sequence.index > 0

    def _take_blocks(self, sequence: RunningSequence, length: int, match: Match) -> bool:
        """Allocate blocks for all tokens and the next one; return False if too few would be left for running rows."""
        self.blocks.share(match.blocks)
        needed = self.blocks.blocks_for(length + 1) - len(match.blocks)
        spare = -(-self.rows.num_held // ROWS_PER_SPARE_BLOCK)
        if needed + spare > self.blocks.num_free:
            self.blocks.release(match.blocks)
            return False
        sequence.blocks = match.blocks + self.blocks.allocate(needed)
        return True

    def _place_followers(self, leader: RunningSequence, length: int) -> None:
        """Admit waiting samples of the leader's prompt as followers, as far as rows and blocks allow.

        Followers share the leader's full blocks and use its prefill.
        """
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
        """Mark the sequence's row as decoding, after its prefill has been launched."""
        row = sequence.row
        sequence.computed = self.rows.length[row] = len(sequence.prompt) + int(self.rows.count[row])
        self.rows.room[row] = len(sequence.blocks) * self.blocks.block_size
        self.rows.alive[row] = True

    def register(self, sequence: RunningSequence, length: int, tokens: np.ndarray) -> list[int]:
        """Register the blocks of the first `length` tokens in the prefix cache; return the places of new blocks."""
        if not self.caching or length < self.blocks.block_size:
            return []
        return self.blocks.register(sequence.named(tokens[:length]), sequence.blocks)

    def remove(self, sequence: RunningSequence) -> None:
        """Release a sequence's row and blocks. Its followers return to the head of the queue."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        followers, sequence.followers = sequence.followers, []
        if followers:
            # The first follower starts the prefill again from the beginning.
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
        """Return a sequence to the head of the queue. Its KV cache is lost, its sampled tokens are kept."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def restart(self) -> None:
        """Return all running sequences to the queue, in the order of arrival, and forget all cached blocks."""
        for sequence in self.rows.held():
            if sequence.row >= 0:
                self.remove(sequence)
                self.waiting.append(sequence)
        self.blocks.flush()
        self.waiting = deque(sorted(self.waiting, key=lambda s: s.arrival))

    def take(self, wanted: Iterable[str]) -> list[RunningSequence]:
        """Remove the sequences of these requests from queue and rows, and return them."""
        names = set(wanted)
        taken = [sequence for sequence in self.waiting if sequence.request_id in names]
        if taken:
            self.waiting = deque(sequence for sequence in self.waiting if sequence.request_id not in names)
        running = [sequence for sequence in self.rows.held() if sequence.request_id in names]
        for sequence in running:
            if sequence.row >= 0:
                self.remove(sequence)
        # A follower may have returned to the queue when its leader was removed.
        again = {id(s) for s in self.waiting if s.request_id in names}
        if again:
            self.waiting = deque(s for s in self.waiting if id(s) not in again)
        return taken + running


# Sequences and the rows that they hold while running. The state of all rows is in arrays, so a step has no loop over
# rows.

_arrivals = itertools.count()
FIRST_WIDTH = 64


@dataclass(eq=False)
class RunningSequence:
    """One completion in progress. Its tokens are in the row that it holds, otherwise in `output` and `log_probs`."""

    request_id: str
    index: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    limit: int  # the largest number of tokens to sample: max_tokens, or what the context leaves
    sink: Any = None  # destination of the finished completion, if it is not delivered in chunks
    streams: bool = False
    cacheable: bool = True
    images: Images = ()
    names: np.ndarray | None = None  # the prompt's tokens as the cache identifies them, if token ids are ambiguous
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are computed or being computed
    followers: list[RunningSequence] = field(
        default_factory=list
    )  # samples of the same prompt that wait for this prefill
    sent: int = 0  # tokens delivered in chunks
    output: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    log_probs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token, version)
    routes: list[Tensor] = field(default_factory=list)  # routes of the first tokens, in parts; see RouteStore
    arrival: int = field(default_factory=lambda: next(_arrivals))

    def __post_init__(self) -> None:
        p = self.params
        # Whether a token may need adjusted logits, or sampling parameters besides a temperature.
        self.adjusts = p.repetition_penalty != 1 or bool(p.logit_bias) or p.min_tokens > 0
        self.is_special = self.adjusts or p.top_k > 0 or p.top_p < 1 or p.min_p > 0 or p.top_log_probs > 0

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and sampled tokens of a sequence without a row."""
        return np.concatenate([self.prompt, self.output]) if len(self.output) else self.prompt

    def named(self, tokens: np.ndarray) -> np.ndarray:
        """Return the sequence's first tokens as the cache identifies them."""
        if self.names is None:
            return tokens
        return np.concatenate([self.names, tokens[len(self.names) :]])[: len(tokens)]

    def tokens_with(self, rows: Rows) -> np.ndarray:
        """Return prompt and sampled tokens of a sequence with a row."""
        return np.concatenate([self.prompt, rows.answer(self)[0]])

    def mark(self, count: int, version: int) -> None:
        """Record that tokens from number `count` on are sampled with `version`."""
        if self.spans and self.spans[-1][0] == count:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((count, version))

    def versions(self, start: int, end: int) -> np.ndarray:
        """Return the version of each token in [start, end)."""
        made = np.empty(end - start, np.int32)
        for first, version in self.spans:
            made[max(first - start, 0) :] = version
        return made


class Rows:
    """The rows of the running batch. `length` counts tokens with keys and values, `count` counts sampled tokens.

    A row is empty, in prefill, or decoding (`alive`). `launched` counts tokens whose sampling has been launched, which
    is ahead of `count` on a GPU. The position id of a token after images is its index in the sequence minus `shift`.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.sequences: list[RunningSequence | None] = [None] * capacity
        self.length, self.count, self.launched, self.limit, self.floor, self.room, self.seed, self.shift = (
            np.zeros(capacity, np.int64) for _ in range(8)
        )
        self.alive = np.zeros(capacity, bool)
        # identifies the sequence in the row, by the value of `composition` when it was placed
        self.placement = np.zeros(capacity, np.int64)
        self.stops = np.full((capacity, 1), -1, np.int64)
        self.tokens = np.zeros((capacity, FIRST_WIDTH), np.int64)
        self.log_probs = np.zeros((capacity, FIRST_WIDTH), np.float32)
        self._free = list(range(capacity))
        self.composition = 0  # changes whenever a row gets another sequence

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.capacity - len(self._free)

    @property
    def end(self) -> int:
        """The end of the decoding rows: all rows from here on are empty or in prefill."""
        alive = self.alive.nonzero()[0]
        return int(alive[-1]) + 1 if len(alive) else 0

    def held(self) -> list[RunningSequence]:
        """Return all sequences that hold a row, in the order of their rows."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def place(self, sequence: RunningSequence) -> None:
        """Assign the first free row to the sequence and copy the sequence's state into the row."""
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
        """Release the sequence's row. The sequence keeps its sampled tokens and log-probs."""
        row = sequence.row
        sequence.output, sequence.log_probs = self.answer(sequence)
        self.sequences[row] = None
        self.alive[row] = False
        self.length[row] = self.room[row] = 0
        sequence.row = -1
        heapq.heappush(self._free, row)

    def answer(self, sequence: RunningSequence, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the tokens and log-probs from number `start` on."""
        row = sequence.row
        part = slice(start, int(self.count[row]))
        return self.tokens[row, part].copy(), self.log_probs[row, part].copy()

    def write(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """Append one token to each of these rows; return how each row has ended (1: stop, 2: length, 0: not ended)."""
        places = self.count[rows]
        self._widen(int(places.max()) + 1)
        self.tokens[rows, places] = tokens
        self.log_probs[rows, places] = log_probs
        places = places + 1
        self.count[rows] = places
        stopped = (tokens[:, None] == self.stops[rows]).any(1) & (places > self.floor[rows])
        return np.where(stopped, 1, np.where(places >= self.limit[rows], 2, 0))

    def gaps(self) -> list[tuple[int, int]]:
        """Return moves (from, to) of the last alive rows into gaps, such that no gap is left after the moves."""
        alive = self.alive.nonzero()[0]
        empty = [row for row in range(len(alive)) if not self.alive[row]]
        # A row in prefill is not a gap and stays in place.
        targets = [row for row in empty if self.sequences[row] is None]
        sources = [int(row) for row in alive[::-1] if row >= len(alive)]
        return list(zip(sources, targets, strict=False))

    def move(self, source: int, target: int) -> None:
        """Move a sequence from row `source` to the empty row `target`."""
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


# The block manager of the KV cache. A block of tokens is free, in use by one or more sequences, or kept for later.
#
# A full block with known tokens can be *registered* under its content: its tokens and the block before it. When no
# sequence uses the block any more, it can still be found until its memory is needed. The block that has been unused
# for the longest time is evicted first.

# The serial number of the block before (0: none), and the tokens. Serial numbers are never reused, so a key identifies
# one exact prefix. Keys are not hashes, so two prefixes cannot be confused.
Key = tuple[int, bytes]
ROOT = 0


@dataclass(frozen=True)
class Match:
    """The cached blocks of a prefix, the last one's serial number, and the key of the first missing block."""

    blocks: list[int]
    serial: int
    missing: Key | None


class BlockManager:
    """The allocator of blocks by number. A block is free, in use (with a count of its users), or idle but cached."""

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
        """The number of blocks that can be allocated: never used, released, or idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """The number of blocks that can be found by their content."""
        return len(self._found)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks this many tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks. Idle blocks are taken last. The caller must check that enough are free (`num_free`)."""
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
        """Increment the user count of each of these blocks."""
        for block in blocks:
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the user count of each of these blocks. The last idle block of a sequence is evicted first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} was given back twice"
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def match(self, tokens: Sequence[int] | np.ndarray, most: int) -> Match:
        """Return the longest cached prefix of `tokens` within the first `most` tokens. Allocates no blocks."""
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
        """Register the full blocks of `tokens`; return the places in `blocks` of newly registered blocks."""
        serial, new = ROOT, []
        for place, content in enumerate(self._contents(tokens)):
            key = (serial, content)
            found = self._found.get(key)
            if found is None:
                if blocks[place] in self._key_of:
                    break  # registered after a prefix that has been evicted since, so it cannot be found any more
                self._serial += 1
                found = self._found[key] = (blocks[place], self._serial)
                self._key_of[blocks[place]] = key
                new.append(place)
            serial = found[1]
        return new

    def _contents(self, tokens: Sequence[int] | np.ndarray) -> Iterator[bytes]:
        """Return an iterator over the contents of full blocks, each as the bytes of its int64 tokens."""
        data, width = np.asarray(tokens, np.int64).tobytes(), 8 * self.block_size
        return (data[start : start + width] for start in range(0, len(data) - width + 1, width))

    def flush(self) -> None:
        """Forget all cached contents, for example after new weights."""
        self._found.clear()
        self._key_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        del self._found[self._key_of.pop(block)]
