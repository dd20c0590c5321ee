"""The one shape that every engine outside of this process has for us: vLLM's server, SGLang's server and engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from meshrl.rollout.requests import Request
from meshrl.rollout.weight_stream import FileWeights


@dataclass
class Piece:
    """New tokens of one answer. `all_versions`, where the engine says them, are those of all its tokens so far.

    `routes`, of an engine that records them, come with the last.
    """

    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    error: str | None = None
    all_versions: list[int] | None = None
    routes: np.ndarray | None = None


@dataclass
class ModelFacts:
    """What has to be known of the served model before a request is sent to it."""

    vocabulary: int
    context: int
    weights: FileWeights = field(repr=False)


class EngineClient(ABC):
    """Speaks one engine's language. Everything runs on the event loop of `RemoteRollout`."""

    facts: ModelFacts
    start_seconds: float
    takes_adapters = False  # whether `adapt` works

    @abstractmethod
    async def start(self) -> None:
        """Waits until the engine answers; raises when it does not come up within `start_seconds`."""

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be served, or None."""

    @abstractmethod
    def generate(self, name: str, request: Request, index: int) -> AsyncIterator[Piece]:
        """Answer `index` of a request, known to the engine by `name`; the last piece has a finish reason."""

    @abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """Makes answers end with finish reason `abort`."""

    @abstractmethod
    async def pause(self) -> None:
        """Stops after the present step; running answers keep their place."""

    @abstractmethod
    async def resume(self) -> None:
        """Goes on after `pause`."""

    @abstractmethod
    async def begin(self) -> None:
        """Opens a weight update; the engine is paused."""

    @abstractmethod
    async def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Takes some of the weights, by Hugging Face name."""

    @abstractmethod
    async def end(self, version: int | None) -> None:
        """Closes a weight update under a version, or without one when it has failed."""

    async def adapt(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> None:
        """Takes a LoRA adapter, in peft's words, that later answers go through; the engine is paused."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    @abstractmethod
    async def flush(self) -> None:
        """Drops all cached keys and values; running answers compute theirs anew."""

    @abstractmethod
    async def release(self, tags: Sequence[str]) -> None:
        """Gives memory back; the engine is paused."""

    @abstractmethod
    async def take_back(self, tags: Sequence[str]) -> None:
        """Undoes `release`."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connection, and the engine if it was started for us."""


def span_versions(spans: Sequence[dict[str, object]]) -> list[int]:
    """The version of every token from an engine's list of (version, start, end); unnamed versions are -1."""
    versions: list[int] = []
    for span in spans:
        label = str(span["version"])
        version = int(label) if label.lstrip("-").isdigit() else -1
        versions += [version] * (int(str(span["end"])) - int(str(span["start"])))
    return versions
