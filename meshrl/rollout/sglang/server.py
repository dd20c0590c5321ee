"""SGLang's own HTTP server as a rollout; weights go as handles to shared memory, so it must run on this machine."""

from __future__ import annotations

import base64
import shutil
import sys
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
from meshrl.rollout.remote.http import Http
from meshrl.rollout.remote.process import ServerProcess, free_port
from meshrl.rollout.requests import Request
from meshrl.rollout.sglang.sampling import as_piece, cut_at_stop, sampling_fields, sglang_refusal
from meshrl.rollout.shared_file import memory_folder
from meshrl.rollout.weight_stream import expected_shapes


def command_line(path: str | Path, wanted: Mapping[str, Any]) -> list[str]:
    """Arguments of SGLang's server, from the names of its `ServerArgs`."""
    words = ["--model-path", str(path)]
    for name, value in wanted.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words += [option, str(value)]
    return words


class SglangServer(EngineClient):
    """A client of SGLang's server: of one that it starts with `arguments`, or of the one at `url`."""

    def __init__(
        self,
        path: str | Path,
        *,
        url: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 600.0,
    ):
        self._arguments, self._environment = dict(arguments or {}), dict(environment or {})
        trusted = bool(self._arguments.get("trust_remote_code"))
        config = load_model_config(path, trust_remote_code=trusted)
        context = int(self._arguments.get("context_length") or config.max_position_embeddings)
        self.facts = ModelFacts(int(config.vocab_size), context, expected_shapes(config))
        own = config.eos_token_id
        ends = own if isinstance(own, list) else [own] if own is not None else []
        self.end_tokens = frozenset([*ends, *stop_token_ids(path, load_tokenizer(path, trusted))])
        self.start_seconds, self._path, self._url = start_seconds, path, url
        self._ranks = int(self._arguments.get("tp_size", 1))
        self._folder: Path | None = None
        self._process: ServerProcess | None = None

    async def start(self) -> None:
        self._folder = Path(memory_folder())
        if self._url is None:
            port = free_port()
            self._url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
            command += command_line(self._path, self._arguments)
            self._process = ServerProcess(command, self._environment, self._folder / "server.log")
        self._http = Http(self._url)
        if self._process is not None:
            await self._process.until(lambda: self._http.is_up("/health"), self.start_seconds)

    def refusal(self, request: Request) -> str | None:
        return sglang_refusal(request, self.facts.vocabulary, self.facts.context)

    async def generate(self, name: str, request: Request, index: int) -> AsyncIterator[Piece]:
        params = request.params
        fields = sampling_fields(request, self.facts.context, self.end_tokens)
        body = {
            "rid": name,
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": fields,
            "return_logprob": True,
            "top_logprobs_num": params.top_log_probs,
            "stream": True,
        }
        given = 0
        async for event in self._http.events("/generate", body):
            if "error" in event:
                yield Piece([], [], finish_reason="error", error=str(event["error"]))
                return
            piece = as_piece(event, given, params.top_log_probs)
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
            await self._http.post("/abort_request", {"rid": name})

    async def pause(self) -> None:
        # Running answers go back to the queue, from where they compute their keys and values anew.
        await self._http.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {})

    async def begin(self) -> None:
        await self._http.post("/begin_weight_update", {})

    async def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        with shared_by_name():
            shared = [(name, tensor.detach().cpu().contiguous().clone().share_memory_()) for name, tensor in bucket]
            handles = base64.b64encode(bytes(ForkingPickler.dumps(shared))).decode()
        body = {"serialized_named_tensors": [handles] * self._ranks, "flush_cache": False, "abort_all_requests": False}
        await self._http.post("/update_weights_from_tensor", body)

    async def end(self, version: int | None) -> None:
        await self._http.post("/end_weight_update", {})
        if version is not None:
            await self._http.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def flush(self) -> None:
        await self._http.post("/flush_cache")

    async def release(self, tags: Sequence[str]) -> None:
        if self._arguments.get("enable_memory_saver"):
            await self._http.post("/release_memory_occupation", {"tags": list(tags)})

    async def take_back(self, tags: Sequence[str]) -> None:
        if self._arguments.get("enable_memory_saver"):
            await self._http.post("/resume_memory_occupation", {"tags": list(tags)})

    async def close(self) -> None:
        if hasattr(self, "_http"):
            await self._http.close()
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Inside, tensors are shared as named files: open files cannot be handed to a process that is not our child."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
