"""vLLM's own HTTP server as a rollout: its routes for tokens, pauses and weights. Weights pass through shared memory.

The server must run on this machine, or see the folder `exchange`, through which weights pass, under the same path.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meshrl.config.engine import ModelConfig
from meshrl.models.loading import load_model_config
from meshrl.models.vision import find_sight
from meshrl.rollout.base import TAGS
from meshrl.rollout.engine_server import MIDDLEWARE, VARIABLE, Http, ServerProcess, free_port, new_token
from meshrl.rollout.remote import EngineClient, ModelFacts, Piece, span_versions
from meshrl.rollout.requests import Request
from meshrl.rollout.text import special_texts
from meshrl.rollout.vllm.arguments import (
    ADAPTER,
    ADAPTERS_ENVIRONMENT,
    ENVIRONMENT,
    command_line,
    complaint,
    content_parts,
    with_one_each,
    write_adapter,
)
from meshrl.rollout.vllm.log_probs import sampling_fields, vllm_refusal
from meshrl.rollout.weight_files import FileWeights, SharedFile, memory_folder

# The prefix that the server adds to a request id for the engine.
SERVED_AS = "generate-tokens-"


class VllmServer(EngineClient):
    """A client of vLLM's server, either started with `arguments` or already running at `url`.

    A server at `url` must have been started with the arguments of `vllm.arguments.command_line`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        url: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 600.0,
        exchange: str | Path | None = None,
    ):
        trusted = bool((arguments or {}).get("trust_remote_code"))
        config = load_model_config(path, trust_remote_code=trusted)
        self._specials = functools.partial(special_texts, str(path), trusted)
        text = config.get_text_config()
        context = int((arguments or {}).get("max_model_len") or text.max_position_embeddings)
        self.facts = ModelFacts(int(text.vocab_size), context, FileWeights(config))
        self._sight = find_sight(config, ModelConfig(path=str(path), trust_remote_code=trusted))
        self.start_seconds, self._arguments, self._path = start_seconds, dict(arguments or {}), path
        self._exchange, self._environment = exchange, ENVIRONMENT | dict(environment or {})
        self._folder: Path | None = None
        self._process: ServerProcess | None = None
        self._url = url
        self._released: set[str] = set()
        self.takes_adapters = bool(self._arguments.get("enable_lora"))
        self._served: dict[str, str] = {}  # the `model` field of requests, empty for the base model
        if self.takes_adapters:
            self._environment = ADAPTERS_ENVIRONMENT | self._environment

    async def start(self) -> None:
        self._folder = Path(self._exchange or memory_folder())
        self._file = SharedFile(self._folder / "weights")
        token = None
        if self._url is None:
            port, token = free_port(), new_token()
            self._url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            command += ["--host", "127.0.0.1", "--port", str(port), "--middleware", MIDDLEWARE]
            command += command_line(self._path, self._arguments)
            environment = self._environment | {VARIABLE: token}
            self._process = ServerProcess(command, environment, self._folder / "server.log")
        self._http = Http(self._url, token)
        if self._process is not None:
            await self._process.until(lambda: self._http.is_up("/health"), self.start_seconds)
        await self._http.post("/init_weight_transfer_engine", {"init_info": {}})

    def refusal(self, request: Request) -> str | None:
        return vllm_refusal(request, self.facts.vocabulary, self.facts.context, self._sight)

    async def generate(self, name: str, request: Request, index: int) -> AsyncIterator[Piece]:
        top = request.params.top_log_probs
        body = {
            "request_id": name,
            "token_ids": list(request.prompt_token_ids),
            **(await asyncio.to_thread(self._shown, request) if request.images else {}),
            # The server counts the sampled token among the likeliest tokens.
            "sampling_params": sampling_fields(request, index, self.facts.context, self._specials)
            | {"logprobs": top + 1 if top else 0},
            "stream": True,
            **self._served,
        }
        async for event in self._http.events("/inference/v1/generate", body):
            if "error" in event:
                yield Piece([], [], finish_reason="error", error=json.dumps(event["error"]))
                return
            for choice in event["choices"]:
                yield as_piece(choice, top)

    def _shown(self, request: Request) -> dict[str, Any]:
        """Return the request fields that replace `token_ids` and add the images of a prompt."""
        assert self._sight is not None
        return {"token_ids": with_one_each(request, self._sight), "content_parts": content_parts(request.images)}

    async def abort(self, names: Sequence[str]) -> None:
        await self._http.post("/abort_requests", {"request_ids": [SERVED_AS + name for name in names]})

    async def pause(self) -> None:
        await self._http.post("/pause", mode="keep")

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def begin(self) -> None:
        await self._http.post("/start_weight_update")

    async def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        info = {"path": self._file.path, "entries": self._file.write(bucket)}
        await self._http.post("/update_weights", {"update_info": info})

    async def end(self, version: int | None) -> None:
        await self._http.post("/finish_weight_update", {"weight_version": str(version)} if version is not None else {})
        if version is not None:
            unsent = await self._http.post("/collective_rpc", {"method": "unsent_weights"})
            passed_over = await self._http.post("/collective_rpc", {"method": "passed_over"})
            if problem := complaint(unsent["results"], passed_over["results"]):
                raise RuntimeError(problem)
            self._served = {}  # vLLM dropped the adapter in the update

    async def adapt(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> None:
        assert self._folder is not None
        folder = write_adapter(self._folder / ADAPTER, config, tensors)
        wanted = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
        await self._http.post("/v1/load_lora_adapter", wanted)
        await self._http.post("/update_weight_version", {"new_version": str(version)})
        self._served = {"model": ADAPTER}

    async def flush(self) -> None:
        await self._http.post("/reset_prefix_cache", reset_running_requests="true")
        if self._sight is not None:
            await self._http.post("/reset_encoder_cache")  # image features computed with the old weights

    async def release(self, tags: Sequence[str]) -> None:
        asleep = set(tags) | self._released
        if self._arguments.get("enable_sleep_mode"):
            if "weights" in self._released:  # else vLLM considers itself asleep and frees nothing
                await self._http.post("/wake_up", tags="weights")
            # With adapters, the base weights stay in host memory.
            drops = "weights" in asleep and not self.takes_adapters
            await self._http.post("/sleep", level="2" if drops else "1", mode="keep")
            # The whole engine sleeps now, so wake up every tag that nobody has released.
            for tag in sorted(set(TAGS) - asleep):
                await self._http.post("/wake_up", tags=tag)
        self._released = asleep

    async def take_back(self, tags: Sequence[str]) -> None:
        if self._arguments.get("enable_sleep_mode"):
            for tag in tags:
                await self._http.post("/wake_up", tags=tag)
        self._released -= set(tags)

    async def close(self) -> None:
        if hasattr(self, "_http"):
            await self._http.close()
        if self._process is not None:
            self._process.stop()
        if self._folder is not None and self._exchange is None:
            shutil.rmtree(self._folder, ignore_errors=True)


def as_piece(choice: Mapping[str, Any], top: int) -> Piece:
    """Convert one choice of the server's streamed response into a `Piece`."""
    content = (choice.get("logprobs") or {}).get("content") or []
    tops = None
    if top:
        tops = []
        for entry in content:
            found = {found["token_id"]: found["logprob"] for found in (*entry["top_logprobs"], entry)}
            tops.append(dict(sorted(found.items(), key=lambda pair: -pair[1])[:top]))
    reason, error = choice.get("finish_reason"), None
    if reason not in (None, "stop", "length", "abort"):
        reason, error = "error", f"vLLM ended the request with '{reason}'"
    spans = choice.get("weight_versions")
    return Piece(
        list(choice.get("token_ids") or []),
        [entry["logprob"] for entry in content],
        tops,
        reason,
        error,
        span_versions(spans) if spans else None,
    )
