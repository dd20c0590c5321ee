"""`meshrl watch`: a live report of a run, served on the loopback address, that updates itself with new steps.

FollowedFile:  incremental reading of a growing .jsonl file
WatchedRun:    the run as it grows, and its changes since a mark
make_server:   the HTTP server of the page

The page polls `/api/run?after=MARK`. A mark is how much of the run the page has: the run's incarnation, the bytes read
of metrics.jsonl and the number of samples. The response contains the new mark and only what came after the old mark.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshrl.config.web_access import HEADER_SECONDS, MOST_HEADER_BYTES, own_names, refusal
from meshrl.telemetry.page import render_page, visible
from meshrl.telemetry.panels import merge_steps
from meshrl.telemetry.report import RunData, latest_by_step, page_samples, run_sections
from meshrl.telemetry.run_folder import RunFiles, numbers_of, parse_line

# Incremental reading of files that a run still writes.

# Bytes of a file's beginning that tell the file from a replacement with the same name and inode.
_HEAD = 512


class FollowedFile:
    """The JSON lines of a growing file; an incomplete last line is read once it is complete.

    `began_anew` counts how often the file was cut, replaced or deleted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.offset = 0
        self.began_anew = 0
        self._identity: tuple[int, bytes] | None = None

    def read_on(self) -> None:
        """Append the new complete lines of the file to `rows`.

        A file that was cut or replaced is read from its beginning again. A missing file counts as empty.
        """
        try:
            with open(self.path, "rb") as stream:
                self._read(stream)
        except FileNotFoundError:
            self._forget()
        except NotADirectoryError:
            self._forget()

    def _read(self, stream: Any) -> None:
        status = os.fstat(stream.fileno())
        head = stream.read(_HEAD)
        known = self._identity
        if known is not None:
            same = known[0] == status.st_ino and head.startswith(known[1]) and status.st_size >= self.offset
            if not same:
                self._forget()
        stream.seek(self.offset)
        data = stream.read()
        end = data.rfind(b"\n") + 1
        self.rows += [record for line in data[:end].split(b"\n") if (record := parse_line(line)) is not None]
        self.offset += end
        # Only the bytes that were read as lines, because the head of a short file grows with the file.
        self._identity = (status.st_ino, head[: min(_HEAD, self.offset)])

    def _forget(self) -> None:
        if self._identity is not None:
            self.rows, self.offset, self._identity = [], 0, None
            self.began_anew += 1


logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EVERY_MS = 2000
_NEW_SAMPLES = 60


@dataclass(frozen=True)
class Mark:
    """A position in a growing run: how much of the run a page has already received."""

    incarnation: int = -1
    offset: int = 0
    samples: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.offset}-{self.samples}"

    @classmethod
    def parse(cls, text: str) -> "Mark":
        """Parse the text form of a mark; an invalid text gives the mark of a page that has nothing yet."""
        parts = text.split("-")
        if len(parts) != 3 or not all(part.isdecimal() and len(part) < 20 for part in parts):
            return cls()
        return cls(*map(int, parts))


class WatchedRun:
    """A growing run, as a page and as changes since a mark.

    The run may start later, start again, or be deleted. Drawing takes at most the given `share` of one core's time, so
    the files of a long run with quick steps are read less often.
    """

    def __init__(self, run_dir: str | Path, share: float = 0.1, clock: Callable[[], float] = time.time) -> None:
        self._rest, self._rest_until, self._state = 1 / share - 1, 0.0, "waiting"
        self.files, self.clock = RunFiles(run_dir), clock
        self._metrics = FollowedFile(self.files.metrics)
        self._generations = FollowedFile(self.files.generations)
        self._distributions = FollowedFile(self.files.distributions)
        self._config: tuple[Any, dict[str, Any], dict[str, str]] = (None, {}, {})
        self._lock = threading.Lock()
        self._known: Any = None
        self._data = RunData(self.files.path, [])
        self._drawn: tuple[Any, dict[str, str]] | None = None

    def page(self) -> str:
        """Return the whole HTML page for the current state of the run."""
        with self._lock:
            self._look()
            samples = page_samples(self._generations.rows)
            data = {"samples": samples, "mark": str(self._mark()), "every_ms": EVERY_MS}
            return render_page(visible(self._data.title, 120), self._sections(), data, live=True)

    def news(self, after: Mark) -> dict[str, Any]:
        """Return the state of the run and its changes since the mark `after`: redrawn sections and new samples."""
        with self._lock:
            state = self._look()
            now = self._mark()
            found: dict[str, Any] = {"state": state, "mark": str(now), "age": self._age()}
            reset = after.incarnation != now.incarnation or after.samples > now.samples
            if reset or after.offset != now.offset:
                found |= {"sections": self._sections(), "title": visible(self._data.title, 120)}
            if reset:
                found |= {"reset": True, "samples": page_samples(self._generations.rows)}
            elif after.samples < now.samples:
                found["samples"] = page_samples(self._generations.rows[after.samples :], _NEW_SAMPLES)
            return found

    def _look(self) -> str:
        """Return the state of the run (waiting, running or gone), after reading its files if the pause is over."""
        if time.monotonic() >= self._rest_until:
            self._state = self._read_on()
        return self._state

    def _read_on(self) -> str:
        """Read the new parts of all files and return the state of the run.

        If the folder is gone, the data that was read last stays.
        """
        if not self.files.path.is_dir():
            return "waiting" if self._known is None else "gone"
        for file in (self._metrics, self._generations, self._distributions):
            file.read_on()
        self._read_config()
        known = (self._mark(), self._distributions.offset, self._config[0])
        if known != self._known:
            self._known = known
            self._data = RunData(
                self.files.path,
                merge_steps(map(numbers_of, self._metrics.rows)),
                latest_by_step(self._distributions.rows),
                self._generations.rows,
                *self._config[1:],
            )
        return "running" if self._metrics.rows else "waiting"

    def _read_config(self) -> None:
        try:
            version = self.files.config.stat().st_mtime_ns
        except OSError:
            return
        if version != self._config[0]:
            self._config = (version, self.files.read_config(), self.files.read_config_sources())

    def _mark(self) -> Mark:
        anew = self._metrics.began_anew + self._generations.began_anew
        return Mark(anew, self._metrics.offset, len(self._generations.rows))

    def _sections(self) -> dict[str, str]:
        """Return the HTML sections, drawn once for all pages that poll, not once for each."""
        if self._drawn is None or self._drawn[0] != self._known:
            started = time.monotonic()
            self._drawn = (self._known, run_sections(self._data))
            ended = time.monotonic()
            self._rest_until = ended + self._rest * (ended - started)
        return self._drawn[1]

    def _age(self) -> float | None:
        """Return the seconds since the last step was logged, or None before the first step."""
        when = self._metrics.rows[-1].get("time") if self._metrics.rows else None
        return max(0.0, round(self.clock() - when, 1)) if isinstance(when, int | float) else None


