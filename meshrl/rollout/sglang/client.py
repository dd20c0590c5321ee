"""The part of a SGLang client that is common to its HTTP server and its in-process engine.

Both accept the same calls with the same fields, over different transports. Weights are passed as handles to shared
memory, so the engine must run on this machine.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor
from transformers import PretrainedConfig

from meshrl.models.loading import empty_causal_lm, load_model_config, load_tokenizer, stop_token_ids
from meshrl.models.moe_routing import find_routers, layers_with_experts, route_dtype
from meshrl.rollout.base import refusal, room
from meshrl.rollout.remote import EngineClient, ModelFacts, Piece, span_versions
from meshrl.rollout.requests import Request
from meshrl.rollout.weight_files import FileWeights, as_one_segment


class SglangClient(EngineClient):
    """A client of a SGLang with these `arguments` (`ServerArgs`). Subclasses implement the transport."""

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
        """Make one of SGLang's control calls; raise an error with SGLang's message if the call fails."""

    @abstractmethod
    def _events(self, fields: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Send a generation request and yield its events. Each event repeats all tokens so far."""

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
        # Running completions return to the queue and recompute their keys and values after the pause.
        await self._ask("pause_generation", mode="retract")

    async def resume(self) -> None:
        await self._ask("continue_generation")

    async def begin(self) -> None:
        await self._ask("begin_weight_update")

    async def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        with shared_by_name():
            # Every rank opens the same memory by a separate handle and copies its shard from it.
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
    """Share tensors as named files inside the context.

    Open file descriptors cannot be passed to a process that is not a child of this one.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


# Conversion between this package's requests and completions and SGLang's.


def sglang_refusal(
    request: Request, vocabulary: int, context: int, end_tokens: frozenset[int], records_routes: bool
) -> str | None:
    """Return why SGLang cannot serve a request, or None."""
    params = request.params
    if records_routes and params.stop_token_ids and not end_tokens <= frozenset(params.stop_token_ids):
        return (
            f"SGLang does not stop at stop_token_ids without the model's own ({sorted(end_tokens)}) among them, and of "
            "an answer that is cut off it returns no routes: add them, or use another rollout"
        )
    if params.repetition_penalty != 1 or params.logit_bias or params.min_tokens:
        return (
            "SGLang's log-probs are those after repetition_penalty, logit_bias and min_tokens, which are not the "
            "policy's: leave them out, or use another rollout"
        )
    return refusal(request, vocabulary, context)


def sampling_fields(request: Request, context: int, end_tokens: frozenset[int]) -> dict[str, Any]:
    """Return SGLang's sampling parameters for one completion."""
    params = request.params
    stops = frozenset(params.stop_token_ids)
    fields: dict[str, Any] = {
        "max_new_tokens": room(request, context),
        # As here, SGLang's temperature 0 means the likeliest token, with log-probs at temperature 1.
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        # SGLang obeys either all stop tokens, including the model's own, or none: see `cut_at_stop`.
        "ignore_eos": not end_tokens <= stops,
    }
    if not fields["ignore_eos"]:
        fields["stop_token_ids"] = sorted(stops)
    return fields


def as_piece(event: Mapping[str, Any], given: int, top: int, routed: RoutedLayers | None = None) -> Piece:
    """Return the part of a stream event that follows the first `given` tokens. An event's lists have all tokens."""
    meta = event["meta_info"]
    entries = (meta.get("output_token_logprobs") or [])[given:]
    tops = None
    if top:
        ranked = (meta.get("output_top_logprobs") or [])[given:]
        tops = [{int(entry[1]): float(entry[0]) for entry in sorted(row, key=lambda e: -e[0])[:top]} for row in ranked]
    reason, error = None, None
    if meta.get("finish_reason"):
        reason = meta["finish_reason"]["type"]
        if reason not in ("stop", "length", "abort") or meta["finish_reason"].get("status_code"):
            reason, error = "error", str(meta["finish_reason"].get("message") or reason)
    spans = meta.get("weight_versions")
    return Piece(
        [int(entry[1]) for entry in entries],
        [float(entry[0]) for entry in entries],
        tops,
        reason,
        error,
        span_versions(spans) if spans else None,
        routed.read(meta["routed_experts"]) if routed is not None and meta.get("routed_experts") else None,
    )


def cut_at_stop(piece: Piece, stops: Sequence[int]) -> Piece:
    """Cut the piece after its first stop token, which then ends the completion."""
    place = next((i for i, token in enumerate(piece.token_ids) if token in stops), None)
    if place is None:
        return piece
    surplus = len(piece.token_ids) - place - 1
    versions = piece.all_versions
    return Piece(
        piece.token_ids[: place + 1],
        piece.log_probs[: place + 1],
        None if piece.top_log_probs is None else piece.top_log_probs[: place + 1],
        "stop",
        None,
        versions[: len(versions) - surplus] if versions is not None else None,
    )


# MoE routes as SGLang returns them (see `meshrl.models.moe_routing`).


@dataclass(frozen=True)
class RoutedLayers:
    """The shape of SGLang's route arrays, which have rows for all layers, including layers without experts."""

    total: int
    with_experts: list[int]
    num_experts: int
    per_token: int

    @staticmethod
    def of(config: PretrainedConfig) -> RoutedLayers:
        """Derive the layout of the routes from a model's config; raise ValueError if the model has no experts."""
        model = empty_causal_lm(config, "eager", torch.float32)
        routers = find_routers(model)
        if not routers:
            raise ValueError(f"a model of type {config.model_type} has no experts: there are no routes to return")
        layers = layers_with_experts(model)
        return RoutedLayers(int(config.num_hidden_layers), layers, len(routers[0].weight), int(routers[0].top_k))

    def read(self, written: str) -> np.ndarray:
        """Decode the routes `[tokens, layers with experts, experts per token]` of all tokens except the last."""
        numbers = np.frombuffer(base64.b64decode(written), np.int32)
        together = numbers.reshape(-1, self.total, self.per_token)
        return together[:, self.with_experts].astype(route_dtype(self.num_experts))
