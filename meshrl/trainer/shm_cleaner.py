"""The process that keeps a run's copies in memory: it outlives all others of the run, and then clears up.

    python shm_cleaner.py FOLDER SECONDS

It ends when the folder is gone, and removes it once nobody has held its lock for so many seconds. What a run that was
killed while it removed the folder has left goes as well. It is run as a
script, with the standard library alone, so that it costs a few MB.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from pathlib import Path

LOCK = "in-use"
OWN_LOCK = "watched"
LOOK_SECONDS = 0.5
# The folder is made right after this process was started, unless whoever did it was killed in between.
APPEAR_SECONDS = 30.0


def is_held(folder: Path) -> bool:
    """Whether a living process has the folder in use."""
    try:
        with open(folder / LOCK, "rb+") as stream:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def half_removed(folder: Path) -> Path:
    """Return the name that a folder has while it is removed."""
    return folder.with_name(f"{folder.name}.gone")


def watch(folder: Path, seconds: float) -> None:
    """Waits until the folder is gone or has not been in use for so long; one such process is enough."""
    until = time.monotonic() + APPEAR_SECONDS
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(LOOK_SECONDS / 10)
    try:
        with open(folder / OWN_LOCK, "wb") as stream:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _watch(folder, seconds)
    except (BlockingIOError, FileNotFoundError):
        return


def _watch(folder: Path, seconds: float) -> None:
    used_at = time.monotonic()
    while folder.is_dir():
        if is_held(folder):
            used_at = time.monotonic()
        elif time.monotonic() - used_at > seconds:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(LOOK_SECONDS)
    shutil.rmtree(half_removed(folder), ignore_errors=True)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), float(sys.argv[2]))