def make_server(run: WatchedRun, port: int = 0) -> ThreadingHTTPServer:
    """Create an HTTP server for this run on the loopback address; port 0 takes a free port."""

    class Handler(_Handler):
        watched = run

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {LOOPBACK}:{port} ({error}): choose another with --port") from error
    server.daemon_threads = True
    return server


def watch(run_dir: str | Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the live report of a run until Ctrl-C; `say` is called with lines for the user."""
    run = WatchedRun(run_dir)
    with make_server(run, port) as server:
        say(f"watching {run.files.path} on http://{LOOPBACK}:{server.server_port}/ (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")


class _TooLongError(Exception):
    """An error for a request head (request line and headers) that exceeds the byte limit."""


class _Bounded:
    """A reader of a connection's incoming lines that raises after `most` bytes."""

    def __init__(self, stream: Any, most: int):
        self._stream, self._left = stream, most

    def readline(self, size: int = -1) -> bytes:
        """Read the next line; raise `_TooLongError` if it exceeds the bytes left.

        At most one byte beyond the limit is read.
        """
        most = self._left + 1 if size < 0 else min(size, self._left + 1)
        line: bytes = self._stream.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise _TooLongError
        return line

    def close(self) -> None:
        """Close the wrapped stream of the connection."""
        self._stream.close()


class _Handler(BaseHTTPRequestHandler):
    """A handler for the page (`/`) and its updates (`/api/run`).

    Only requests to this machine's own host names are answered. This prevents DNS rebinding, in which a web page
    reaches this server through a browser under the page's host name.
    """

    watched: WatchedRun
    server_version = "meshrl"
    timeout = HEADER_SECONDS
    head_timer: threading.Timer

    def handle_one_request(self) -> None:
        """Handle one request whose head has limited bytes and seconds.

        The standard library limits only the length of a line and the number of headers.
        """
        self.head_timer = threading.Timer(self.timeout, self._hang_up)
        self.head_timer.daemon = True
        self.head_timer.start()
        self.rfile = _Bounded(self.rfile, MOST_HEADER_BYTES)  # type: ignore[assignment]
        try:
            super().handle_one_request()
        except _TooLongError:
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
            self.send_error(431, f"more than {MOST_HEADER_BYTES} bytes of headers")
            self.close_connection = True
        finally:
            self.head_timer.cancel()

    def _hang_up(self) -> None:
        with suppress(OSError):  # the client has gone already
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        self.head_timer.cancel()
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        if problem := refusal(hosts, origins, own_names(LOOPBACK)):
            self._answer(403, "text/plain", problem)
            return
        try:
            if address.path == "/":
                self._answer(200, "text/html", self.watched.page())
            elif address.path == "/api/run":
                after = Mark.parse(parse_qs(address.query).get("after", [""])[0])
                self._answer(200, "application/json", json.dumps(self.watched.news(after), allow_nan=False))
            else:
                self._answer(404, "text/plain", "there are / and /api/run")
        except ConnectionError:
            logger.debug("who asked for %s is gone", address.path)
        except Exception as error:  # whatever the files contain, because a later request may succeed
            logger.exception("%s could not be answered", address.path)
            self._answer(500, "text/plain", f"{type(error).__name__}: {error}")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
