"""Opens the socket, runs the server until it is told to end, and closes the rollout."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

from meshrl.config.web_access import is_loopback
from meshrl.rollout.build import Opened
from meshrl.serving.settings import Settings

# How long running requests may go on once the server is told to end, and how many connections may wait to be accepted.
GRACE_SECONDS = 5
BACKLOG = 2048
OPEN_FILES = 65_536
# Longer than clients keep an idle connection, so that no request meets a closing one.
KEEP_ALIVE_SECONDS = 75


def serve(opened: Opened, settings: Settings, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; port 0 takes a free one, and `say` hears which."""
    try:
        import uvicorn

        from meshrl.serving.app import build_app
        from meshrl.serving.bounded_http import BoundedProtocol
        from meshrl.serving.service import Service
    except ImportError as error:
        raise ImportError("serving needs fastapi, uvicorn and httptools: pip install 'meshrl[serve]'") from error
    _raise_file_limit()
    listening = _listen(host, port, settings.request_seconds)
    service = Service(opened, settings)
    config = uvicorn.Config(
        build_app(service),
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=BACKLOG,
        lifespan="off",
    )
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {settings.name} on http://{shown}:{listening.getsockname()[1]} (ctrl-c ends)")
    if not is_loopback(host) and settings.api_key is None:
        say("note: anyone who can reach this address may generate; --api-key sets a key")
    # uvicorn ends in order and then raises the signal again: this lets it arrive as an exception.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
        service.close()


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def check_address(host: str, port: int) -> None:
    """Raises if nobody could listen there: for before a model is loaded."""
    _listen(host, port, GRACE_SECONDS).close()


def _listen(host: str, port: int, patience: float) -> socket.socket:
    """A socket whose connections end when a client has read nothing of what waits for it for `patience` seconds."""
    if not 0 <= port < 65_536:
        raise ValueError(f"port must be between 0 and 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # else closing waits until all is read
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(patience * 1000, 2**31 - 1)))
    return listening


def _raise_file_limit() -> None:
    """A connection is an open file, and the usual limit of 1,024 is soon reached."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
