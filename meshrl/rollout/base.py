"""What every rollout offers to the workers, whatever generates inside."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.data.batch import DataProto, object_array
from meshrl.data.images import IMAGES
from meshrl.models.moe_routing import ROUTED_EXPERTS, fitted
from meshrl.rollout.requests import Chunk, Completion, Request, SamplingParams

__all__ = ["TAGS", "Rollout", "SamplingParams", "as_batch"]

# What a rollout can give up between phases, and takes back in this order.
TAGS = ("weights", "kv_cache")
PAUSE_MODES = ("keep", "abort", "wait")
_batches = itertools.count()


class Rollout(ABC):
    """Generates with the policy's weights. Token ids in, token ids out.

    All methods but `generate` are plain calls and safe from any thread.
    """

    version: int
    pad_token_id: int
    # Whether its memory on a device is torch's own: then what torch holds free is free for it.
    shares_allocator: bool = False

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Streams `Chunk`s of these requests as they come; other requests may run at the same time.

        A request that cannot be served ends with finish_reason `error` and says why; the others go on. Leaving the
        iteration early aborts what is left.
        """

    @abstractmethod
    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers these requests and returns when all have ended, in the order asked."""

    def as_they_end(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers these requests and gives each answer when it has ended; leaving early aborts what is left.

        An engine that cannot tell before all have ended gives them then.
        """
        yield from self.complete(requests)

    @abstractmethod
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends requests (None: all) with finish_reason `abort`; their tokens so far are kept."""

    @abstractmethod
    def pause(self, mode: str = "keep") -> None:
        """Stops generating. `keep`: running requests wait; `abort`: they end; `wait`: they finish first."""

    @abstractmethod
    def release(self, tags: Sequence[str] = TAGS) -> None:
        """Gives memory back: `weights`, `kv_cache`. Nothing can run until `resume(tags)`."""

    @abstractmethod
    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Without tags goes on after `pause`; with tags takes back what `release` gave up."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes a new version of every weight, by Hugging Face name, between two engine steps.

        Cached keys and values are dropped; running requests recompute theirs and go on with the new version. The stream
        may fail at its very end, where it is found to be wrong: the version is the new one only when it is through.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters and gauges: requests running and waiting, tokens, cache use, version."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and what it started."""

    def generate_sequences(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        """Answers every prompt of a batch once.

        Takes `input_ids` and `attention_mask` [batch, prompt], padded on the left, `seeds` [batch] and perhaps `images`
        (see `meshrl.data.images`); gives
        `prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`, `rollout_log_probs` and
        `versions`, with responses padded on the right to `params.max_tokens`, and why each answer came to its `ending`.
        A rollout that records routes adds `routed_experts` (see `meshrl.models.moe_routing`).
        """
        if self.version < 0:
            raise RuntimeError("the rollout has no weights yet: sync them before generating")
        started = time.perf_counter()
        requests = as_requests(prompts, params)
        answers = self.complete(requests)
        failed = [a for a in answers if a.finish_reason == "error"]
        if failed:
            raise RuntimeError(
                f"{len(failed)} of {len(answers)} prompts failed; {failed[0].request_id}: {failed[0].error}"
            )
        output = as_batch(prompts, answers, params.max_tokens, self.pad_token_id)
        output.meta_info["timing"] = {"generate": time.perf_counter() - started}
        return output


def check_no_empty_prompt(attention_mask: Tensor) -> list[int]:
    """The length of every prompt of a batch; one without a token is an error."""
    lengths = attention_mask.sum(1).tolist()
    if lengths and min(lengths) == 0:
        raise ValueError(f"prompt {lengths.index(0)} of the batch is empty: every prompt needs at least one token")
    return lengths


def unpadded_prompts(prompts: DataProto) -> list[tuple[int, ...]]:
    """The token ids of every prompt of a batch."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    return [tuple(prompt.tolist()) for prompt in ids[mask.bool()].split(check_no_empty_prompt(mask))]


def as_requests(prompts: DataProto, params: SamplingParams) -> list[Request]:
    """One request for each prompt of a batch."""
    batch, tokens = next(_batches), unpadded_prompts(prompts)
    images = prompts.non_tensor_batch.get(IMAGES, [()] * len(tokens))
    return [
        Request(f"batch{batch}-{i}", prompt, params, seed, seen)
        for i, (prompt, seed, seen) in enumerate(zip(tokens, prompts.batch["seeds"].tolist(), images, strict=True))
    ]


def as_batch(prompts: DataProto, answers: Sequence[Completion], width: int, pad_token_id: int) -> DataProto:
    """The answers, one to each prompt, as the rectangle that the trainer works on."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    lengths = torch.tensor([len(answer.token_ids) for answer in answers])
    response_mask = (torch.arange(width) < lengths[:, None]).long()
    inside = response_mask.bool()

    def rectangle(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full(inside.shape, fill, dtype=dtype)
        out[inside] = torch.tensor([value for row in rows for value in row], dtype=dtype)
        return out

    fields = joined(
        ids,
        mask,
        responses=rectangle([a.token_ids for a in answers], pad_token_id, torch.long),
        there=response_mask,
        response_mask=response_mask,
        rollout_log_probs=rectangle([a.log_probs for a in answers], 0.0, torch.float32),
        versions=rectangle([a.versions for a in answers], -1, torch.int32),
    )
    endings = np.array([answer.finish_reason for answer in answers], dtype=object)
    routes = routes_column((answer.routes for answer in answers), fields["attention_mask"])
    return DataProto.from_dict(fields, {"ending": endings, **routes})


def routes_column(routes: Iterable[np.ndarray | None], attention_mask: Tensor) -> dict[str, np.ndarray]:
    """Samples' routes, of as many tokens as each has, under their name in a batch; nothing where none has any.

    A sample without routes has None.
    """
    lengths = attention_mask.sum(1).tolist()
    found = [None if one is None else fitted(one, length) for one, length in zip(routes, lengths, strict=True)]
    return {} if all(one is None for one in found) else {ROUTED_EXPERTS: object_array(found)}


def joined(ids: Tensor, mask: Tensor, *, responses: Tensor, there: Tensor, **fields: Tensor) -> dict[str, Tensor]:
    """Prompts (padded on the left) and responses as the trainer's fields; `there` marks responses' tokens."""
    attention_mask = torch.cat([mask, there.to(mask.dtype)], 1)
    return {
        "prompts": ids,
        "responses": responses,
        "input_ids": torch.cat([ids, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp_(min=0),
        **fields,
    }


# Seeds of samples: numbers that depend on the run's seed, the step and the sample's place alone.

TRAINING, VALIDATION = 0, 1


def sample_seeds(run_seed: int, purpose: int, step: int, count: int) -> Tensor:
    """An int64 seed for each of `count` samples of a step; the layout and the number of ranks play no part."""
    rng = np.random.default_rng((run_seed, purpose, step))
    return torch.from_numpy(rng.integers(0, 2**62, size=count, dtype=np.int64))


# What engines that are not ours to change need before a call reaches them: refusals in words.

NO_WEIGHTS = "the rollout has no weights yet: sync them before generating"


def refusal(request: Request, vocabulary: int, context: int, sees: bool = False) -> str | None:
    """Why a request cannot be served by a model of this vocabulary and context, or None."""
    prompt = request.prompt_token_ids
    if not prompt:
        return "the prompt is empty: it needs at least one token"
    if len(prompt) >= context:
        return f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in a context of {context}"
    if request.images and not sees:
        return "not supported yet: prompts with images in this engine; rollout.name=embedded and vllm take them"
    for what, ids in (
        ("prompt", prompt),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", request.params.logit_bias),
    ):
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            return f"token id {wrong} in {what} is outside the vocabulary (0 to {vocabulary - 1})"
    return None


def room(request: Request, context: int) -> int:
    """How many tokens an answer may have before the context is full."""
    return min(request.params.max_tokens, context - len(request.prompt_token_ids))


def known_tags(tags: Sequence[str]) -> set[str]:
    """The tags as a set; raises for one that no rollout knows."""
    unknown = set(tags) - set(TAGS)
    if unknown:
        raise ValueError(f"unknown tag '{sorted(unknown)[0]}': use one of {', '.join(TAGS)}")
    return set(tags)
