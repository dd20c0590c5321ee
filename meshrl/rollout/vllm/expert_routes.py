"""MoE routes of vLLM's tokens (see `meshrl.models.moe_routing`), assembled from the routes of vLLM's steps.

After every step, a worker reports which tokens of which requests it computed and which experts processed the tokens. A
request whose prompt prefix was in vLLM's cache did not compute that prefix. The request that computed the prefix has
stored its routes by block, in the same way as vLLM stores keys and values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshrl.models.moe_routing import fitted, route_dtype

# A request by vLLM's name, the position of its first token in this step, and the routes of its tokens in this step.
Computed = tuple[str, int, np.ndarray]


class StepRoutes:
    """A recorder in vLLM's worker that captures the routes of each step's tokens."""

    def __init__(self, worker: Any):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        config = worker.vllm_config
        if config.use_v2_model_runner:
            raise ValueError("routes are read from vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        if worker.device.type != "cpu" and not config.model_config.enforce_eager:
            raise ValueError(
                "vLLM's recorded graphs do not say where tokens go: set actor_rollout_ref.rollout.enforce_eager=true, "
                "or actor_rollout_ref.actor.router_replay.mode=R2"
            )
        self.runner = worker.model_runner
        self.capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(worker.get_model(), self.capturer)
        # The capturer's buffer has room for layers without experts as well, so list the layers with experts.
        layers = {
            int(m.layer_id) for m in worker.get_model().modules() if hasattr(m, "router") and hasattr(m, "layer_id")
        }
        self.layers = sorted(layers)
        self.dtype = route_dtype(config.model_config.get_num_experts())

    def of_step(self) -> list[Computed]:
        """Return the requests, positions and routes of the tokens that the last step computed."""
        batch = self.runner.input_batch
        names, starts = list(batch.req_ids), batch.num_computed_tokens_cpu
        borders = self.runner.query_start_loc.np[: len(names) + 1]
        if not names:
            return []
        rows = self.capturer.device_buffer[: int(borders[-1]), self.layers].cpu().numpy().astype(self.dtype)
        parts = zip(names, borders[:-1].tolist(), borders[1:].tolist(), strict=True)
        return [(name, int(starts[at]), rows[first:last]) for at, (name, first, last) in enumerate(parts)]


@dataclass
class _Routed:
    """The state of one request: its tokens so far, the routes of those tokens, and the keys of its full blocks."""

    tokens: list[int]
    room: np.ndarray | None = None  # the first `known` rows hold routes
    known: int = 0
    blocks: list[bytes] = field(default_factory=list)

    def add(self, routes: np.ndarray) -> None:
        """Append the routes of the request's next tokens, `[tokens, layers, experts per token]`."""
        end = self.known + len(routes)
        if self.room is None:
            self.room = np.empty((max(end, len(self.tokens)), *routes.shape[1:]), routes.dtype)
        if end > len(self.room):
            self.room = np.concatenate([self.room, np.empty_like(self.room, shape=(end, *routes.shape[1:]))])
        self.room[self.known : end] = routes
        self.known = end


class RequestRoutes:
    """A store of MoE routes next to vLLM's engine.

    It has the routes of running requests, and of blocks that later requests may find in vLLM's cache. That cache has
    `most_blocks`, so the store keeps as many. Beyond that, the store drops the blocks that were stored or found least
    recently.
    """

    def __init__(self, block_size: int, most_blocks: int):
        self.block_size, self.most_blocks = block_size, most_blocks
        self._requests: dict[str, _Routed] = {}
        self._blocks: dict[bytes, np.ndarray] = {}

    def begin(self, name: str, prompt: Iterable[int]) -> None:
        """Register a request that enters the engine, with its prompt tokens."""
        self._requests[name] = _Routed(list(prompt))

    def note(self, computed: Sequence[Computed]) -> None:
        """Add the routes that a step computed. Tokens that a request computes again keep their first routes."""
        # First come requests that continue where they were. Other requests of the same step may use their blocks.
        for finds in (False, True):
            for internal, start, rows in computed:
                # vLLM may have added a suffix to the name.
                request = self._requests.get(internal) or self._requests.get(internal.rpartition("-")[0])
                if request is None or (start > request.known) != finds:
                    continue
                if finds:
                    self._find(request, start, rows)
                request.add(rows[max(request.known - start, 0) :])
                self._leave_blocks(request)

    def _find(self, request: _Routed, end: int, like: np.ndarray) -> None:
        """Copy the routes of tokens up to `end` from stored blocks. vLLM had these tokens in its cache."""
        while request.known < end:
            key = self._key(request, request.known // self.block_size)
            found = self._blocks.pop(key, None)
            if found is None:
                request.add(fitted(like[:0], end - request.known))  # unknown routes
                return
            self._blocks[key] = found  # now the most recently used block
            request.add(found[request.known % self.block_size :][: end - request.known])

    def _leave_blocks(self, request: _Routed) -> None:
        full = min(request.known, len(request.tokens)) // self.block_size
        for place in range(len(request.blocks), full):
            assert request.room is not None
            first = place * self.block_size
            key = self._key(request, place)
            self._blocks.pop(key, None)
            self._blocks[key] = request.room[first : first + self.block_size].copy()
        while len(self._blocks) > self.most_blocks:
            del self._blocks[next(iter(self._blocks))]  # this block cannot be in vLLM's cache any more

    def _key(self, request: _Routed, place: int) -> bytes:
        """Return the key of a block: a hash of all tokens up to the block's end."""
        while len(request.blocks) <= place:
            first = len(request.blocks) * self.block_size
            tokens = np.array(request.tokens[first : first + self.block_size], np.int64).tobytes()
            before = request.blocks[-1] if request.blocks else b""
            request.blocks.append(hashlib.blake2b(before + tokens, digest_size=16).digest())
        return request.blocks[place]

    def sampled(self, name: str, tokens: Sequence[int]) -> None:
        """Append the tokens that a request has sampled."""
        self._requests[name].tokens += tokens

    def end(self, name: str) -> np.ndarray | None:
        """Remove a request and return all its routes, or None if it has computed nothing."""
        request = self._requests.pop(name)
        self._leave_blocks(request)
        return None if request.room is None else request.room[: request.known].copy()

    def forget_blocks(self) -> None:
        """Forget all stored blocks, because vLLM's cache has been cleared."""
        self._blocks.clear()
