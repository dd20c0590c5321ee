"""`meshrl watch`: a run's page, served to this machine alone, that new steps come into by themselves.

The page asks `/api/run?after=MARK`. The mark stands for what it has: the run's incarnation, the bytes of metrics.jsonl
and the samples it has seen. The answer has the new mark, and only what came after the old one.
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

# Files of a run that is still being written, read on from where the last look ended.

# So much of a file's beginning tells it from another one that was given its name and number on the disk.
_HEAD = 512


class FollowedFile:
    """The JSON lines of a growing file. A line without its end is left until it has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.offset = 0
        self.began_anew = 0
        self._identity: tuple[int, bytes] | None = None

    def read_on(self) -> None:
        """Takes what is new; a file that was cut or replaced is read anew, one that is missing is empty."""
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
        # Only what is known for certain: a short file's head grows with it.
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
    """How much of a run someone has seen."""

    incarnation: int = -1
    offset: int = 0
    samples: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.offset}-{self.samples}"

    @classmethod
    def parse(cls, text: str) -> "Mark":
        """The mark that was written so; what is none has seen nothing."""
        parts = text.split("-")
        if len(parts) != 3 or not all(part.isdecimal() and len(part) < 20 for part in parts):
            return cls()
        return cls(*map(int, parts))


class WatchedRun:
    """A run as it grows: what is new since a mark. It may not have begun, begin anew, or be deleted.

    Drawing takes at most the given share of one core's time: a long run with quick steps is looked at less often.
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
        """The whole page as the run stands now."""
        with self._lock:
            self._look()
            samples = page_samples(self._generations.rows)
            data = {"samples": samples, "mark": str(self._mark()), "every_ms": EVERY_MS}
            return render_page(visible(self._data.title, 120), self._sections(), data, live=True)

    def news(self, after: Mark) -> dict[str, Any]:
        """What a page that has seen `after` lacks: sections that changed, new samples, and how the run stands."""
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
        """How the run stands, after reading on if it is time for that."""
        if time.monotonic() >= self._rest_until:
            self._state = self._read_on()
        return self._state

    def _read_on(self) -> str:
        """Takes what is new. A folder that is gone leaves what was seen last."""
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
        """Drawn once for everyone who looks, not once for each."""
        if self._drawn is None or self._drawn[0] != self._known:
            started = time.monotonic()
            self._drawn = (self._known, run_sections(self._data))
            ended = time.monotonic()
            self._rest_until = ended + self._rest * (ended - started)
        return self._drawn[1]

    def _age(self) -> float | None:
        """Seconds since the last step was logged."""
        when = self._metrics.rows[-1].get("time") if self._metrics.rows else None
        return max(0.0, round(self.clock() - when, 1)) if isinstance(when, int | float) else None


def make_server(run: WatchedRun, port: int = 0) -> ThreadingHTTPServer:
    """A server of this run on the loopback address; port 0 takes a free one."""

    class Handler(_Handler):
        watched = run

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {LOOPBACK}:{port} ({error}): choose another with --port") from error
    server.daemon_threads = True
    return server


def watch(run_dir: str | Path, port: int, say: Callable[[str], None]) -> None:
    """Serves a run until it is interrupted."""
    run = WatchedRun(run_dir)
    with make_server(run, port) as server:
        say(f"watching {run.files.path} on http://{LOOPBACK}:{server.server_port}/ (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")


class _TooLongError(Exception):
    """A request's head has more bytes than it may have."""


class _Bounded:
    """A connection's incoming bytes, up to a number of them."""

    def __init__(self, stream: Any, most: int):
        self._stream, self._left = stream, most

    def readline(self, size: int = -1) -> bytes:
        """The next line; at most one byte more than is left is looked at."""
        most = self._left + 1 if size < 0 else min(size, self._left + 1)
        line: bytes = self._stream.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise _TooLongError
        return line

    def close(self) -> None:
        """Closes the connection's side."""
        self._stream.close()


class _Handler(BaseHTTPRequestHandler):
    """Answers for the page and its news; to this machine's own names only, so that no web page can ask through a
    browser under a name of its own."""

    watched: WatchedRun
    server_version = "meshrl"
    timeout = HEADER_SECONDS
    head_timer: threading.Timer

    def handle_one_request(self) -> None:
        """A request whose head has a limited size, which the library bounds by lines alone, and time."""
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
        except Exception as error:  # whatever stands in the files: the next question may be answered
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
