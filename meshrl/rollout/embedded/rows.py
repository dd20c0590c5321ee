"""Sequences and the rows they hold while they run. Numbers of all rows lie in arrays: no loop over rows in a step."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from meshrl.data.seen import Images
from meshrl.rollout.requests import SamplingParams

_arrivals = itertools.count()
FIRST_WIDTH = 64


@dataclass(eq=False)
class Sequence:
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
    followers: list[Sequence] = field(default_factory=list)  # samples of the same prompt that wait for its prefill
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
        self.sequences: list[Sequence | None] = [None] * capacity
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

    def held(self) -> list[Sequence]:
        """All sequences that hold a row."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def place(self, sequence: Sequence) -> None:
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

    def remove(self, sequence: Sequence) -> None:
        """Takes the row back; the sequence keeps its answer so far."""
        row = sequence.row
        sequence.output, sequence.log_probs = self.answer(sequence)
        self.sequences[row] = None
        self.alive[row] = False
        self.length[row] = self.room[row] = 0
        sequence.row = -1
        heapq.heappush(self._free, row)

    def answer(self, sequence: Sequence, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
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
