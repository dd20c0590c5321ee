"""From outside: start a sandbox, feed it, read what it says within bounds, and end it in time."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

LAUNCHER = Path(__file__).with_name("launch.py")
PACKAGE_ROOT = str(Path(__file__).parents[3])
INSIDE = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from meshrl.rewards.sandbox.inside import main; main()"
# For the sandbox's own start and end, which a busy machine may delay; a program has `Limits.seconds`.
START_SECONDS, END_SECONDS = 60.0, 30.0


class SandboxError(RuntimeError):
    """The sandbox itself could not be made or ended; the program is not to blame."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. Memory is for each of its processes; seconds are of the clock."""

    seconds: float = 10.0
    memory_mb: float = 512
    processes: int = 16
    output_kb: float = 64
    files_mb: float = 16
    files: int = 256
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"the sandbox's limit {name} must be above 0, got {value}")


@dataclass
class Finished:
    """How a program ended: `ok`, `failed` (its exit code says how), `timeout`, or `output` (it said too much)."""

    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    isolation: dict[str, bool] = field(default_factory=dict)


def run_python(
    code: str,
    stdin: str = "",
    limits: Limits | None = None,
    *,
    interpreter: str | None = None,
    strict: bool = True,
    namespaces: bool = True,
    checks: tuple[str, str] | None = None,
) -> Finished:
    """Runs a Python program that nobody trusts; all its processes and files are gone when this returns.

    With `strict`, a kernel that grants too little isolation is a `SandboxError` instead of a risk.
    `namespaces=False` does without them, as on a kernel that refuses them. `checks` are Python code that runs in the
    program's own interpreter when the program's code has run, and a word that is printed after it.
    """
    limits = limits or Limits()
    ends = socket.socketpair() if checks is not None else None
    job = {
        "code": code,
        "checks_at": None if ends is None else ends[1].fileno(),
        "launcher": LAUNCHER.read_text(),
        "limits": asdict(limits),
        "interpreter": interpreter or default_interpreter(),
        "strict": strict,
        "namespaces": namespaces,
    }
    folder = Path(tempfile.mkdtemp(prefix="sandbox-", dir=_temp_folder()))
    try:
        folder.chmod(0o711)
        (folder / "work").mkdir(mode=0o700)
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "job.json").chmod(0o600)
        (folder / "stdin").write_text(stdin)
        (folder / "stdin").chmod(0o600)
        told = _Told(ends, "\n".join(reversed(checks)).encode()) if ends and checks else None
        return _run(folder, limits, told)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for end in ends or ():
            end.close()


@dataclass
class _Told:
    """What the program's launcher is told when it asks: our end of a socket and its end, and what is left to say."""

    ends: tuple[socket.socket, socket.socket]
    text: bytes


def _run(folder: Path, limits: Limits, told: _Told | None) -> Finished:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as status:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", INSIDE, str(folder), str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={},
                pass_fds=(write_end,) if told is None else (write_end, told.ends[1].fileno()),
                start_new_session=True,
            )
        finally:
            os.close(write_end)
            if told is not None:
                told.ends[1].close()
        try:
            return _Watch(process, status, limits, told).finish()
        finally:
            _end(process)


