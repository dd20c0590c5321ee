"""The life of the server process: open the socket, run uvicorn until a signal arrives, close the rollout."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

from meshrl.config.web_access import is_loopback
from meshrl.rollout.build import Opened
from meshrl.serving.settings import Settings

# Seconds that running requests may still take after a signal to end.
GRACE_SECONDS = 5
# Connections that may wait to be accepted.
BACKLOG = 2048
OPEN_FILES = 65_536
# Longer than clients keep an idle connection, so that no request arrives on a connection that is being closed.
KEEP_ALIVE_SECONDS = 75


def serve(opened: Opened, settings: Settings, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then close the rollout.

    Port 0 takes a free port. `say` is called with a line that contains the address.
    """
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
    # uvicorn shuts down in order and then raises the signal again. The handler turns the signal into an exception.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
        service.close()


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def check_address(host: str, port: int) -> None:
    """Raise if the server could not listen on this address; called before a model is loaded."""
    _listen(host, port, GRACE_SECONDS).close()


def _listen(host: str, port: int, patience: float) -> socket.socket:
    """Open a listening socket whose connections end if a client leaves data unread for `patience` seconds."""
    if not 0 <= port < 65_536:
        raise ValueError(f"port must be between 0 and 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # without this option, closing waits until the client has read everything
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(patience * 1000, 2**31 - 1)))
    return listening


def _raise_file_limit() -> None:
    """Raise this process's limit of open files to `OPEN_FILES` if the hard limit allows.

    Every connection is an open file, and the usual limit of 1,024 is soon reached.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
