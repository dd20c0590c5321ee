"""The GPU runner: a decoding step is a CUDA graph per batch size, and the host is one step ahead of the device.

Each row keeps its state on the device (`last` token, block `table`). A step sends one small array with the
participating rows and their positions, and fetches one array with their tokens. The host only waits for the device to
read a step's tokens, after it has launched the next step.

Parts: `PagedRunner`, and `fused_hidden`, the forward pass of plain decoder layers with our own kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.data.images import Seen
from meshrl.models.fp8 import Rows8
from meshrl.models.loading import scale_logits_
from meshrl.models.vision import Deep
from meshrl.parallel.attention import AttentionContext
from meshrl.rollout.embedded.graph_capture import sound_after_failure, what_waits
from meshrl.rollout.embedded.kernels import (
    Turning,
    add_and_norm,
    rotate_and_store,
    rows_in_8_bits,
    sample_rows,
    silu_and_multiply,
)
from meshrl.rollout.embedded.layers import AnyProjection, Layer, PlainLayers, Projection
from meshrl.rollout.embedded.model_runner import Launch, Runner
from meshrl.rollout.embedded.paged_kv_cache import PagedCache, PagedDecode, PagedPrefill, send
from meshrl.rollout.embedded.sampler import Sampled, Settings, sample, step_keys
from meshrl.rollout.embedded.scheduler import Piece, Rows, RunningSequence

# Rows of the array that a step sends: row numbers, positions in sequences, slots, random bits for sampling,
# temperatures (as float64), and the differences between positions in sequences and position ids.
ORDER, POSITION, SLOT, KEY, HEAT, SHIFT = range(6)
NUMBERS = 6
BUFFERS = 4  # of pinned memory; more than the number of pending launches
logger = logging.getLogger(__name__)


def bucket(count: int) -> int:
    """Return the captured batch size that is used for `count` rows."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 64 else 16 if count <= 256 else 64
    return -(-count // step) * step


class CudaLaunch(Launch):
    """Sampled tokens that are being copied from the device to pinned memory."""

    def __init__(self, sequences: list[RunningSequence], landed: Tensor, extra: tuple[Tensor, Tensor] | None):
        super().__init__(sequences, Sampled(landed[0], landed[1]))
        self._landed, self._extra = landed, extra
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> Sampled:
        self.event.synchronize()
        top = self._extra or (None, None)
        log_probs = self._landed[1].view(torch.float64).float()
        self.sampled = Sampled(self._landed[0].clone(), log_probs, *top)
        return self.sampled


class PagedRunner(Runner):
    """The runner for one GPU. Plain decoders use fused kernels, and steps are replayed as CUDA graphs if possible."""

    lag = 1

    def __init__(self, hf_model: PreTrainedModel, rows: Rows, cache: PagedCache, max_length: int, **options: Any):
        super().__init__(hf_model, rows, **options)
        self.cache = cache
        self.fuses = can_fuse(self.plain)
        self.records = self.fuses or self.plain is None
        self.layers_are_ours = self.plain is not None and not self.plain.has_experts
        self._places = self._weight_places()
        self.capacity = bucket(rows.capacity)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        width = -(-max_length // cache.block_size)
        # One row more than the capacity, for unused places of a batch.
        self.table = torch.zeros(rows.capacity + 1, width, dtype=torch.int32, device=self.device)
        self._host_table = np.zeros((rows.capacity + 1, width), np.int64)
        # placement and number of blocks that the table has for each row
        self._known = np.zeros((rows.capacity, 2), np.int64)
        self.last = torch.zeros(rows.capacity + 1, dtype=torch.long, device=self.device)
        self.inputs = torch.zeros(NUMBERS, self.capacity, dtype=torch.long, device=self.device)
        self.outputs = torch.zeros(2, self.capacity, dtype=torch.long, device=self.device)
        self.all_logits = torch.zeros(self.capacity, options["vocabulary"], dtype=hf_model.dtype, device=self.device)
        self._sending = [torch.zeros(NUMBERS, self.capacity, dtype=torch.long).pin_memory() for _ in range(BUFFERS)]
        self._landing = [torch.zeros(2, self.capacity, dtype=torch.long).pin_memory() for _ in range(BUFFERS)]
        self._turn = 0
        # The inputs of a step for unused places.
        self._host_nobody = np.zeros((NUMBERS, self.capacity), np.int64)
        self._host_nobody[ORDER], self._host_nobody[POSITION] = rows.capacity, -1
        self._host_nobody[SLOT], self._host_nobody[HEAT].view(np.float64)[:] = cache.trash, 1
        self._nobody = torch.from_numpy(self._host_nobody).to(self.device)

    def load(self, sequence: RunningSequence, length: int) -> None:
        """No-op: cached blocks are read in place."""

    def store(self, sequence: RunningSequence, places: Seq[int]) -> None:
        """No-op: the sequence's blocks stay in place and are cached there."""

    def refresh(self) -> None:
        if self.plain is not None:
            moved = self.plain.refresh()
        else:
            before, self._places = self._places, self._weight_places()
            moved = before != self._places
        if moved:
            self._forget_graphs()

    def _weight_places(self) -> tuple[int, ...]:
        """Return the addresses of a model's weights if the model is not plain, because a CUDA graph reads from them."""
        weights = (*self.hf_model.parameters(), *self.hf_model.buffers()) if self.plain is None else ()
        return tuple(map(Tensor.data_ptr, weights))

    def take_weights(self) -> None:
        super().take_weights()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Drop all CUDA graphs and their memory, because they contain addresses of weights and cache."""
        self._graphs.clear()
        self._pool = None

    def drop_cache(self) -> None:
        self._forget_graphs()
        self.cache.drop()
        super().drop_cache()
        torch.cuda.empty_cache()

    def wanted_hidden(self, ids: Tensor, context: PagedPrefill, wanted: Tensor, seen: Seen | None) -> Tensor:
        """Return the last hidden states `[wanted, hidden]` of some of the tokens of packed prefill chunks."""
        if self.fuses and self.routes is None:
            assert self.plain is not None
            x, positions, deep = self.vectors(self.plain, ids, context.positions, seen)
            return fused_hidden(self.plain, x, positions, context, wanted, deep)
        return self.hidden(ids, context.positions, context, one_each=False, seen=seen)[wanted]

    def hidden(
        self, ids: Tensor, positions: Tensor, context: AttentionContext, one_each: bool, seen: Seen | None = None
    ) -> Tensor:
        if self.fuses:
            assert self.plain is not None
            assert isinstance(context, PagedPrefill | PagedDecode)
            x, positions, deep = self.vectors(self.plain, ids, positions, seen)
            return fused_hidden(self.plain, x, positions, context, deep=deep)
        return super().hidden(ids, positions, context, one_each, seen)

    def prefill(self, pieces: Seq[Piece]) -> Launch | None:
        pieces = sorted(pieces, key=lambda piece: len(piece.tokens))
        context = PagedPrefill(self.cache, pieces, self.device, self.piece_states(pieces))
        ids = send(np.concatenate([piece.tokens for piece in pieces]), self.device)
        ends = np.cumsum([len(piece.tokens) for piece in pieces]) - 1
        groups = [(end, piece.sequence) for end, piece in zip(ends, pieces, strict=True) if piece.is_last]
        wanted = send(np.array([end for end, _ in groups], np.int64), self.device)
        with self.routing():
            hidden = self.wanted_hidden(ids, context, wanted, self.look(pieces))
            self.note_pieces(pieces)
        if not groups:
            return None
        leaders = [leader for _, leader in groups]
        self._copy_to_followers(leaders)
        sequences = [s for leader in leaders for s in (leader, *leader.followers)]
        logits = self.logits(hidden)
        if len(sequences) > len(leaders):
            which = np.repeat(np.arange(len(leaders)), [1 + len(leader.followers) for leader in leaders])
            logits = logits[send(which, self.device)]
        index = np.array([s.row for s in sequences])
        for sequence in sequences:
            self.adjuster.enter(sequence)
        inputs = torch.zeros(NUMBERS, len(sequences), dtype=torch.long)
        self._fill(inputs.numpy(), sequences, index)
        sent = inputs.pin_memory().to(self.device, non_blocking=True)
        outputs = torch.zeros(2, len(sequences), dtype=torch.long, device=self.device)
        sample_rows(logits, sent[KEY], sent[HEAT].view(torch.float64), outputs[0], outputs[1].view(torch.float64))
        self.last[sent[ORDER]] = outputs[0]
        extra = self._sample_others(sequences, logits, outputs, index)
        self.rows.launched[index] += 1
        landing = torch.empty(2, len(sequences), dtype=torch.long, pin_memory=True)
        landing.copy_(outputs, non_blocking=True)
        return CudaLaunch(sequences, landing, extra)

    def _copy_to_followers(self, leaders: Seq[RunningSequence]) -> None:
        """Copy the prompt's partly filled last block to each follower's own last block."""
        size = self.cache.block_size
        pairs = [
            (leader.blocks[leader.computed // size], follower.blocks[leader.computed // size])
            for leader in leaders
            for follower in leader.followers
            if leader.computed % size
        ]
        if pairs:
            self.cache.copy(*zip(*pairs, strict=True))

    def decode(self) -> Launch | None:
        rows = self.rows
        order = (rows.alive & (rows.launched < rows.limit)).nonzero()[0]
        if len(order) == 0:
            return None
        sequences: list[Any] = [rows.sequences[row] for row in order.tolist()]
        size = bucket(len(order))
        self._update_table(order, sequences)
        turn = self._turn = (self._turn + 1) % BUFFERS
        sending = self._sending[turn]
        filled = sending.numpy()
        filled[:] = self._host_nobody
        self._fill(filled[:, : len(order)], sequences, order)
        positions = rows.length[order]
        blocks = self._host_table[order, positions // self.cache.block_size]
        filled[POSITION, : len(order)], filled[SHIFT, : len(order)] = positions, rows.shift[order]
        filled[SLOT, : len(order)] = blocks * self.cache.block_size + positions % self.cache.block_size
        self.inputs.copy_(sending, non_blocking=True)
        self._run(size)
        extra = self._sample_others(sequences, self.all_logits[: len(order)], self.outputs, order)
        rows.length[order] += 1
        rows.launched[order] += 1
        landing = self._landing[turn]
        landing.copy_(self.outputs, non_blocking=True)
        return CudaLaunch(sequences, landing[:, : len(order)], extra)

    def _fill(self, inputs: np.ndarray, sequences: Seq[RunningSequence], index: np.ndarray) -> None:
        inputs[ORDER] = index
        inputs[KEY] = step_keys(self.rows.seed[index], self.rows.launched[index])
        inputs[HEAT].view(np.float64)[:] = [s.params.temperature for s in sequences]

    def _update_table(self, order: np.ndarray, sequences: Seq[RunningSequence]) -> None:
        """Send the block numbers that rows have gained since the last step to the device's block table."""
        changes: list[tuple[int, int, int]] = []
        counts = self.rows.room[order] // self.cache.block_size
        is_old = (self._known[order, 0] == self.rows.placement[order]) & (self._known[order, 1] == counts)
        for at in (~is_old).nonzero()[0].tolist():
            row, blocks = int(order[at]), sequences[at].blocks
            start = int(self._known[row, 1]) if self._known[row, 0] == self.rows.placement[row] else 0
            changes += [(row, place, blocks[place]) for place in range(start, len(blocks))]
            self._known[row] = self.rows.placement[row], len(blocks)
        if changes:
            array = np.array(changes).T.copy()
            self._host_table[array[0], array[1]] = array[2]
            sent = send(array, self.device)
            self.table[sent[0], sent[1]] = sent[2].int()

    def _step(self, size: int) -> None:
        order, positions, slots, keys, heat, shift = (row[:size] for row in self.inputs)
        context = PagedDecode(self.cache, self.table, order, positions, slots, self.states)
        with self.routing():
            turned = positions if self.sight is None else positions - shift
            hidden = self.hidden(self.last[order], turned.clamp(min=0), context, one_each=True)
            if self.routes is not None:
                self.routes.write(slots)
        logits = self.all_logits[:size]
        head = self.hf_model.get_output_embeddings()
        if self.parallel is not None:
            logits.copy_(self.parallel.logits(hidden, head))
        elif head.bias is None:
            torch.mm(hidden, head.weight.t(), out=logits)
        else:
            torch.addmm(head.bias, hidden, head.weight.t(), out=logits)
        scale_logits_(logits, self.scaling)
        sample_rows(
            logits, keys, heat.view(torch.float64), self.outputs[0, :size], self.outputs[1, :size].view(torch.float64)
        )
        self.last[order] = self.outputs[0, :size]

    def _run(self, size: int) -> None:
        if self.records and size not in self._graphs:
            self._record(size)
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._step(size)

    def _record(self, size: int) -> None:
        """Capture a step as a CUDA graph.

        A model may do what cannot be captured, such as wait for the device. In this case it continues without graphs.
        """
        # Steps without rows compile the kernels and set up libraries before the capture. They change no row.
        kept = self.inputs.clone()
        self.inputs.copy_(self._nobody)
        self._step(size)
        if (
            not self.layers_are_ours
            and not self._graphs
            and (waits := what_waits(lambda: self._step(size))) is not None
        ):
            self._do_not_record(f"{waits} waits for the device")
        self.inputs.copy_(kept)
        if not self.records:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # Other threads may use the device during the capture, because weights arrive during generation.
            with (
                sound_after_failure(self.device, self._pool),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                self._step(size)
        except RuntimeError as error:
            # Ranks that step together must all use graphs or all not. An out-of-memory error does not depend on the
            # model.
            if self.layers_are_ours or self.parallel is not None or isinstance(error, torch.OutOfMemoryError):
                raise
            self._do_not_record(str(error).strip().splitlines()[0])
            return
        self._graphs[size] = graph

    def _do_not_record(self, reason: str) -> None:
        self.records = False
        self._forget_graphs()
        logger.warning("%s decodes without recorded graphs, slower: %s", type(self.hf_model).__name__, reason)

    def _sample_others(
        self, sequences: Seq[RunningSequence], logits: Tensor, outputs: Tensor, index: np.ndarray
    ) -> tuple[Tensor, Tensor] | None:
        """Sample again, with the general sampler, for rows that need more than a temperature.

        Returns the top tokens and log-probs of all rows, if some row requests them.
        """
        extra = None
        places = np.array([at for at, s in enumerate(sequences) if s.is_special], np.int64)
        if len(places):
            some, where = index[places], send(places, self.device)
            how = Settings.of([sequences[at].params for at in places], self.device)
            own = logits[where]
            adjusted = self.adjuster.adjust(own, some)
            seeds, steps = send(self.rows.seed[some], self.device), send(self.rows.launched[some], self.device)
            sampled = sample(own, how, seeds, steps, adjusted)
            outputs[0, where], outputs[1].view(torch.float64)[where] = sampled.tokens, sampled.log_probs.double()
            if sampled.top_tokens is not None and sampled.top_log_probs is not None:
                extra = self._spread(places, len(sequences), sampled.top_tokens, sampled.top_log_probs)
            their_rows = send(some, self.device)
            self.last[their_rows] = sampled.tokens
            self.adjuster.note(their_rows, sampled.tokens)
        return extra

    def _spread(self, places: np.ndarray, count: int, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return top tokens and log-probs on the CPU, indexed by place among all rows. Waits for the device."""
        made = torch.zeros(count, tokens.shape[1], dtype=torch.long), torch.zeros(count, tokens.shape[1])
        for target, source in zip(made, (tokens, log_probs), strict=True):
            target[torch.from_numpy(places)] = source.to("cpu", target.dtype)
        return made


# The forward pass of plain decoder layers on a GPU, with our own kernels between the matmuls of a layer.


def can_fuse(plain: PlainLayers | None) -> bool:
    """Return whether the layers have a head dim that the kernels support: a power of two, at least 16."""
    return plain is not None and plain.dim & (plain.dim - 1) == 0 and plain.dim >= 16


# A matmul with few columns leaves most of the GPU idle. Up to this size, the matmul is split into parts along the sum.
SPLIT_ROWS, SPLIT_COLUMNS, PARTS = 256, 1024, 2


@dataclass(frozen=True)
class Product:
    """The output of a matmul: rows `[rows, columns]`, or float32 parts `[parts, rows, columns]` that are to be summed.

    The next kernel sums the parts and multiplies row i by `factors[i]`, if there are factors.
    """

    values: Tensor
    factors: Tensor | None = None


def product(plain: PlainLayers, projection: AnyProjection, x: Tensor | Rows8) -> Product:
    """Multiply x by a projection's weights. An FP8 product may still lack its row factors."""
    if isinstance(projection, Projection):
        assert isinstance(x, Tensor)
        return Product(projection(x))
    rows = x if isinstance(x, Rows8) else rows_in_8_bits(x)
    # Factors must be applied before a bias is added and before parts are summed over ranks.
    if projection.bias is None and plain.parallel is None:
        return Product(*projection.raw(rows))
    return Product(projection(rows))


def product_of_all(plain: PlainLayers, projection: AnyProjection, x: Tensor | Rows8) -> Product:
    """Multiply x by a projection's weights and sum over ranks. Small products are computed in parts."""
    if not isinstance(projection, Projection):
        made = product(plain, projection, x)
        return Product(plain.whole(made.values), made.factors)
    assert isinstance(x, Tensor)
    weight, bias = projection.weights[0], projection.biases[0]
    rows, inner = x.shape
    is_small = rows <= SPLIT_ROWS and len(weight) <= SPLIT_COLUMNS
    if not is_small or bias is not None or inner % (64 * PARTS) or x.dtype == torch.float32:
        return Product(plain.whole(projection(x)))
    halves = x.view(rows, PARTS, -1).transpose(0, 1), weight.view(len(weight), PARTS, -1).permute(1, 2, 0)
    return Product(plain.whole(torch.bmm(*halves, out_dtype=torch.float32)))


def _normed(plain: PlainLayers, added: Product | None, residual: Tensor, weight: Tensor, in_8_bits: bool) -> Any:
    """Add to the residual in place; return its RMS norm in the form that the next matmul takes."""
    values, factors = (None, None) if added is None else (added.values, added.factors)
    return add_and_norm(values, residual, weight, plain.eps, factors=factors, in_8_bits=in_8_bits)


def _attend(
    plain: PlainLayers,
    index: int,
    layer: Layer,
    made: Product,
    rotations: tuple[Tensor, Tensor, Tensor],
    context: PagedPrefill | PagedDecode,
) -> Tensor:
    """Store keys and values of a product `[tokens, heads + 2 kv_heads, dim]`, and attend with its queries.

    Returns `[tokens, heads * dim]`.
    """
    qkv = made.values.view(len(made.values), -1, plain.dim)
    turning = Turning(layer.norms, *rotations, plain.eps, made.factors)
    if isinstance(context, PagedDecode):
        return context.attend_raw(index, qkv[:, : plain.heads], turning, plain.scaling, layer.window).flatten(1)
    rotate_and_store(qkv, turning, context.cache.of(index), context.slots, plain.heads)
    rotated = plain.heads + plain.kv_heads
    parts = qkv[:, : plain.heads], qkv[:, plain.heads : rotated], qkv[:, rotated:]
    q, k, v = (part.transpose(0, 1)[None] for part in parts)
    return context.attend_stored(index, q, k, v, plain.scaling, layer.window).reshape(len(qkv), -1)


def fused_hidden(
    plain: PlainLayers,
    residual: Tensor,
    positions: Tensor,
    context: PagedPrefill | PagedDecode,
    wanted: Tensor | None = None,
    deep: Deep | None = None,
) -> Tensor:
    """Compute hidden states `[tokens, hidden]` from embeddings, which are overwritten.

    With `wanted`, return only those tokens. See `PlainLayers.__call__`.
    """
    assert deep is None or len(deep.vectors) < len(plain.layers)  # of the last layer's output only some tokens are left
    rotations = plain.rotations(residual, positions)
    in_8_bits = plain.in_8_bits
    added: Product | None = None
    for index, layer in enumerate(plain.layers):
        qkv = product(plain, layer.qkv, _normed(plain, added, residual, layer.norm_1, in_8_bits))
        mixed = _attend(plain, index, layer, qkv, rotations, context)
        if wanted is not None and index == len(plain.layers) - 1:
            mixed, residual = mixed[wanted], residual[wanted]
        added = product_of_all(plain, layer.out, mixed)
        if layer.gate_up is None or layer.down is None:
            added = Product(layer.experts(_normed(plain, added, residual, layer.norm_2, False)[None])[0])
        else:
            both = product(plain, layer.gate_up, _normed(plain, added, residual, layer.norm_2, in_8_bits))
            inner = silu_and_multiply(both.values, factors=both.factors, in_8_bits=in_8_bits)
            added = product_of_all(plain, layer.down, inner)
        if deep is not None:
            deep.add_to(residual, index)  # `added` is not in the residual yet, the next norm adds it
    return _normed(plain, added, residual, plain.decoder.norm.weight, False)
