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

from meshrl.data.image_reader import IMAGES
from meshrl.data.proto import DataProto, object_array
from meshrl.models.routes import ROUTED_EXPERTS, fitted
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
        (see `meshrl.data.image_reader`); gives
        `prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`, `rollout_log_probs` and
        `versions`, with responses padded on the right to `params.max_tokens`, and why each answer came to its `ending`.
        A rollout that records routes adds `routed_experts` (see `meshrl.models.routes`).
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
