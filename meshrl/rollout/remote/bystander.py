"""The ranks of a replica that do not hold its engine: one server beside several ranks belongs to the first of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshrl.rollout.base import TAGS, Rollout
from meshrl.rollout.requests import Chunk, Completion, Request

ELSEWHERE = "the first rank of this replica has its engine and answers: ask that one"


class Bystander(Rollout):
    """Lends its device to an engine that another rank speaks with; it only keeps count of the version.

    `replica_ranks`: how many ranks share the engine. `takes_adapters`: whether it does, as all of them must know.
    """

    def __init__(self, *, pad_token_id: int, replica_ranks: int, takes_adapters: bool = False):
        self.version, self.pad_token_id, self.replica_ranks = -1, pad_token_id, replica_ranks
        self.takes_adapters = takes_adapters

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        raise RuntimeError(ELSEWHERE)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        raise RuntimeError(ELSEWHERE)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:  # gathering them may take all ranks
            pass
        self.version = version

    def update_adapter(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> None:
        """The engine's own rank has the same adapter."""
        self.version = version

    def abort(self, request_ids: Sequence[str] | None = None) -> None: ...

    def pause(self, mode: str = "keep") -> None: ...

    def release(self, tags: Sequence[str] = TAGS) -> None: ...

    def resume(self, tags: Sequence[str] | None = None) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"running": 0.0, "waiting": 0.0, "generated_tokens": 0.0, "version": float(self.version)}

    def close(self) -> None: ...
