"""The `Rollout` interface that workers use for every generation engine, and helpers that all engines share.

Parts: the abstract class `Rollout`, conversion between a `DataProto` batch and requests or completions, per-sample
seeds, and checks of a request before it reaches an engine.
"""

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

# Parts of a rollout's memory that `release` can free between phases. They are taken back in this order.
TAGS = ("weights", "kv_cache")
PAUSE_MODES = ("keep", "abort", "wait")
_batches = itertools.count()


class Rollout(ABC):
    """A generation engine that holds the policy's weights. Token ids go in and token ids come out.

    All methods except `generate` are synchronous and safe to call from any thread.
    """

    version: int
    pad_token_id: int
    # Whether the engine allocates device memory through torch. If so, it can use memory that torch has reserved but not
    # allocated.
    shares_allocator: bool = False

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Stream the `Chunk`s of these requests as the engine produces tokens. Other requests may run concurrently.

        A request that cannot be served ends with finish_reason `error` and a message. The remaining requests continue.
        Leaving the iteration early aborts all unfinished requests.
        """

    @abstractmethod
    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all completions of these requests. Return when all have ended, in the order of the requests."""

    def as_they_end(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Generate completions for these requests and yield each completion when its generation has ended.

        Leaving the iteration early aborts all unfinished requests. An engine that cannot report single completions
        yields all of them at the end.
        """
        yield from self.complete(requests)

    @abstractmethod
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests (None: all) with finish_reason `abort`. The tokens generated so far are kept."""

    @abstractmethod
    def pause(self, mode: str = "keep") -> None:
        """Stop generating. `keep`: running requests wait; `abort`: running requests end; `wait`: they finish first."""

    @abstractmethod
    def release(self, tags: Sequence[str] = TAGS) -> None:
        """Free the memory of the given tags: `weights`, `kv_cache`. Nothing can run until `resume(tags)`."""

    @abstractmethod
    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Continue after `pause` if no tags are given. With tags, allocate again what `release` freed."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load a new version of every weight, by Hugging Face name, between two engine steps.

        Cached keys and values are dropped. Running requests recompute their KV cache and continue with the new version.
        The weight stream may raise an error at its very end, because its contents are checked there. `version` changes
        only after the whole stream has been read.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Return counters and gauges: running and waiting requests, tokens, cache use, version."""

    @abstractmethod
    def close(self) -> None:
        """Shut down the engine and every process or thread that it started."""

    def generate_sequences(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        """Generate one completion for every prompt of a batch.

        Inputs: `input_ids` and `attention_mask` `[batch, prompt]`, padded on the left, `seeds` `[batch]`, and
        optionally `images` (see `meshrl.data.images`).

        Outputs: `prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`,
        `rollout_log_probs` and `versions`. Responses are padded on the right to `params.max_tokens`. The column
        `ending` has the finish reason of each completion. A rollout that records MoE routes adds `routed_experts` (see
        `meshrl.models.moe_routing`).
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
    """Return the length in tokens of every prompt of a batch; raise ValueError for an empty prompt."""
    lengths = attention_mask.sum(1).tolist()
    if lengths and min(lengths) == 0:
        raise ValueError(f"prompt {lengths.index(0)} of the batch is empty: every prompt needs at least one token")
    return lengths


def unpadded_prompts(prompts: DataProto) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt of a batch, without padding."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    return [tuple(prompt.tolist()) for prompt in ids[mask.bool()].split(check_no_empty_prompt(mask))]


def as_requests(prompts: DataProto, params: SamplingParams) -> list[Request]:
    """Make one `Request` for each prompt of a batch. Request ids are unique in this process."""
    batch, tokens = next(_batches), unpadded_prompts(prompts)
    images = prompts.non_tensor_batch.get(IMAGES, [()] * len(tokens))
    return [
        Request(f"batch{batch}-{i}", prompt, params, seed, seen)
        for i, (prompt, seed, seen) in enumerate(zip(tokens, prompts.batch["seeds"].tolist(), images, strict=True))
    ]


def as_batch(prompts: DataProto, answers: Sequence[Completion], width: int, pad_token_id: int) -> DataProto:
    """Return completions, one for each prompt, as a `DataProto` with padded tensors `[batch, width]`."""
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
    """Return the samples' MoE routes as a batch column, or an empty dict if no sample has routes.

    Each sample's routes are fitted to its number of tokens. A sample without routes has None.
    """
    lengths = attention_mask.sum(1).tolist()
    found = [None if one is None else fitted(one, length) for one, length in zip(routes, lengths, strict=True)]
    return {} if all(one is None for one in found) else {ROUTED_EXPERTS: object_array(found)}


def joined(ids: Tensor, mask: Tensor, *, responses: Tensor, there: Tensor, **fields: Tensor) -> dict[str, Tensor]:
    """Concatenate prompts (padded on the left) and responses into the trainer's fields.

    `there` `[batch, response]` marks the real tokens of the responses.
    """
    attention_mask = torch.cat([mask, there.to(mask.dtype)], 1)
    return {
        "prompts": ids,
        "responses": responses,
        "input_ids": torch.cat([ids, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp_(min=0),
        **fields,
    }


# Seeds of samples. A seed depends only on the run's seed, the purpose, the step and the sample's position.

TRAINING, VALIDATION = 0, 1


def sample_seeds(run_seed: int, purpose: int, step: int, count: int) -> Tensor:
    """Return an int64 seed for each of `count` samples of a step, independent of the layout and the number of ranks."""
    rng = np.random.default_rng((run_seed, purpose, step))
    return torch.from_numpy(rng.integers(0, 2**62, size=count, dtype=np.int64))


# Checks of a request before it reaches a third-party engine. A check returns an error message.

NO_WEIGHTS = "the rollout has no weights yet: sync them before generating"


def refusal(request: Request, vocabulary: int, context: int, sees: bool = False) -> str | None:
    """Return why a model with this vocabulary and context (tokens) cannot serve a request, or None.

    `sees` states whether the engine accepts images.
    """
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
    """Return the largest number of tokens that a completion may have before the context is full."""
    return min(request.params.max_tokens, context - len(request.prompt_token_ids))


def known_tags(tags: Sequence[str]) -> set[str]:
    """Return the tags as a set; raise ValueError for a tag that is not in `TAGS`."""
    unknown = set(tags) - set(TAGS)
    if unknown:
        raise ValueError(f"unknown tag '{sorted(unknown)[0]}': use one of {', '.join(TAGS)}")
    return set(tags)
