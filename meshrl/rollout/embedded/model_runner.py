"""Runners of the embedded rollout's model: prefill chunks, then one sampled token for every running row.

Parts: `RouteStore` for MoE routes, the base class `Runner`, and `SlotRunner` for CPUs. See `cuda_runner` for GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.data.images import Seen
from meshrl.models.loading import body_of, logit_scaling_of, scale_logits_
from meshrl.models.moe_routing import Routers
from meshrl.models.vision import Deep, Sight
from meshrl.parallel.attention import AttentionContext, check_layers, hand_contexts_down
from meshrl.parallel.linear_attention import enter_recurrences
from meshrl.rollout.embedded.kv_cache import (
    PieceStates,
    SlotCache,
    SlotDecode,
    SlotPrefill,
    StateStore,
    untouched_zeros,
)
from meshrl.rollout.embedded.layers import FAMILIES, SEEING_FAMILIES, WITH_EXPERTS, PlainLayers, is_plain
from meshrl.rollout.embedded.parallel import Parts, TensorParallel
from meshrl.rollout.embedded.sampler import Adjuster, Sampled, Settings, sample
from meshrl.rollout.embedded.scheduler import Piece, Rows, RunningSequence

# Routes of running sequences are stored in the slots of the cache's blocks, like keys and values. So a sequence that
# finds a prefix in the cache also finds the prefix's routes. Routes take only some hundred bytes per token.


class RouteStore:
    """The MoE routes of every cache slot. The block after the last one takes the routes of unused tokens."""

    def __init__(self, hf_model: PreTrainedModel, rows: Rows, num_blocks: int, block_size: int, device: torch.device):
        self.routers, self.rows = Routers(hf_model), rows
        self.num_slots, self.block_size, self.device = (num_blocks + 1) * block_size, block_size, device
        self._kept: Tensor | None = None

    def write(self, slots: Tensor) -> None:
        """Store the routes of the last forward pass, one token per slot. `slots` is `[tokens]`."""
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
        """Store the routes of prefill chunks, in the order of their tokens."""
        slots = [self._slots(piece.sequence.blocks, piece.start, piece.end) for piece in pieces]
        self.write(torch.from_numpy(np.concatenate(slots)).to(self.device))

    def copy_to_followers(self, leader: RunningSequence) -> None:
        """Copy the routes in the prompt's partly filled last block to the followers' own last blocks."""
        place, used = divmod(leader.computed, self.block_size)
        if leader.followers and used:
            assert self._kept is not None
            blocks = self._kept.unflatten(0, (-1, self.block_size))
            blocks[[follower.blocks[place] for follower in leader.followers]] = blocks[leader.blocks[place]].clone()

    def write_rows(self, alive: np.ndarray) -> None:
        """Store the routes of the next token of alive rows.

        The forward pass had all rows up to the last alive one. Routes of the other rows go to the unused block.
        """
        lengths = self.rows.length[alive].tolist()
        held = [self.rows.sequences[row] for row in alive.tolist()]
        slots = np.full(int(alive[-1]) + 1, self.num_slots - 1)
        slots[alive] = [
            sequence.blocks[at // self.block_size] * self.block_size + at % self.block_size
            for sequence, at in zip(held, lengths, strict=True)
            if sequence is not None
        ]
        self.write(torch.from_numpy(slots))

    def keep(self, sequence: RunningSequence) -> None:
        """Append to a sequence the routes that it does not have yet, before it releases its blocks.

        Routes that the sequence has already are kept. The weights may have changed since, but those routes produced the
        sampled tokens.
        """
        if self._kept is None:
            return
        end = len(sequence.prompt) + int(self.rows.count[sequence.row]) - 1
        start = sum(map(len, sequence.routes))
        if start < end:
            slots = torch.from_numpy(self._slots(sequence.blocks, start, end)).to(self.device)
            sequence.routes.append(self._kept[slots].to("cpu", non_blocking=True))

    def drop(self) -> None:
        """Free the memory of the routes of all slots."""
        self._kept = None

    def _slots(self, blocks: Seq[int], start: int, end: int) -> np.ndarray:
        places = np.arange(start, end)
        return np.array(blocks)[places // self.block_size] * self.block_size + places % self.block_size


def whole_routes(parts: list[Tensor]) -> np.ndarray | None:
    """Concatenate all routes of a sequence that has released its row; return None if no routes were recorded."""
    if not parts:
        return None
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies to the host may still be in progress
    return torch.cat(parts).numpy()


# Gaps among the decoding rows are closed when they make up this share of the rows.
REPACK_SHARE = 0.25


@dataclass
class Launch:
    """Tokens that have been sampled or are being sampled, one for each of `sequences`."""

    sequences: list[RunningSequence]
    sampled: Sampled

    places: np.ndarray | None = None  # indices of the sequences' tokens in `sampled`, if not consecutive

    def wait(self) -> Sampled:
        """Wait for the device and return the sampled tokens on the CPU."""
        return self.sampled

    def live(self) -> tuple[list[RunningSequence], np.ndarray | None]:
        """Return the sequences that have not ended since the launch, and the indices of their tokens."""
        if all(sequence.row >= 0 for sequence in self.sequences):
            return self.sequences, self.places
        kept = [at for at, sequence in enumerate(self.sequences) if sequence.row >= 0]
        places = np.array(kept) if self.places is None else self.places[kept]
        return [self.sequences[at] for at in kept], places


class Runner(ABC):
    """The base class of runners: stores keys and values, runs the model and samples. It works on rows, not requests."""

    # The number of launches that may be pending before the oldest one's tokens are processed.
    lag = 0

    def __init__(
        self,
        hf_model: PreTrainedModel,
        rows: Rows,
        *,
        owns_weights: bool,
        vocabulary: int,
        parallel: Parts | None = None,
        routes: RouteStore | None = None,
        in_8_bits: bool = False,
        sight: Sight | None = None,
    ):
        self.hf_model: Any = hf_model
        self.sight = sight
        self.in_8_bits, self.scaling = in_8_bits, logit_scaling_of(hf_model.config)
        self.rows, self.parallel, self.routes = rows, parallel, routes
        self.device = next(hf_model.parameters()).device
        self.states = StateStore(rows.capacity, self.device) if enter_recurrences(hf_model) else None
        hand_contexts_down(hf_model)
        is_known = is_plain(hf_model, FAMILIES + SEEING_FAMILIES + WITH_EXPERTS)
        self.plain = self._plain_layers(owns_weights) if is_known else None
        self.adjuster = Adjuster(rows, vocabulary, self.device)
        self._settings: tuple[int, int, Settings, bool] | None = None
        self._is_checked = False

    @abstractmethod
    def load(self, sequence: RunningSequence, length: int) -> None:
        """Load a cached prefix of `length` tokens into the sequence's row."""

    @abstractmethod
    def store(self, sequence: RunningSequence, places: Seq[int]) -> None:
        """Store blocks number `places` of a sequence in the prefix cache."""

    @abstractmethod
    def prefill(self, pieces: Seq[Piece]) -> Launch | None:
        """Compute prefill chunks. For each completed prompt, sample a token for the sequence and its followers."""

    @abstractmethod
    def decode(self) -> Launch | None:
        """Compute the last token of every running row and sample the next token.

        Returns None if no row needs a token.
        """

    def drop_cache(self) -> None:
        """Free the memory of keys, values and recurrent states."""
        if self.routes is not None:
            self.routes.drop()
        if self.states is not None:
            self.states.drop()

    def piece_states(self, pieces: Seq[Piece]) -> PieceStates | None:
        """Return the reader and writer of recurrent states for prefill chunks, or None for a model without states."""
        return None if self.states is None else PieceStates(self.states, pieces)

    def refresh(self) -> None:
        """Update all derived state after the weights have changed, possibly in place."""
        if self.plain is not None:
            self.plain.refresh()

    def drop_weights(self) -> None:
        """Free the memory of the weights and forget the fused layers."""
        self._shapes = {name: p.shape for name, p in self.hf_model.named_parameters()}
        for param in self.hf_model.parameters():
            param.data = param.data.new_empty(0)
        if self.plain is not None:
            self.plain.forget()

    def drop_copies(self) -> None:
        """Free the FP8 copies of weights that are shared with the trainer."""
        if self.plain is not None and self.in_8_bits:
            self.plain.forget()

    def take_copies(self) -> None:
        """Make the FP8 copies of shared weights again, unless they exist."""
        if self.plain is not None and self.in_8_bits and not self.plain.layers:
            self.refresh()

    def take_weights(self) -> None:
        """Allocate memory for the weights again. Their values have to be sent by a sync."""
        for name, param in self.hf_model.named_parameters():
            param.data = param.data.new_zeros(self._shapes[name])
        if self.plain is not None:
            self.plain = self._plain_layers(owns_weights=True)

    def _plain_layers(self, owns_weights: bool) -> PlainLayers:
        parallel = self.parallel if isinstance(self.parallel, TensorParallel) else None
        return PlainLayers(self.hf_model, owns_weights, parallel, self.in_8_bits)

    def hidden(
        self, ids: Tensor, positions: Tensor, context: AttentionContext, one_each: bool, seen: Seen | None = None
    ) -> Tensor:
        """Return the last hidden states `[tokens, hidden]`. `seen` has the images among the tokens, if any."""
        if self.plain is not None:
            x, positions, deep = self.vectors(self.plain, ids, positions, seen)
            return self.plain(x, positions, context, one_each, deep)
        model: Any = body_of(self.hf_model)
        inputs: dict[str, Any] = {"input_ids": ids[:, None] if one_each else ids[None]}
        positions = positions[:, None] if one_each else positions[None]
        if seen is not None:
            assert self.sight is not None
            model, inputs = model.language_model, self.sight.inputs(self.hf_model, ids, seen)
            positions = seen.positions[:, None]
        out = model(position_ids=positions, use_cache=False, attention_context=context, **inputs)
        if not self._is_checked:
            check_layers(self.hf_model)
            self._is_checked = True
        return out.last_hidden_state.flatten(0, 1)

    def vectors(
        self, plain: PlainLayers, ids: Tensor, positions: Tensor, seen: Seen | None
    ) -> tuple[Tensor, Tensor, Deep | None]:
        """Return the first layer's input, the position ids, and the deepstack features of images."""
        if seen is None:
            return plain.embedded(ids), positions, None
        assert self.sight is not None
        x, deep = self.sight.embedded(self.hf_model, plain.embedded(ids)[None], seen)
        return x[0], seen.positions, deep

    def look(self, pieces: Seq[Piece]) -> Seen | None:
        """Read the images of prefill chunks, and record how far images shift the positions of later tokens."""
        if self.sight is None:
            return None
        images = [piece.sequence.images for piece in pieces]
        # For a prompt with images, positions are counted from the beginning, including tokens that are in the cache.
        ids = [p.sequence.tokens[: p.end] if p.sequence.images else p.tokens for p in pieces]
        lengths, sizes = ([len(one) for one in many] for many in (ids, [p.tokens for p in pieces]))
        known = [length - size for length, size in zip(lengths, sizes, strict=True)]
        seen = self.sight.look(torch.from_numpy(np.concatenate(ids)), lengths, images, known)
        for at, piece in enumerate(pieces):
            for sequence in (piece.sequence, *piece.sequence.followers):
                self.rows.shift[sequence.row] = 0 if seen is None else seen.shifts[at]
        if seen is None:
            return None
        # A chunk without images may continue an earlier chunk, so its positions have an offset.
        starts = np.repeat([p.start - skipped for p, skipped in zip(pieces, known, strict=True)], sizes)
        return replace(seen, positions=seen.positions + torch.from_numpy(starts)).to(self.device)

    def routing(self) -> AbstractContextManager[None]:
        """Record MoE routes inside the context if this runner stores routes."""
        return nullcontext() if self.routes is None else self.routes.routers.routing(records=True)

    def note_pieces(self, pieces: Seq[Piece]) -> None:
        """Store the MoE routes of prefill chunks, if this runner stores routes."""
        if self.routes is not None:
            self.routes.write_pieces(pieces)
            for piece in pieces:
                if piece.is_last:
                    self.routes.copy_to_followers(piece.sequence)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[rows, vocabulary]` of hidden states, scaled as in the model's family."""
        head = self.hf_model.get_output_embeddings()
        product = head(hidden) if self.parallel is None else self.parallel.logits(hidden, head)
        return scale_logits_(product, self.scaling)

    def settings(self, count: int) -> tuple[Settings, bool]:
        """Return the sampling settings of the first `count` rows, and whether any row needs adjusted logits."""
        kept = self._settings
        if kept is None or kept[0] != self.rows.composition or kept[1] != count:
            # A gap is sampled like any other row, and its token is discarded.
            params = [s.params for s in self.rows.sequences[:count] if s is not None]
            filler = params[0]
            how = Settings.of([filler if s is None else s.params for s in self.rows.sequences[:count]], self.device)
            adjusts = any(s.adjusts for s in self.rows.sequences[:count] if s is not None)
            kept = self._settings = self.rows.composition, count, how, adjusts
        return kept[2], kept[3]


class SlotRunner(Runner):
    """The runner for CPUs: contiguous slots, and every launch is complete when it returns."""

    def __init__(self, hf_model: PreTrainedModel, rows: Rows, cache: SlotCache, **options: Any):
        super().__init__(hf_model, rows, **options)
        self.cache = cache
        self.last = torch.zeros(rows.capacity, dtype=torch.long)

    def load(self, sequence: RunningSequence, length: int) -> None:
        self.cache.make_room(sequence.row + 1, length)
        self.cache.load(sequence.row, sequence.blocks[: length // self.cache.block_size])

    def store(self, sequence: RunningSequence, places: Seq[int]) -> None:
        self.cache.store(sequence.row, sequence.blocks, places)

    def prefill(self, pieces: Seq[Piece]) -> Launch | None:
        rows = max(max(s.row for s in (p.sequence, *p.sequence.followers)) for p in pieces) + 1
        self.cache.make_room(rows, max(piece.end for piece in pieces))
        # Chunks of equal length are neighbours, because they go through attention together.
        pieces = sorted(pieces, key=lambda piece: len(piece.tokens))
        context = SlotPrefill(self.cache, pieces, self.piece_states(pieces))
        ids = torch.from_numpy(np.concatenate([piece.tokens for piece in pieces]))
        with self.routing():
            hidden = self.hidden(ids, context.positions, context, one_each=False, seen=self.look(pieces))
            self.note_pieces(pieces)
        ends = np.cumsum([len(piece.tokens) for piece in pieces]) - 1
        groups = [(end, piece.sequence) for end, piece in zip(ends, pieces, strict=True) if piece.is_last]
        if not groups:
            return None
        sequences = [s for _, leader in groups for s in (leader, *leader.followers)]
        logits = self.logits(hidden[torch.tensor([end for end, _ in groups])])
        sizes = torch.tensor([1 + len(leader.followers) for _, leader in groups])
        if len(sequences) > len(groups):
            logits = logits.repeat_interleave(sizes, 0)
        for sequence in sequences:
            self.adjuster.enter(sequence)
        index = np.array([s.row for s in sequences])
        how = Settings.of([s.params for s in sequences])
        adjusted = self.adjuster.adjust(logits, index) if any(s.adjusts for s in sequences) else None
        launch = self._sampled(sequences, logits, how, index, adjusted)
        self.rows.launched[index] += 1
        return launch

    def decode(self) -> Launch:
        rows = self.rows
        self._close_gaps()
        count = rows.end
        context = SlotDecode(self.cache, rows, count, self.states)
        # Rows in prefill are written to as well, after their last token.
        self.cache.make_room(count, int(rows.length[:count].max()) + 1)
        alive = rows.alive[:count].nonzero()[0]
        with self.routing():
            hidden = self.hidden(self.last[:count], self._positions(context.positions), context, one_each=True)
            if self.routes is not None:
                self.routes.write_rows(alive)
        rows.length[:count] += rows.alive[:count]
        logits = self.logits(hidden)
        how, adjusts = self.settings(count)
        index = np.arange(count)
        adjusted = self.adjuster.adjust(logits, index) if adjusts else None
        sequences = [rows.sequences[row] for row in alive.tolist()]
        launch = self._sampled(sequences, logits, how, index, adjusted)
        rows.launched[:count] += rows.alive[:count]
        launch.places = alive if len(alive) < count else None
        return launch

    def _positions(self, places: Tensor) -> Tensor:
        """Return the position ids of the first rows' last tokens, given the tokens' indices in their sequences."""
        return places if self.sight is None else places - torch.from_numpy(self.rows.shift[: len(places)])

    def _sampled(
        self, sequences: Any, logits: Tensor, how: Settings, index: np.ndarray, adjusted: Tensor | None
    ) -> Launch:
        seeds, steps = (torch.from_numpy(x[index]) for x in (self.rows.seed, self.rows.launched))
        sampled = sample(logits, how, seeds, steps, adjusted)
        places = torch.from_numpy(index)
        self.last[places] = sampled.tokens
        self.adjuster.note(places, sampled.tokens)
        return Launch(sequences, sampled)

    def _close_gaps(self) -> None:
        end = self.rows.end
        if int(self.rows.alive.sum()) > (1 - REPACK_SHARE) * end:
            return
        moves = self.rows.gaps()
        if moves:
            self.cache.move(moves, int(self.rows.length[[source for source, _ in moves]].max()))
            if self.states is not None:
                self.states.move(moves)
            for source, target in moves:
                self.rows.move(source, target)
                self.last[target] = self.last[source]
                self.adjuster.move(source, target)

    def drop_cache(self) -> None:
        super().drop_cache()
        self.cache = SlotCache(self.cache.num_blocks, self.cache.block_size, self.cache.max_length)
