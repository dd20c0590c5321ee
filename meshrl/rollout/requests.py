"""The messages of a rollout: sampling parameters, requests, streamed chunks and whole completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """The parameters that choose each next token.

    `temperature` 0 means the likeliest token. `top_k` -1 and `top_p` 1 mean no limit. A completion ends once its text
    contains one of the `stop` strings or once one of `stop_token_ids` is sampled. The stop string or stop token stays
    in the completion's tokens. `top_log_probs` is the number of likeliest tokens whose log-probs are returned in
    addition to the sampled token's.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be -1 (no limit) or at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}")
        if any(not math.isfinite(bias) for bias in self.logit_bias.values()):
            raise ValueError("every logit_bias must be finite")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.top_log_probs < 0:
            raise ValueError(f"top_log_probs must be 0 or more, got {self.top_log_probs}")


@dataclass(frozen=True)
class Request:
    """One prompt with `params.n` completions. Equal requests with equal seeds get equal tokens, whatever else runs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    images: tuple[bytes, ...] = ()  # encoded image files, in the order of their positions among the tokens


@dataclass(frozen=True)
class Chunk:
    """New tokens of completion `index` of a request. A completion's last chunk has its finish reason.

    Tokens, log-probs and versions are parallel lists. The log-probs are the policy's at the sampling temperature,
    before top-k, top-p and min-p filter the distribution. At temperature 0 the log-probs are those at temperature 1. A
    rollout that records MoE `routes` returns them with the last chunk. `routes` has the experts of each token of prompt
    and completion, as far as the model has computed them.
    """

    request_id: str
    index: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str | None = None
    error: str | None = None
    top_log_probs: list[dict[int, float]] | None = None
    routes: np.ndarray | None = None


@dataclass
class Completion:
    """One whole completion, assembled from its chunks."""

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    top_log_probs: list[dict[int, float]] | None = None
    routes: np.ndarray | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's tokens and take over its finish reason, error and routes."""
        self.token_ids += chunk.token_ids
        self.log_probs += chunk.log_probs
        self.versions += chunk.versions
        self.finish_reason, self.error = chunk.finish_reason, chunk.error
        if chunk.top_log_probs is not None:
            self.top_log_probs = (self.top_log_probs or []) + chunk.top_log_probs
        if chunk.routes is not None:
            self.routes = chunk.routes


def gather(requests: Iterable[Request], chunks: Iterable[Chunk]) -> list[Completion]:
    """Assemble the completions of `requests` from chunks in any order. Sort by request, then by index."""
    found = {(r.request_id, i): Completion(r.request_id, i) for r in requests for i in range(r.params.n)}
    for chunk in chunks:
        found[chunk.request_id, chunk.index].add(chunk)
    return list(found.values())