class _Watch:
    """Reads the program's output and the sandbox's reports until all are closed or a limit is passed."""

    def __init__(self, process: subprocess.Popen[bytes], status: IO[bytes], limits: Limits, told: _Told | None):
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self.limits, self.told = process, limits, told
        self.said: dict[str, bytes] = {"stdout": b"", "stderr": b"", "status": b""}
        self.selector = selectors.DefaultSelector()
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr), ("status", status)):
            self.selector.register(stream, selectors.EVENT_READ, name)
        if told is not None:
            told.ends[0].setblocking(False)  # a program that asks need not listen
            self.selector.register(told.ends[0], selectors.EVENT_READ, "checks")
        self.deadline = time.monotonic() + START_SECONDS
        self.started, self.stopped = False, ""

    def finish(self) -> Finished:
        with self.selector:
            while self.selector.get_map():
                self._read_some()
                if time.monotonic() > self.deadline:
                    if self.stopped or not self.started:
                        what = f"end within {END_SECONDS}" if self.stopped else f"start within {START_SECONDS}"
                        raise SandboxError(f"the sandbox did not {what} s: {self._said('stderr')[-500:]}")
                    self._stop("timeout")
        return self._result()

    def _read_some(self) -> None:
        for key, _ in self.selector.select(max(0.0, self.deadline - time.monotonic())):
            if key.data == "checks":
                self._tell(key.events)
                continue
            piece = os.read(key.fd, 65536)
            if not piece:
                self.selector.unregister(key.fileobj)
                continue
            self.said[key.data] += piece
            if key.data == "status" and not self.started and b'"isolation"' in self.said["status"]:
                self.started, self.deadline = True, time.monotonic() + self.limits.seconds
            room = int(self.limits.output_kb * 1024)
            if key.data != "status" and len(self.said[key.data]) > room:
                self.said[key.data] = self.said[key.data][:room]
                if not self.stopped:
                    self._stop("output")

    def _tell(self, event: int) -> None:
        """Answers the launcher piece by piece, and then hangs up."""
        assert self.told is not None
        line = self.told.ends[0]
        try:
            if event == selectors.EVENT_READ and line.recv(1):
                self.selector.modify(line, selectors.EVENT_WRITE, "checks")
                return
            if event == selectors.EVENT_WRITE:
                self.told.text = self.told.text[line.send(self.told.text) :]
                if self.told.text:
                    return
        except OSError:  # the program has ended
            pass
        self.selector.unregister(line)
        line.close()

    def _stop(self, why: str) -> None:
        self.stopped = why
        self.process.send_signal(signal.SIGTERM)
        self.deadline = time.monotonic() + END_SECONDS

    def _result(self) -> Finished:
        reports: dict[str, object] = {}
        for line in self._said("status").splitlines():
            reports |= json.loads(line)
        if "error" in reports or "ended" not in reports or "isolation" not in reports:
            why = reports.get("error") or self._said("stderr")[-500:] or "it ended before the program started"
            raise SandboxError(f"cannot run a program in a sandbox: {why}")
        code = reports["ended"]
        isolation = reports["isolation"]
        assert isinstance(code, int)
        assert isinstance(isolation, dict)
        status = self.stopped or ("ok" if code == 0 else "failed")
        exit_code = None if self.stopped else code
        return Finished(status, exit_code, self._said("stdout"), self._said("stderr"), isolation)

    def _said(self, name: str) -> str:
        return self.said[name].decode("utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the sandbox if it still runs. Its own outer process reaps the rest; the kill is for one that is stuck."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_SECONDS)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@cache
def default_interpreter() -> str:
    """This interpreter, or the system's where another user could not reach this one."""
    if os.getuid() != 0:
        return sys.executable
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")):
        if candidate and _others_can_run(Path(candidate)):
            return candidate
    raise SandboxError(
        f"{sys.executable} lies in a folder that only root can enter and there is no /usr/bin/python3: "
        "name a Python that other users can run (interpreter=...)"
    )


def _temp_folder() -> str:
    """Where temporary files go, or another such place where a program that runs as another user could not get in."""
    usual = tempfile.gettempdir()
    if os.getuid() != 0:
        return usual
    for candidate in (usual, "/tmp", "/var/tmp"):
        if Path(candidate).is_dir() and _others_can_run(Path(candidate)):
            return candidate
    raise SandboxError(f"other users cannot enter {usual}, /tmp or /var/tmp: set TMPDIR to a folder that they can")


def _others_can_run(path: Path) -> bool:
    """Whether others may execute a file, or enter a folder, and get there."""
    real = path.resolve()
    return all(entry.stat().st_mode & 0o001 for entry in (path, real, *path.parents, *real.parents))
