"""What SGLang's server and its engine have in common: the same calls with the same fields, carried in different ways.

Weights go as handles to shared memory, so the engine must run on this machine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from meshrl.models.loading import load_model_config, load_tokenizer, stop_token_ids
from meshrl.rollout.remote.client import EngineClient, ModelFacts, Piece
from meshrl.rollout.requests import Request
from meshrl.rollout.sglang.routes import RoutedLayers
from meshrl.rollout.sglang.sampling import as_piece, cut_at_stop, sampling_fields, sglang_refusal
from meshrl.rollout.shared_file import as_one_segment
from meshrl.rollout.weight_stream import FileWeights


class SglangClient(EngineClient):
    """Speaks with a SGLang of these `arguments` (`ServerArgs`); subclasses carry the calls."""

    def __init__(self, path: str | Path, arguments: Mapping[str, Any] | None, start_seconds: float):
        self._path, self._arguments, self.start_seconds = path, dict(arguments or {}), start_seconds
        trusted = bool(self._arguments.get("trust_remote_code"))
        config = load_model_config(path, trust_remote_code=trusted)
        context = int(self._arguments.get("context_length") or config.max_position_embeddings)
        self.facts = ModelFacts(int(config.vocab_size), context, FileWeights(config))
        own = config.eos_token_id
        ends = own if isinstance(own, list) else [own] if own is not None else []
        self.end_tokens = frozenset([*ends, *stop_token_ids(path, load_tokenizer(path, trusted))])
        self._ranks = int(self._arguments.get("tp_size", 1))
        self._routed = RoutedLayers.of(config) if self._arguments.get("enable_return_routed_experts") else None

    @abstractmethod
    async def _ask(self, call: str, **fields: Any) -> None:
        """Makes a call of SGLang's; raises with its words when it refuses."""

    @abstractmethod
    def _events(self, fields: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """What it says to a request for tokens: everything so far, again and again."""

    def refusal(self, request: Request) -> str | None:
        facts, records_routes = self.facts, self._routed is not None
        return sglang_refusal(request, facts.vocabulary, facts.context, self.end_tokens, records_routes)

    async def generate(self, name: str, request: Request, index: int) -> AsyncIterator[Piece]:
        params = request.params
        fields = sampling_fields(request, self.facts.context, self.end_tokens)
        asked = {
            "rid": name,
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": fields,
            "return_logprob": True,
            "top_logprobs_num": params.top_log_probs,
            "return_routed_experts": self._routed is not None,
            "stream": True,
        }
        given = 0
        async for event in self._events(asked):
            if "error" in event:
                yield Piece([], [], finish_reason="error", error=str(event["error"]))
                return
            piece = as_piece(event, given, params.top_log_probs, self._routed)
            given += len(piece.token_ids)
            if params.stop_token_ids and fields["ignore_eos"]:
                piece = cut_at_stop(piece, params.stop_token_ids)
            yield piece
            if piece.finish_reason is not None:
                break
        else:
            return
        if piece.finish_reason == "stop" and fields["ignore_eos"]:
            await self.abort([name])

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            await self._ask("abort_request", rid=name)

    async def pause(self) -> None:
        # Running answers go back to the queue, from where they compute their keys and values anew.
        await self._ask("pause_generation", mode="retract")

    async def resume(self) -> None:
        await self._ask("continue_generation")

    async def begin(self) -> None:
        await self._ask("begin_weight_update")

    async def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        with shared_by_name():
            # Every rank opens the same memory, by a handle of its own, and takes its part of it.
            shared = as_one_segment(bucket)
            handles = [bytes(ForkingPickler.dumps(shared)) for _ in range(self._ranks)]
        await self._ask(
            "update_weights_from_tensor",
            serialized_named_tensors=handles,
            flush_cache=False,
            abort_all_requests=False,
        )

    async def end(self, version: int | None) -> None:
        await self._ask("end_weight_update")
        if version is not None:
            await self._ask("update_weight_version", new_version=str(version), abort_all_requests=False)

    async def flush(self) -> None:
        await self._ask("flush_cache")

    async def release(self, tags: Sequence[str]) -> None:
        if self._arguments.get("enable_memory_saver"):
            await self._ask("release_memory_occupation", tags=list(tags))

    async def take_back(self, tags: Sequence[str]) -> None:
        if self._arguments.get("enable_memory_saver"):
            await self._ask("resume_memory_occupation", tags=list(tags))


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Inside, tensors are shared as named files: open files cannot be handed to a process that is not our child."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
