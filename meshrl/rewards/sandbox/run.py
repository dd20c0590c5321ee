"""Running of programs and checks in sandboxes, with limits on time and output. This file runs outside the sandbox.

* `run_python`: run a program and return its output. `run_checks`: run a program against checks.
* `Limits`, `Finished`, `Verdict`: the limits of a program, and the results of both functions.
* `chosen_backend`: the backend that this process uses.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from meshrl.rewards.sandbox import kernel
from meshrl.rewards.sandbox.backends import (
    Backend,
    SandboxError,
    choose_backend,
    find_bubblewrap,
    log_backend,
    reachable_temporary_folder,
)
from meshrl.rewards.sandbox.checks import Checks
from meshrl.rewards.sandbox.root import bubblewrap_command, view_of

HERE, PACKAGE = Path(__file__).parent, "meshrl.rewards.sandbox"
PACKAGE_ROOT = str(Path(__file__).parents[3])
INSIDE = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from meshrl.rewards.sandbox.inside import main; main()"
# Time limits of the sandbox's own start and end, which a busy machine may delay. A program has `Limits.seconds`.
START_SECONDS, END_SECONDS = 60.0, 30.0


@dataclass(frozen=True)
class Limits:
    """The limits of a program. Memory is per process, `seconds` is wall-clock time, `output_kb` is per stream."""

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
    """The end of a program. The status is `ok`, `failed` (see `exit_code`), `timeout` or `output` (too much output)."""

    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    isolation: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The result of checks: `passed`, `wrong`, `failed`, `timeout`, `output` or `not plain`, and the reason."""

    status: str
    why: str


def run_python(code: str, stdin: str = "", limits: Limits | None = None, *, backend: Backend | None = None) -> Finished:
    """Run an untrusted Python program, and return its output. All its processes and files are gone afterwards.

    The default `backend` is the strongest one that works here. Raise `SandboxError` if no backend works.
    """
    with _Sandbox(backend or chosen_backend(), limits or Limits(), code, ["main.py"], stdin=stdin) as started:
        return started.finish()


def run_checks(code: str, checks: Checks, limits: Limits | None = None, *, backend: Backend | None = None) -> Verdict:
    """Run a program in one sandbox and checks of its functions in a second one, and return the verdict.

    The program sends only plain data to the checks. Raise `ValueError` if the checks cannot be used with any program.
    """
    backend, limits = backend or chosen_backend(), limits or Limits()
    with ExitStack() as opened:
        ends = [opened.enter_context(end) for end in socket.socketpair()]
        program = opened.enter_context(
            _Sandbox(backend, limits, code, _loaded("host", ends[0]), (ends[0],), quiet=True)
        )
        checker = opened.enter_context(
            _Sandbox(backend, limits, "", _loaded("checker", ends[1]), (ends[1],), checks.as_json())
        )
        for end in ends:
            end.close()
        program.wait_for_start()
        done = checker.finish()
        program.stop()
        program.finish()
    if done.status in ("timeout", "output"):
        return Verdict(done.status, f"limit {'seconds' if done.status == 'timeout' else 'output_kb'}")
    try:
        status, why = json.loads(done.stdout)
    except (json.JSONDecodeError, ValueError):
        return Verdict("failed", f"the checks ended early: {done.stderr[-300:]}")
    if status == "refused":
        raise ValueError(f"checks that cannot be used: {why}")
    return Verdict(status, why)


@cache
def chosen_backend(sandbox: str = "auto", interpreter: str | None = None, strict: bool = True) -> Backend:
    """Return the backend that this process uses. The first call finds it by running a trial program, and logs it.

    `sandbox` is one of `BACKENDS`, or `auto` for the strongest backend that works. With `strict`, raise `SandboxError`
    on a machine on which no backend keeps programs from reading the trainer's files.
    """

    def trial(backend: Backend) -> None:
        with _Sandbox(backend, Limits(), "print(1)", ["main.py"]) as started:
            done = started.finish()
        if done.stdout != "1\n":
            raise SandboxError(f"a trial ended as {done.status}: {done.stderr.strip()[-300:]}")

    backend = choose_backend(trial, sandbox, interpreter, strict)
    log_backend(backend)
    return backend


