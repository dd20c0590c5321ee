"""A server started for a rollout: a process group with a log, that ends with us."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

# The server ends when the pipe to us closes, however we may have ended; its exit code is the shell's.
WATCHED = 'exec 3<&0; "$@" </dev/null & server=$!; { read -r _ <&3; kill -TERM 0; } & wait "$server"'
LAST_LINES = 20
STOP_SECONDS = 20.0


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class ServerProcess:
    """Starts a command in a process group of its own; what it prints goes to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                ["sh", "-c", WATCHED, "server", *command],
                env=os.environ | dict(environment),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)

    async def until(self, is_up: Callable[[], Awaitable[bool]], deadline: float) -> None:
        """Waits until the server answers; raises with the end of its log when it died or took too long."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + deadline
        while not await is_up():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.last_lines()}")
            if loop.time() > limit:
                raise TimeoutError(f"the server did not come up within {deadline:.0f} s:\n{self.last_lines()}")
            await asyncio.sleep(0.2)

    def last_lines(self) -> str:
        """The end of what the server printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def stop(self) -> None:
        """Ends the whole group: politely, then for good."""
        atexit.unregister(self.stop)
        assert self.process.stdin is not None
        self.process.stdin.close()
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                break
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(STOP_SECONDS)
