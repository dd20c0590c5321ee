"""Sandbox backends of this machine: bubblewrap, meshrl's own namespaces, or Landlock alone, tried in this order."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
BACKENDS = {
    "bwrap": "bubblewrap: a root and namespaces of its own",
    "namespaces": "meshrl's own root and namespaces",
    "landlock": "Landlock: other files cannot be opened, but their names can be asked for",
    "none": "no root of its own: programs can read what their user can",
}
# The backends that `auto` tries, and with strict=false the weak ones as well. Without its own root or Landlock, a
# program can read the expected results of its tests.
STRICT, WEAK = ("bwrap", "namespaces", "landlock"), ("none",)


class SandboxError(RuntimeError):
    """An error of the sandbox itself, which could not be started or ended. The program is not the cause."""


@dataclass(frozen=True)
class Backend:
    """A sandbox backend and its interpreter. `refused` holds the reasons why the earlier backends do not work here."""

    name: str
    interpreter: str
    refused: tuple[str, ...] = ()
    strict: bool = True

    def describe(self) -> str:
        """Return a description of one line for logs and `meshrl doctor`."""
        why = f" (not {'; not '.join(self.refused)})" if self.refused else ""
        return f"{self.name}, {BACKENDS[self.name]}; interpreter {self.interpreter}{why}"


def choose_backend(
    trial: Callable[[Backend], None], wanted: str = "auto", interpreter: str | None = None, strict: bool = True
) -> Backend:
    """Return the first backend and interpreter for which `trial` succeeds.

    Raise `SandboxError` with all reasons if no backend works.
    """
    if wanted != "auto" and wanted not in BACKENDS:
        raise ValueError(f"there is no sandbox '{wanted}': use auto, {', '.join(BACKENDS)}")
    if wanted == "none" and strict:
        raise ValueError("sandbox=none lets programs read the trainer's files: it needs strict=false as well")
    names = (wanted,) if wanted != "auto" else STRICT if strict else STRICT + WEAK
    refused: list[str] = []
    for name in names:
        for candidate in [interpreter] if interpreter else _interpreters():
            backend = Backend(name, candidate, tuple(refused), strict)
            try:
                trial(backend)
            except (SandboxError, OSError) as error:
                reason = str(error).removeprefix("cannot run a program in a sandbox: ")
            else:
                return backend
        refused.append(f"{name}: {reason}")
    raise SandboxError(
        "nothing here can keep a program from reading the trainer's files ("
        + "; ".join(refused)
        + "). Install bubblewrap, allow user namespaces (or run as root), or use a kernel with Landlock; strict=false "
        "in reward.kwargs runs programs without, if they can be trusted"
    )


@cache
def log_backend(backend: Backend) -> None:
    """Log once per process which sandbox runs its programs."""
    level = logging.WARNING if backend.name in WEAK else logging.INFO
    logger.log(level, "programs run in the sandbox %s", backend.describe())


def find_bubblewrap() -> str:
    """Return the path of `bwrap` in the system's folders, or raise `SandboxError` if it is not installed."""
    found = shutil.which("bwrap", path=SYSTEM_PATH)
    if found is None:
        raise SandboxError("it is not installed")
    return found


def _interpreters() -> list[str]:
    """Return this interpreter and, if the user is root, the system's interpreter.

    Programs of root run as another user, who cannot reach an interpreter in root's home folder.
    """
    system = shutil.which("python3", path=SYSTEM_PATH)
    return [sys.executable] + ([system] if system and os.getuid() == 0 and system != sys.executable else [])


def reachable_temporary_folder(usual: str) -> str:
    """Return the folder `usual`, or for root the first temporary folder that other users can enter.

    Programs that root starts run as another user.
    """
    if os.getuid() != 0:
        return usual
    for candidate in (usual, "/tmp", "/var/tmp"):
        if Path(candidate).is_dir() and _others_can_enter(Path(candidate)):
            return candidate
    raise SandboxError(f"other users cannot enter {usual}, /tmp or /var/tmp: set TMPDIR to a folder that they can")


def _others_can_enter(path: Path) -> bool:
    real = path.resolve()
    return all(entry.stat().st_mode & 0o001 for entry in (path, real, *path.parents, *real.parents))