@cache
def _first_code() -> str:
    return _standalone(("kernel", "root", "inside"), "start_in_bubblewrap()")


@cache
def _source(module: str) -> str:
    return (HERE / f"{module}.py").read_text()


def _standalone(modules: Sequence[str], run: str) -> str:
    """Return Python code that loads modules of this folder from their source text, and then executes `run`.

    `run` is a call of a function of the last module. The package is not visible in a sandbox, and the loaded modules
    are removed from `sys.modules`, so that the program cannot import them.
    """
    packages = ("meshrl", "meshrl.rewards", PACKAGE)
    sources = dict.fromkeys(packages, "") | {f"{PACKAGE}.{name}": _source(name) for name in modules}
    return (
        "import sys, types\n"
        f"sources = {sources!r}\n"
        "for name, source in sources.items():\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(source, name, 'exec'), vars(module))\n"
        "    parent, _, own = name.rpartition('.')\n"
        "    setattr(sys.modules[parent or name], own, module)\n"
        "for name in sources:\n"
        "    del sys.modules[name]\n"
        f"module.{run}\n"
    )


def _loaded(module: str, channel: socket.socket) -> list[str]:
    """Return the interpreter's arguments that start `module` ("host" or "checker") with its end of the channel."""
    return ["-c", _standalone(("plain", module), f"main({channel.fileno()})")]


