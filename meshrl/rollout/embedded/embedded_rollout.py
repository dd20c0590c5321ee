"""The embedded rollout: generation with the trainer's own kind of module, inside the trainer's process.

A step decodes one token for every running sequence and computes prefill chunks of waiting prompts, under one token
budget. Sequences enter and leave between steps (continuous batching). Their keys and values are stored in blocks of a
KV cache, and sequences with the same prefix share blocks.

Parts: `EmbeddedRollout`, and `AnswerBatch`, which collects completions as the tensors of a training batch.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.data.batch import DataProto
from meshrl.data.images import IMAGES, Images
from meshrl.models.fp8 import FP8
from meshrl.models.loading import persistent_buffers
from meshrl.models.vision import Sight
from meshrl.parallel.attention import longest_fixed_rotation
from meshrl.parallel.linear_attention import recurrences
from meshrl.rollout.base import TAGS, check_no_empty_prompt, joined, routes_column
from meshrl.rollout.embedded.capacity import (
    CPU_BLOCK,
    CUDA_BLOCK,
    build_runner,
    check_8_bits,
    context_length,
    default_num_blocks,
)
from meshrl.rollout.embedded.model_runner import Launch, whole_routes
from meshrl.rollout.embedded.parallel import ExpertParallel, Parts, TensorParallel
from meshrl.rollout.embedded.sampler import derived_seed
from meshrl.rollout.embedded.scheduler import BlockManager, Piece, Rows, RunningSequence, Scheduler
from meshrl.rollout.in_process_rollout import POLL_SECONDS, SteppingRollout
from meshrl.rollout.requests import Chunk, Request, SamplingParams
from meshrl.rollout.text import find_stop
from meshrl.rollout.weight_files import checked
from meshrl.telemetry.time_ledger import IDLE, booked

REASONS = (None, "stop", "length")
# The largest number of prefill launches of one step that may be pending on a device.
MOST_PREFILLS = 64
# The largest number of completions of one request.
MOST_ANSWERS = 65_536
_batches = itertools.count()


class EmbeddedRollout(SteppingRollout):
    """Generation by a Hugging Face module that is either shared with the trainer or a separate replica.

    The KV cache has `num_blocks` blocks of `block_size` tokens. The default is as many blocks as memory allows. Stop
    strings need a `tokenizer`. With a `rank_group`, the model is sharded over the group's ranks, or its experts are
    distributed over them (`spreads_experts`). All ranks of the group must make the same calls. A model on the `meta`
    device gets memory only for its shard, on `device`. With `records_routes`, completions report the experts that
    processed their tokens. With `quantization` "fp8", an FP8 copy of the weights generates. With `kv_cache_dtype`
    "fp8", keys and values are stored in FP8. With a `sight`, prompts may have images.
    """

    shares_allocator = True

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        pad_token_id: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        shares_weights: bool = False,
        tokenizer: Tokenizer | None = None,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        memory_share: float = 0.5,
        rank_group: dist.ProcessGroup | None = None,
        spreads_experts: bool = False,
        records_routes: bool = False,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        sight: Sight | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.sight = sight
        self.hf_model, self.pad_token_id, self.tokenizer = hf_model, pad_token_id, tokenizer
        self.shares_weights = shares_weights
        self.device = device or next(hf_model.parameters()).device
        self.version = -1
        self.vocabulary = hf_model.get_output_embeddings().weight.shape[0]
        self.parallel: Parts | None = None
        if rank_group is not None and dist.get_world_size(rank_group) > 1:
            if shares_weights:
                raise ValueError("a rollout that is cut over ranks cannot share the trainer's weights: give it its own")
            self.parallel = (ExpertParallel if spreads_experts else TensorParallel)(hf_model, rank_group)
            self.parallel.shard(hf_model, self.device)
        check_8_bits(hf_model, quantization, kv_cache_dtype)
        cache_dtype = FP8 if kv_cache_dtype == "fp8" else hf_model.dtype
        block_size = block_size or (CUDA_BLOCK if self.device.type == "cuda" else CPU_BLOCK)
        max_model_len = max_model_len or context_length(hf_model)
        if (fixed := longest_fixed_rotation(hf_model)) is not None:
            max_model_len = min(max_model_len or fixed, fixed)
        if num_blocks is None:
            num_blocks = default_num_blocks(
                hf_model, block_size, max_num_seqs, max_model_len, memory_share, self.parallel, cache_dtype,
                quantization is not None,
            )  # fmt: skip
        # A single sequence always fits into the cache, so no request waits for memory that does not exist.
        self.max_model_len = min(max_model_len or num_blocks * block_size, num_blocks * block_size)
        self.rows = Rows(max_num_seqs)
        self.blocks = BlockManager(num_blocks, block_size)
        # Prefix caching in layers with a recurrent state would need the state at the prefix's end, which is not stored.
        caching = enable_prefix_caching and not recurrences(hf_model)
        self.scheduler = Scheduler(self.rows, self.blocks, max_num_batched_tokens, caching=caching)
        self.runner = build_runner(
            hf_model,
            self.rows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=self.max_model_len,
            owns_weights=not shares_weights,
            vocabulary=self.vocabulary,
            parallel=self.parallel,
            records_routes=records_routes,
            in_8_bits=quantization == "fp8",
            cache_dtype=cache_dtype,
            sight=sight,
        )
        if self.runner.routes is not None:
            self.scheduler.before_leaving = self.runner.routes.keep
        self._own = dict(hf_model.named_parameters()) | persistent_buffers(hf_model)
        self._shapes = {name: tensor.shape for name, tensor in self._own.items()}
        self._launched: deque[Launch] = deque()
        self._watched = 0  # running sequences that need work for every token, see `_watch`
        self._released: set[str] = set()
        self._lacks_weights = False
        self._counters = {"generated_tokens": 0, "finished": 0, "steps": 0, "seconds": 0.0}

    # Requests

    def add(self, request: Request) -> str | None:
        problem = self._problem(request) or self._unreadable(request.images)
        if problem is None:
            prompt = np.array(request.prompt_token_ids, np.int64)
            names = self._names(prompt, request.images)
            for index in range(request.params.n):
                seed = derived_seed(request.seed, index)
                sequence = self._sequence(request.request_id, index, prompt, request.params, seed)
                sequence.images, sequence.names = request.images, names
                sequence.streams = request.request_id in self.streaming
                self._submit(sequence)
        return problem

    def _unreadable(self, images: Images) -> str | None:
        """Return why one of the images cannot be decoded, or None.

        A failure during a step would affect all requests.
        """
        if self.sight is None:
            return None
        try:
            for image in images:
                self.sight.reader.head(image)
        except ValueError as error:
            return str(error)
        return None

    def _names(self, prompt: np.ndarray, images: Images) -> np.ndarray | None:
        """Return the prompt's tokens as the cache identifies them, because equal ids may stand for different images."""
        return self.sight.names(prompt, images) if self.sight is not None and images else None

    def _sequence(
        self, name: str, index: int, prompt: np.ndarray, params: SamplingParams, seed: int
    ) -> RunningSequence:
        limit = min(params.max_tokens, self.max_model_len - len(prompt))
        return RunningSequence(name, index, prompt, params, seed, limit)

    def _submit(self, sequence: RunningSequence) -> None:
        self.scheduler.waiting.append(sequence)
        self._watched += self._is_watched(sequence)

    def _problem(self, request: Request) -> str | None:
        """Return why a request cannot be served, or None."""
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            return "the prompt is empty: it needs at least one token"
        if len(prompt) >= self.max_model_len:
            return f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {self.max_model_len}"
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < self.vocabulary)
            return f"token {wrong} of the prompt is outside of the vocabulary of {self.vocabulary}"
        for what, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(not 0 <= token < self.vocabulary for token in tokens):
                return f"{what} names a token outside of the vocabulary of {self.vocabulary}"
        if params.stop and self.tokenizer is None:
            return "stop strings need a tokenizer, and this rollout was built without one"
        if request.images:
            if self.sight is None:
                return f"the prompt has images, but this {type(self.hf_model).__name__} does not see any"
            if (problem := self.sight.problem(prompt, request.images)) is not None:
                return problem
        if params.n > MOST_ANSWERS:
            return f"n is {params.n}, but a request may have at most {MOST_ANSWERS} answers"
        if params.top_log_probs > self.vocabulary:
            return f"top_log_probs is {params.top_log_probs}, but the vocabulary has {self.vocabulary} tokens"
        if params.min_tokens and len(set(params.stop_token_ids)) >= self.vocabulary:
            return "min_tokens forbids the stop tokens at first, and every token is one"
        return None

    def has_work(self) -> bool:
        return bool(self._launched) or self.scheduler.has_work()

    def num_generated(self) -> int:
        return int(self._counters["generated_tokens"])

    def is_suspended(self) -> bool:
        return bool(self._released) or self._lacks_weights

    def drop(self, request_ids: Seq[str] | None) -> list[Chunk]:
        chunks = self._drain()
        ended = {(chunk.request_id, chunk.index) for chunk in chunks if chunk.finish_reason}
        waiting, held = self.scheduler.waiting, self.rows.held()
        names = {s.request_id for s in (*waiting, *held)} if request_ids is None else set(request_ids)
        for sequence in self.scheduler.take(names):
            if (sequence.request_id, sequence.index) not in ended:
                self._leave(sequence, "abort", chunks)
        return chunks

    # Steps

    @torch.no_grad()
    def step(self) -> list[Chunk]:
        started = time.perf_counter()
        if self.hf_model.training:
            self.hf_model.eval()
        chunks: list[Chunk] = []
        if self.runner.lag and self.scheduler.is_short():
            chunks += self._drain()
        for pieces in self.scheduler.schedule():
            self._prefill(pieces)
            self._collect(chunks, MOST_PREFILLS if self.runner.lag else 0)
        if self.rows.alive.any():
            launch = self.runner.decode()
            if launch is not None:
                self._launched.append(launch)
            self._collect(chunks, self.runner.lag if launch is not None else 0)
        else:
            self._collect(chunks, 0)
        self._counters["steps"] += 1
        self._counters["seconds"] += time.perf_counter() - started
        return chunks

    @booked("prefill")
    def _prefill(self, pieces: list[Piece]) -> None:
        loads, self.scheduler.loads = self.scheduler.loads, []
        for leader, length in loads:
            for sequence in (leader, *leader.followers):
                self.runner.load(sequence, length)
        launch = self.runner.prefill(pieces)
        for piece in pieces:
            if piece.is_last:
                leader = piece.sequence
                for sequence in (leader, *leader.followers):
                    sequence.mark(int(self.rows.count[sequence.row]), self.version)
                    self.scheduler.start(sequence)
                leader.followers = []
                if self._prompt_is_wanted(leader):
                    new = self.scheduler.register(leader, piece.end, leader.tokens)
                    if new:
                        self.runner.store(leader, new)
        if launch is not None:
            self._launched.append(launch)

    def _prompt_is_wanted(self, leader: RunningSequence) -> bool:
        waiting = self.scheduler.waiting
        siblings_wait = bool(waiting) and waiting[0].prompt is leader.prompt
        return leader.cacheable or bool(len(leader.output)) or siblings_wait

    def _collect(self, chunks: list[Chunk], lag: int) -> None:
        """Process the sampled tokens of all launches except the last `lag`."""
        while len(self._launched) > lag:
            launch = self._launched.popleft()
            sampled = launch.wait()
            tokens, log_probs = sampled.tokens.numpy(), sampled.log_probs.numpy()
            sequences, places = launch.live()
            if not sequences:
                continue
            if places is not None:
                tokens, log_probs = tokens[places], log_probs[places]
            index = np.fromiter((s.row for s in sequences), np.int64, len(sequences))
            ended = self.rows.write(index, tokens, log_probs)
            self._counters["generated_tokens"] += len(sequences)
            if self._watched:
                self._watch(sequences, launch, places, ended, chunks)
            for place in ended.nonzero()[0].tolist():
                self._finish(sequences[place], REASONS[ended[place]] or "", chunks)

    def _is_watched(self, sequence: RunningSequence) -> bool:
        return sequence.streams or bool(sequence.params.stop) or sequence.params.top_log_probs > 0

    def _watch(
        self,
        sequences: list[RunningSequence],
        launch: Launch,
        places: np.ndarray | None,
        ended: np.ndarray,
        chunks: list[Chunk],
    ) -> None:
        """Do the work that needs each token: top log-probs, stop strings and streams. May set entries of `ended`."""
        sampled = launch.sampled
        for at, sequence in enumerate(sequences):
            if not self._is_watched(sequence):
                continue
            params, count = sequence.params, int(self.rows.count[sequence.row])
            if params.top_log_probs:
                assert sampled.top_tokens is not None
                assert sampled.top_log_probs is not None
                place = at if places is None else int(places[at])
                top = slice(0, params.top_log_probs)
                pairs = zip(
                    sampled.top_tokens[place, top].tolist(), sampled.top_log_probs[place, top].tolist(), strict=True
                )
                sequence.top_log_probs.append(dict(pairs))
            if params.stop and ended[at] != 1 and count > params.min_tokens:
                assert self.tokenizer is not None
                if find_stop(self.tokenizer, self.rows.tokens[sequence.row, :count], params.stop) is not None:
                    ended[at] = 1
            if sequence.streams and not ended[at]:
                chunks.append(as_chunk(sequence, *self.rows.answer(sequence, sequence.sent)))

    def _finish(self, sequence: RunningSequence, reason: str, chunks: list[Chunk]) -> None:
        if sequence.cacheable:
            tokens = sequence.tokens_with(self.rows)
            new = self.scheduler.register(sequence, len(tokens) - 1, tokens)
            if new:
                self.runner.store(sequence, new)
        self.scheduler.remove(sequence)
        self._counters["finished"] += 1
        self._leave(sequence, reason, chunks)

    def _leave(self, sequence: RunningSequence, reason: str, chunks: list[Chunk]) -> None:
        """Deliver the remaining tokens of a sequence that no longer holds a row."""
        self._watched -= self._is_watched(sequence)
        if sequence.sink is not None:
            batch, place = sequence.sink
            batch.take(place, sequence, reason)
        else:
            rest = slice(sequence.sent, None)
            chunks.append(as_chunk(sequence, sequence.output[rest], sequence.log_probs[rest], reason))

    def _drain(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        self._collect(chunks, 0)
        return chunks

    # Batches for training

    def generate_sequences(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        if self.version < 0:
            raise RuntimeError("the rollout has no weights yet: sync them before generating")
        started = time.perf_counter()
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        images = prompts.non_tensor_batch.get(IMAGES)
        sequences = self._batch_sequences(ids, mask, prompts.batch["seeds"].tolist(), params, images)
        answers = AnswerBatch(len(sequences), params.max_tokens, self.pad_token_id)
        for place, sequence in enumerate(sequences):
            sequence.sink, sequence.cacheable = (answers, place), False
        name = sequences[0].request_id
        try:
            with self.lock:
                for sequence in sequences:
                    self._submit(sequence)
            while answers.left:
                with self._work:
                    self._raise_failure()
                    if self._paused or self.is_suspended():
                        with booked(IDLE):  # until new weights arrive
                            self._work.wait(POLL_SECONDS)
                    else:
                        self._advance()
        finally:
            if answers.left and self._failure is None:
                with self.lock:
                    self._hand_out(self._drain())
                    self.scheduler.take([name])
        output = answers.as_data(ids, mask)
        if self.parallel is not None:
            self.parallel.check_in_step(output.batch["responses"].to(self.device))
        output.meta_info["timing"] = {"generate": time.perf_counter() - started}
        return output

    def _batch_sequences(
        self, ids: Tensor, mask: Tensor, seeds: list[int], params: SamplingParams, images: np.ndarray | None
    ) -> list[RunningSequence]:
        """Make one sequence for each row of a batch. Neighbouring rows with equal prompts share the prompt array."""
        check_no_empty_prompt(mask)
        if images is not None:
            return self._batch_with_images(ids, mask, seeds, params, images)
        distinct, prompt_of = torch.unique_consecutive(torch.where(mask.bool(), ids, -1), dim=0, return_inverse=True)
        arrays = [row[row >= 0] for row in distinct.numpy()]
        name = f"batch{next(_batches)}"
        for prompt in {len(prompt): prompt for prompt in arrays}.values():
            problem = self._problem(Request(name, tuple(prompt.tolist()), params))
            if problem is not None:
                raise ValueError(problem)
        if int(distinct.max()) >= self.vocabulary:
            raise ValueError(f"token {int(distinct.max())} is outside of the vocabulary of {self.vocabulary}")
        made: list[RunningSequence] = []
        for which, seed in zip(prompt_of.tolist(), seeds, strict=True):
            index = made[-1].index + 1 if made and made[-1].prompt is arrays[which] else 0
            made.append(self._sequence(name, index, arrays[which], params, derived_seed(seed, 0)))
        return made

    def _batch_with_images(
        self, ids: Tensor, mask: Tensor, seeds: list[int], params: SamplingParams, images: np.ndarray
    ) -> list[RunningSequence]:
        """Make one sequence for each row of a batch with images.

        Neighbouring rows share a prompt only if their images are equal as well.
        """
        name = f"batch{next(_batches)}"
        made: list[RunningSequence] = []
        for row, (seed, seen) in enumerate(zip(seeds, images, strict=True)):
            before = made[-1] if made else None
            prompt = ids[row][mask[row].bool()].numpy()
            if before is not None and before.images == seen and np.array_equal(before.prompt, prompt):
                prompt, names, index = before.prompt, before.names, before.index + 1
            else:
                problem, index = self._problem(Request(name, tuple(prompt.tolist()), params, 0, seen)), 0
                if problem is not None:
                    raise ValueError(problem)
                names = self._names(prompt, seen)
            sequence = self._sequence(name, index, prompt, params, derived_seed(seed, 0))
            sequence.images, sequence.names = seen, names
            made.append(sequence)
        return made

    # Weights and memory

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight into the module. With shared storage nothing is copied and only the version changes."""
        with self._work:
            if "weights" in self._released:
                raise RuntimeError("the rollout has released its weights: call resume(['weights']) before an update")
            self._hand_out(self._drain())
            self.scheduler.restart()
            try:
                if not self.shares_weights:
                    self._lacks_weights = True  # until all weights have arrived
                    self._copy(weights)
            finally:
                self.runner.refresh()
            self.version = version
            self._lacks_weights = False
            self._work.notify_all()

    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self._own
        if self.parallel is not None:
            weights = self._parts(weights, own, self.parallel)
        for name, value in checked(weights, self._shapes):
            if value is not own[name]:  # a weight sync may have written the tensor in place already
                own[name].copy_(value)

    @staticmethod
    def _parts(
        weights: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor], parallel: Parts
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shard of each whole weight. A tensor that the sync wrote in place is a shard already."""
        for name, value in weights:
            yield name, parallel.part(name, value) if name in own and value is not own[name] else value

    def release(self, tags: Seq[str] = TAGS) -> None:
        self._check_tags(tags)
        with self._work:
            self._hand_out(self._drain())
            self.scheduler.restart()
            if "weights" in tags and "weights" not in self._released and not self.shares_weights:
                self.runner.drop_weights()
                self._lacks_weights = True
            if self.shares_weights:
                self.runner.drop_copies()
            if "kv_cache" in tags:
                self.runner.drop_cache()  # last, because it also returns all memory that is free by now to the device
            self._released |= set(tags)

    def take_back(self, tags: Seq[str]) -> None:
        self._check_tags(tags)
        with self._work:
            if "weights" in tags and "weights" in self._released and not self.shares_weights:
                self.runner.take_weights()
            self._released -= set(tags)
            if self.shares_weights and not self._released:
                self.runner.take_copies()
            self._work.notify_all()

    @staticmethod
    def _check_tags(tags: Seq[str]) -> None:
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise ValueError(f"unknown tag '{unknown[0]}': use {' or '.join(TAGS)}")

    def stats(self) -> dict[str, float]:
        with self.lock:
            free, total = self.blocks.num_free, self.blocks.num_blocks
            return {
                **self._counters,
                "running": self.rows.num_held,
                "waiting": len(self.scheduler.waiting),
                "free_blocks": free,
                "total_blocks": total,
                "cache_usage": 1 - free / total,
                "cached_blocks": self.blocks.num_cached,
                "cached_prompt_tokens": self.scheduler.cached_tokens,
                "prompt_tokens": self.scheduler.prompt_tokens,
                "preemptions": self.scheduler.preemptions,
                "version": self.version,
            }


# Delivery of completions from the engine: as chunks, or directly as the tensors of a training batch.


def as_chunk(
    sequence: RunningSequence,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    finish_reason: str | None = None,
    error: str | None = None,
) -> Chunk:
    """Make a chunk of the sequence's tokens, which start at token number `sent`, and advance `sent`."""
    end = sequence.sent + len(tokens)
    top = sequence.top_log_probs[sequence.sent : end] if sequence.params.top_log_probs else None
    versions = sequence.versions(sequence.sent, end).tolist()
    sequence.sent = end
    return Chunk(
        sequence.request_id,
        sequence.index,
        tokens.tolist(),
        log_probs.tolist(),
        versions,
        finish_reason,
        error,
        top,
        whole_routes(sequence.routes) if finish_reason is not None else None,
    )


class AnswerBatch:
    """The completions of a batch of prompts, as arrays `[count, width]` that fill as completions end."""

    def __init__(self, count: int, width: int, pad_token_id: int):
        self.left = count
        self.tokens = np.full((count, width), pad_token_id, np.int64)
        self.log_probs = np.zeros((count, width), np.float32)
        self.versions = np.full((count, width), -1, np.int32)
        self.lengths = np.zeros(count, np.int64)
        self.endings = np.full(count, None, object)
        self.routes: list[list[Tensor]] = [[] for _ in range(count)]

    def take(self, place: int, sequence: RunningSequence, ending: str) -> None:
        """Write the completion of a sequence that has released its row into row `place`."""
        count = len(sequence.output)
        self.tokens[place, :count], self.log_probs[place, :count] = sequence.output, sequence.log_probs
        self.versions[place, :count] = sequence.versions(0, count)
        self.lengths[place], self.endings[place], self.routes[place] = count, ending, sequence.routes
        self.left -= 1

    def as_data(self, ids: Tensor, mask: Tensor) -> DataProto:
        """Return prompts and completions as the trainer's fields; see `Rollout.generate_sequences`."""
        width = self.tokens.shape[1]
        response_mask = (torch.arange(width) < torch.from_numpy(self.lengths)[:, None]).long()
        fields = joined(
            ids,
            mask,
            responses=torch.from_numpy(self.tokens),
            there=response_mask,
            response_mask=response_mask,
            rollout_log_probs=torch.from_numpy(self.log_probs),
            versions=torch.from_numpy(self.versions),
        )
        routes = routes_column(map(whole_routes, self.routes), fields["attention_mask"])
        return DataProto.from_dict(fields, {"ending": self.endings, **routes})
