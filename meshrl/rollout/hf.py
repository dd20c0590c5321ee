"""The reference rollout: transformers' own `generate`. It is slow and plain, to check other engines' log-probs against.

A step is one call of `generate` for a few tokens over the running completions, padded on the left. No state is kept
between calls, so no cache can outlive a weight update. A logits processor chooses the tokens inside the call, because
every completion has its own sampling parameters and its own random generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.models.loading import named_weights
from meshrl.models.moe_routing import Routers
from meshrl.rollout.base import NO_WEIGHTS, TAGS, known_tags, refusal, room
from meshrl.rollout.embedded.sampler import derived_seed
from meshrl.rollout.in_process_rollout import SteppingRollout
from meshrl.rollout.requests import Chunk, Request
from meshrl.rollout.text import find_stop
from meshrl.rollout.weight_files import checked


@dataclass
class Answer:
    """A completion in progress with its request, its random generator and all tokens sampled so far."""

    request: Request
    index: int
    limit: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    routes: list[Tensor] = field(default_factory=list)

    def take(self, logits: Tensor, tokenizer: Tokenizer | None) -> int:
        """Sample the next token from the model's logits `[vocabulary]`.

        Sets `finish_reason` if the token is the last one.
        """
        token, log_probs = choose(self, logits)
        self.token_ids.append(token)
        self.log_probs.append(float(log_probs[token]))
        params = self.request.params
        if params.top_log_probs:
            best = log_probs.topk(min(params.top_log_probs, len(log_probs)))
            self.top_log_probs.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        if token in params.stop_token_ids or self._has_stop_string(tokenizer):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.limit:
            self.finish_reason = "length"
        return token

    def _has_stop_string(self, tokenizer: Tokenizer | None) -> bool:
        params = self.request.params
        if not params.stop or tokenizer is None or len(self.token_ids) <= params.min_tokens:
            return False
        return find_stop(tokenizer, np.array(self.token_ids), params.stop) is not None

    def chunk(self, start: int, version: int, finish_reason: str | None) -> Chunk:
        """Return the tokens from `start` on as a chunk.

        With `finish_reason`, the chunk is the completion's last one.
        """
        tops = self.top_log_probs[start:] if self.request.params.top_log_probs else None
        tokens = self.token_ids[start:]
        return Chunk(
            self.request.request_id,
            self.index,
            tokens,
            self.log_probs[start:],
            [version] * len(tokens),
            finish_reason,
            None,
            tops,
            torch.cat(self.routes).cpu().numpy() if finish_reason is not None and self.routes else None,
        )

    def add_routes(self, routes: Tensor) -> None:
        """Append the routes of tokens that have none yet. The newest token has no routes, as no forward has read it."""
        known = sum(map(len, self.routes))
        computed = len(self.request.prompt_token_ids) + len(self.token_ids) - 1
        self.routes.append(routes[:computed][known:])


def choose(answer: Answer, logits: Tensor) -> tuple[int, Tensor]:
    """Sample a token and return it with the model's log-probs `[vocabulary]` at the sampling temperature.

    Penalties, biases and filters affect the token but not the log-probs.
    """
    params = answer.request.params
    ids: Any = torch.tensor([[*answer.request.prompt_token_ids, *answer.token_ids]], device=logits.device)
    scores: Any = logits.float()[None].clone()
    temperature = params.temperature or 1.0
    log_probs = (scores[0] / temperature).log_softmax(-1)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token, bias in params.logit_bias.items():
        scores[0, token] += bias
    if len(answer.token_ids) < params.min_tokens:
        scores[0, list(params.stop_token_ids)] = -torch.inf
    if params.temperature == 0:
        return int(scores.argmax()), log_probs
    scores = scores / temperature
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    # Sampled on the CPU, so that the seed alone determines the token on every device.
    return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=answer.generator)), log_probs


class _Chooser(LogitsProcessor):
    """A logits processor that leaves `generate` one token per row: the token sampled by the row's `Answer`."""

    def __init__(self, answers: Sequence[Answer], tokenizer: Tokenizer | None, pad_token_id: int):
        self.answers, self.tokenizer, self.pad_token_id = answers, tokenizer, pad_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = [
            self.pad_token_id if answer.finish_reason else answer.take(row, self.tokenizer)
            for answer, row in zip(self.answers, scores, strict=True)
        ]
        forced = torch.full_like(scores, -torch.inf)
        forced[torch.arange(len(tokens)), tokens] = 0.0
        return forced  # type: ignore[return-value]


class _Ended(StoppingCriteria):
    def __init__(self, answers: Sequence[Answer]):
        self.answers = answers

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        ended = [answer.finish_reason is not None for answer in self.answers]
        return torch.tensor(ended, device=input_ids.device)  # type: ignore[return-value]


