"""The process that removes a run's in-memory checkpoints from `/dev/shm`; it outlives all other processes of the run.

    python shm_cleaner.py FOLDER SECONDS

The process ends when the folder is gone. It removes the folder after its lock was free for SECONDS. It also removes
what a run left that was killed while it removed the folder. It is run as a script with only the standard library, so
that it costs a few MB.
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
# Seconds to wait for the folder. The run makes it right after it started this process, unless the run was killed.
APPEAR_SECONDS = 30.0


def is_held(folder: Path) -> bool:
    """Return whether a living process holds the folder's lock."""
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
    """Wait until the folder is gone, or remove it once its lock was free for `seconds`.

    Only one such process watches a folder; a second one returns at once.
    """
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
