"""SGLang as a rollout: its `Engine` inside this process, or its HTTP server.

The schedulers of an in-process `Engine` are child processes of this one. The engine's blocking methods cannot run on an
event loop, so this module calls the engine's `tokenizer_manager`, as SGLang's HTTP server does.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import json
import multiprocessing
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from meshrl.config.validate_rollout import server_words
from meshrl.rollout.engine_server import Http, ServerProcess, free_port, new_token
from meshrl.rollout.sglang.client import SglangClient
from meshrl.rollout.weight_files import memory_folder

# The SGLang type that holds the fields of each call. Calls that are not listed take the fields as keyword arguments.
CALLS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
# How long, in seconds, a cancelled task, and a killed process, may take to end.
TASK_SECONDS, END_SECONDS = 5.0, 60.0


class SglangEngine(SglangClient):
    """SGLang without a server, with SGLang's own `arguments` (`ServerArgs`). A process can have one."""

    def __init__(self, path: str | Path, *, arguments: Mapping[str, Any] | None = None, start_seconds: float = 600.0):
        super().__init__(path, arguments, start_seconds)
        self._engine: Any = None
        self._processes: set[BaseProcess] = set()

    async def start(self) -> None:
        try:
            from sglang.srt.entrypoints.engine import Engine
        except ImportError as error:
            raise ImportError("rollout.name=sglang needs SGLang: pip install 'meshrl[sglang]'") from error
        method, others = multiprocessing.get_start_method(allow_none=True), set(multiprocessing.active_children())
        try:
            # On this event loop, which SGLang uses from here on. This thread is not the main thread, so SGLang cannot
            # install signal handlers.
            self._engine = Engine(model_path=str(self._path), **self._arguments)
        finally:
            multiprocessing.set_start_method(method, force=True)
            self._processes = set(multiprocessing.active_children()) - others

    async def _ask(self, call: str, **fields: Any) -> None:
        from sglang.srt.managers import io_struct

        method = getattr(self._engine.tokenizer_manager, call)
        answer = method(getattr(io_struct, CALLS[call])(**fields)) if call in CALLS else method(**fields)
        if hasattr(answer, "__await__"):
            answer = await answer
        # The result is None, or (success, message), or an object with these two attributes.
        if isinstance(answer, tuple):
            success, message = answer[:2]
        else:
            success, message = getattr(answer, "success", True), getattr(answer, "message", "")
        if not success:
            raise RuntimeError(f"{call}: {message}")

    async def _events(self, fields: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        async for event in await self._engine.async_generate(**fields):
            yield event

    async def close(self) -> None:
        if self._engine is not None:
            self._end_processes()
            self._engine = None
            # SGLang leaves tasks behind that would wait forever for its processes.
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=TASK_SECONDS)

    def _end_processes(self) -> None:
        """Kill the engine's processes. SGLang's own shutdown would also kill all other children of this process."""
        # SGLang registers its shutdown with atexit. Its watchdog thread ends this process when an engine process exits.
        atexit.unregister(self._engine.shutdown)
        if (watchdog := getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)) is not None:
            watchdog.stop()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
        for process in self._processes:
            process.join(END_SECONDS)
        self._processes = set()


# SGLang's own HTTP server as a rollout.

# The field whose values are bytes, which JSON cannot represent.
HANDLES = "serialized_named_tensors"


def command_line(path: str | Path, wanted: Mapping[str, Any]) -> list[str]:
    """Return the arguments of SGLang's server for the given `ServerArgs` fields."""
    return ["--model-path", str(path), *server_words("sglang", wanted)]


def _key_file(folder: Path, token: str) -> Path:
    """Write the server's API key to a file of arguments, because other users can read a command line.

    The file has mode 0600.
    """
    file = folder / "key.yaml"
    file.touch(0o600)
    file.write_text(json.dumps({"api-key": token}) + "\n")
    return file


class SglangServer(SglangClient):
    """A client of SGLang's HTTP server, either started with `arguments` or already running at `url`."""

    def __init__(
        self,
        path: str | Path,
        *,
        url: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 600.0,
    ):
        super().__init__(path, arguments, start_seconds)
        self._environment, self._url = dict(environment or {}), url
        self._folder: Path | None = None
        self._process: ServerProcess | None = None

    async def start(self) -> None:
        self._folder = Path(memory_folder())
        token = None
        if self._url is None:
            port, token = free_port(), self._arguments.pop("api_key", None) or new_token()
            self._url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--config", str(_key_file(self._folder, token)), *command_line(self._path, self._arguments)]
            self._process = ServerProcess(command, self._environment, self._folder / "server.log")
        self._http = Http(self._url, token)
        if self._process is not None:
            await self._process.until(lambda: self._http.is_up("/health"), self.start_seconds)

    async def _ask(self, call: str, **fields: Any) -> None:
        if HANDLES in fields:
            fields[HANDLES] = [base64.b64encode(handles).decode() for handles in fields[HANDLES]]
        await self._http.post(f"/{call}", fields)

    def _events(self, fields: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        return self._http.events("/generate", fields)

    async def close(self) -> None:
        if hasattr(self, "_http"):
            await self._http.close()
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