class HFRollout(SteppingRollout):
    """Generation by a Hugging Face module that is either shared with the trainer or a separate replica.

    The module must run with one of transformers' own attention functions. `stride` is the number of tokens per step.
    With `records_routes`, completions report the experts that processed their tokens.
    """

    shares_allocator = True

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        pad_token_id: int,
        tokenizer: Tokenizer | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        stride: int = 16,
        shares_weights: bool = False,
        records_routes: bool = False,
    ):
        super().__init__()
        self.routers = Routers(hf_model) if records_routes else None
        self.hf_model, self.pad_token_id, self.tokenizer = hf_model, pad_token_id, tokenizer
        self.max_num_seqs, self.stride, self.shares_weights = max_num_seqs, stride, shares_weights
        self.vocabulary = int(hf_model.config.vocab_size)
        own = int(hf_model.config.max_position_embeddings)
        self.context = min(max_model_len or own, own)
        self.version = -1
        self._answers: dict[tuple[str, int], Answer] = {}
        self._released: set[str] = set()
        self._lacks_weights = False
        self._tokens = 0

    def add(self, request: Request) -> str | None:
        if self.version < 0:
            return NO_WEIGHTS
        problem = refusal(request, self.vocabulary, self.context)
        if problem is None and request.params.stop and self.tokenizer is None:
            problem = "stop strings need a tokenizer: this rollout was built without one"
        if problem is None:
            for index in range(request.params.n):
                generator = torch.Generator().manual_seed(derived_seed(request.seed, index))
                answer = Answer(request, index, room(request, self.context), generator)
                self._answers[request.request_id, index] = answer
        return problem

    @torch.no_grad()
    def step(self) -> list[Chunk]:
        answers = list(self._answers.values())[: self.max_num_seqs]
        before = [len(answer.token_ids) for answer in answers]
        self._generate(answers)
        self._tokens += sum(len(answer.token_ids) for answer in answers) - sum(before)
        chunks = []
        for answer, start in zip(answers, before, strict=True):
            chunks.append(answer.chunk(start, self.version, answer.finish_reason))
            key = (answer.request.request_id, answer.index)
            del self._answers[key]
            if answer.finish_reason is None:
                self._answers[key] = answer  # move behind the completions that have waited
        return chunks

    def _generate(self, answers: Sequence[Answer]) -> None:
        device = self.hf_model.device
        rows = [[*answer.request.prompt_token_ids, *answer.token_ids] for answer in answers]
        width = max(map(len, rows))
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        steps = min(self.stride, max(answer.limit - len(answer.token_ids) for answer in answers))
        with _evaluating(self.hf_model), self._noting_routes(answers, [width - len(row) for row in rows]):
            self.hf_model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    max_new_tokens=steps, do_sample=False, pad_token_id=self.pad_token_id
                ),
                logits_processor=LogitsProcessorList([_Chooser(answers, self.tokenizer, self.pad_token_id)]),
                stopping_criteria=StoppingCriteriaList([_Ended(answers)]),
            )

    @contextmanager
    def _noting_routes(self, answers: Sequence[Answer], padding: Sequence[int]) -> Iterator[None]:
        """Record the MoE routes of every forward pass inside the context and add them to the answers.

        `padding` is the number of padding tokens before each answer's prompt.
        """
        if self.routers is None:
            yield
            return
        made: list[Tensor] = []
        routers = self.routers
        hook = self.hf_model.register_forward_hook(
            lambda *_: made.append(routers.recorded().unflatten(0, (len(answers), -1)))
        )
        try:
            with routers.routing(records=True):
                yield
        finally:
            hook.remove()
        for answer, before, routes in zip(answers, padding, torch.cat(made, 1), strict=True):
            answer.add_routes(routes[before:])

    def has_work(self) -> bool:
        return bool(self._answers)

    def num_generated(self) -> int:
        return self._tokens

    def is_suspended(self) -> bool:
        return bool(self._released) or self._lacks_weights

    def drop(self, request_ids: Sequence[str] | None) -> list[Chunk]:
        names = None if request_ids is None else set(request_ids)
        wanted = [key for key in self._answers if names is None or key[0] in names]
        answers = [self._answers.pop(key) for key in wanted]
        return [answer.chunk(len(answer.token_ids), self.version, "abort") for answer in answers]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.lock:
            if "weights" in self._released:
                raise RuntimeError("the rollout has released its weights: resume(['weights']) before an update")
            if not self.shares_weights:
                own = named_weights(self.hf_model)
                self._lacks_weights = True  # until all weights have arrived
                for name, value in checked(weights, {name: param.shape for name, param in own.items()}):
                    own[name].copy_(value)
            self.version, self._lacks_weights = version, False
            self._work.notify_all()

    def release(self, tags: Sequence[str] = TAGS) -> None:
        with self.lock:
            given = known_tags(tags) - self._released
            self._released |= given
            if "weights" in given and not self.shares_weights:
                for param in self.hf_model.parameters():
                    param.data = param.data.new_empty(0, *param.shape).detach()
                self._lacks_weights = True

    def take_back(self, tags: Sequence[str]) -> None:
        with self.lock:
            if "weights" in known_tags(tags) & self._released and not self.shares_weights:
                for param in self.hf_model.parameters():
                    param.data = param.data.new_zeros(param.shape[1:])
            self._released -= set(tags)
            self._work.notify_all()

    def stats(self) -> dict[str, float]:
        with self.lock:
            running = min(len(self._answers), self.max_num_seqs)
            return {
                "running": float(running),
                "waiting": float(len(self._answers) - running),
                "generated_tokens": float(self._tokens),
                "version": float(self.version),
            }


@contextmanager
def _evaluating(hf_model: PreTrainedModel) -> Iterator[None]:
    """Set evaluation mode without dropout and without the model's own generation config (an end token, penalties)."""
    training, habits = hf_model.training, hf_model.generation_config
    hf_model.eval()
    hf_model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        hf_model.generation_config = habits
        hf_model.train(training)