class _Sandbox:
    """A program in a sandbox, as a context manager. On exit, all processes and files of the sandbox are gone."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        code: str,
        arguments: Sequence[str],
        inherited: Sequence[socket.socket] = (),
        stdin: str = "",
        *,
        quiet: bool = False,
    ):
        self.limits, self.folder = limits, ""
        self.said = {"stdout": b"", "stderr": b"", "status": b""}
        self.started, self.stopped = False, ""
        self.deadline = time.monotonic() + START_SECONDS
        view = view_of(backend.interpreter)
        has_root = backend.name in ("bwrap", "namespaces")
        if not has_root:
            self.folder = tempfile.mkdtemp(prefix="sandbox-", dir=reachable_temporary_folder(tempfile.gettempdir()))
            os.chmod(self.folder, 0o711)
            os.mkdir(f"{self.folder}/work", 0o700)
        job = {
            "backend": backend.name,
            "code": code,
            "command": [view.interpreter, "-B", "-s", *arguments],
            "folder": self.folder,
            "inherited": [end.fileno() for end in inherited],
            "limits": asdict(limits),
            "number": secrets.randbelow(1 << 30),
            "quiet": quiet,
            "strict": backend.strict,
            "threads_of_user": 0 if has_root and kernel.counts_by_namespace() else kernel.threads_of_user(os.getuid()),
            "visible": dict(view.paths),
        }
        with ExitStack() as closing:
            job_file = closing.enter_context(_in_memory(json.dumps(job).encode()))
            given = closing.enter_context(_in_memory(stdin.encode(errors="surrogatepass")))
            read_end, write_end = os.pipe()
            self.status = os.fdopen(read_end, "rb", buffering=0)
            closing.callback(os.close, write_end)
            passed = [job_file.fileno(), write_end, *(end.fileno() for end in inherited)]
            numbers = [str(job_file.fileno()), str(write_end)]
            if backend.name == "bwrap":
                its_status = os.dup(write_end)
                closing.callback(os.close, its_status)
                passed.append(its_status)
                bwrap = bubblewrap_command(find_bubblewrap(), view.paths, its_status, os.getuid() == 0)
                command = [*bwrap, view.interpreter, "-I", "-S", "-B", "-c", _first_code(), *numbers]
            else:
                command = [sys.executable, "-I", "-S", "-B", "-c", INSIDE, *numbers]
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={},
                    pass_fds=passed,
                    start_new_session=True,
                )
            except BaseException:
                self.status.close()
                self._remove_folder()
                raise
        self.is_bwrap = backend.name == "bwrap"
        self.selector = selectors.DefaultSelector()
        for name, stream in (("stdout", self.process.stdout), ("stderr", self.process.stderr), ("status", self.status)):
            assert stream is not None
            self.selector.register(stream, selectors.EVENT_READ, name)

    def __enter__(self) -> _Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        """End the sandbox if it still runs.

        The sandbox's outer process reaps all others. The outer process is killed only if it is stuck.
        """
        try:
            if self.process.poll() is None:
                self._signal_end()
                try:
                    self.process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(self.process.pid, signal.SIGKILL)
                    self.process.wait(END_SECONDS)
            self._wait_for_first_process()
        finally:
            self.selector.close()
            for stream in (self.process.stdout, self.process.stderr, self.status):
                if stream is not None:
                    stream.close()
            self._remove_folder()

    def wait_for_start(self) -> None:
        """Wait until the program has started, or until its sandbox has failed to start it."""
        while not self.started and self.selector.get_map():
            self._read_some()
            self._check_deadline()

    def finish(self) -> Finished:
        """Read all output until the program ends or is ended at a limit, and return the result.

        Raise `SandboxError` if the sandbox itself failed.
        """
        while self.selector.get_map():
            self._read_some()
            self._check_deadline()
        try:
            code = self.process.wait(max(END_SECONDS, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"the sandbox did not end within {END_SECONDS} s") from error
        reports = self._reports()
        if "error" in reports or "isolation" not in reports:
            why = reports.get("error") or self._text("stderr").strip()[-500:] or "it ended before the program started"
            raise SandboxError(f"cannot run a program in a sandbox: {why}")
        status = self.stopped or ("ok" if code == 0 else "failed")
        isolation: Any = reports["isolation"]
        return Finished(status, None if self.stopped else code, self._text("stdout"), self._text("stderr"), isolation)

    def stop(self, why: str = "stopped") -> None:
        """Signal the sandbox to end the program, without waiting for the end. `why` becomes the status."""
        self.stopped = self.stopped or why
        self._signal_end()
        self.deadline = time.monotonic() + END_SECONDS

    def _check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            if self.stopped or not self.started:
                what = f"end within {END_SECONDS}" if self.stopped else f"start within {START_SECONDS}"
                raise SandboxError(f"the sandbox did not {what} s: {self._text('stderr')[-500:]}")
            self.stop("timeout")

    def _read_some(self) -> None:
        for key, _ in self.selector.select(max(0.0, self.deadline - time.monotonic())):
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
                    self.stop("output")

    def _signal_end(self) -> None:
        """Kill process 1 of bubblewrap's sandbox if its PID is known, else send SIGTERM to the outer process.

        On SIGTERM, the outer process of meshrl's own sandbox kills process 1. The process that waits for process 1 then
        reaps all others.
        """
        if self.process.poll() is not None:
            return
        first = self._reports().get("child-pid") if self.is_bwrap else None
        with suppress(ProcessLookupError):
            if isinstance(first, int):
                os.kill(first, signal.SIGKILL)
            else:
                self.process.send_signal(signal.SIGTERM)

    def _wait_for_first_process(self) -> None:
        """Wait for process 1 of bubblewrap's namespace, which ends after all others and after bubblewrap itself."""
        first = self._reports().get("child-pid") if self.is_bwrap else None
        if not isinstance(first, int):
            return
        with suppress(ProcessLookupError):
            number = os.pidfd_open(first)
            try:
                ended = select.poll()
                ended.register(number, select.POLLIN)
                ended.poll(END_SECONDS * 1000)
            finally:
                os.close(number)

    def _reports(self) -> dict[str, object]:
        reports: dict[str, object] = {}
        for line in self._text("status").split("\n")[:-1]:
            reports |= json.loads(line)
        return reports

    def _text(self, name: str) -> str:
        return self.said[name].decode("utf-8", errors="replace")

    def _remove_folder(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _in_memory(content: bytes) -> IO[bytes]:
    """Return a sealed file in memory with this content, open at its beginning. The content can no longer change."""
    number = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = os.fdopen(number, "w+b")
    file.write(content)
    file.flush()
    file.seek(0)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, 0xF)  # seals against writing, growing, shrinking and further seals
    return file
