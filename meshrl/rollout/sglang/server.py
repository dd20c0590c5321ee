"""SGLang's own HTTP server as a rollout."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from meshrl.config.engine_arguments import server_words
from meshrl.rollout.remote.http import Http
from meshrl.rollout.remote.owner import new_token
from meshrl.rollout.remote.process import ServerProcess, free_port
from meshrl.rollout.sglang.client import SglangClient
from meshrl.rollout.shared_file import memory_folder

# Bytes, which JSON does not have.
HANDLES = "serialized_named_tensors"


def command_line(path: str | Path, wanted: Mapping[str, Any]) -> list[str]:
    """Arguments of SGLang's server, from the names of its `ServerArgs`."""
    return ["--model-path", str(path), *server_words("sglang", wanted)]


def _key_file(folder: Path, token: str) -> Path:
    """A file of arguments with the server's key, in a folder that others cannot read, as they can a command line."""
    file = folder / "key.yaml"
    file.touch(0o600)
    file.write_text(json.dumps({"api-key": token}) + "\n")
    return file


class SglangServer(SglangClient):
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
