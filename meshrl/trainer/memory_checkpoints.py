"""In-memory checkpoints: copies of a run's whole state, from which a restart resumes if they are the newest.

    /dev/shm/meshrl-copies-XXXX/global_step_17/    the files of a checkpoint, checksums included
    RUN/memory_copies.json                         the copies' folder, and the identity of RUN: a folder that was
                                                   copied from RUN has its own copies

No process of the run holds the copies open, so any process may be killed, the controller included. A small separate
process (`shm_cleaner`) removes them after the run has ended or if it is not resumed in time. On a single machine the
copies do not survive the machine.

With several nodes each rank's files are kept by `meshrl.controller.peer_memory`, on its own node and on the next node.
So one node may be lost. The copy that the living nodes hold together is then written to the run's checkpoints, and the
run resumes from it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from meshrl.config.trainer import RayInitConfig, RunConfig
from meshrl.controller.peer_memory import Shelves, end_shelves, write_newest
from meshrl.files import read_json, write_json
from meshrl.trainer import shm_cleaner
from meshrl.trainer.checkpoints import (
    FOLDER,
    CheckpointError,
    Checkpoints,
    Found,
    Resumable,
    checkpoint_to_resume,
    newest_complete,
    problems_of,
    step_folders,
)
from meshrl.trainer.fault_tolerance import kind_of

logger = logging.getLogger(__name__)

LINK = "memory_copies.json"
MEMORY = Path("/dev/shm")
PREFIX = "meshrl-copies-"
# Seconds for which unused copies are kept: longer than the longest wait before a restart.
HOLD_SECONDS = 900.0
# Seconds to try for the lock of the copies' folder, which its cleaner process takes for microseconds at a time.
LOCK_SECONDS = 1.0


def copies_folder(run_dir: str | Path) -> Path | None:
    """Return the folder of a run's in-memory copies, or None if the run has none."""
    folder = linked_folder(Path(run_dir)) if (Path(run_dir) / LINK).is_file() else None
    return folder if isinstance(folder, Path) and folder.is_dir() else None


def linked_folder(run_dir: Path) -> Path | str:
    """Return the folder that a run's link names, or as a string why it does not belong to this run."""
    try:
        said = read_json(run_dir / LINK)
        folder, of = Path(said["folder"]), said["run"]
        own = identity(run_dir)
        # A renamed folder keeps its inode, and other machines have other device numbers for the same disk.
        is_near = of["device"] == own["device"] or of["path"] == own["path"]
        is_own = of["inode"] == own["inode"] and is_near
    except (ValueError, TypeError, KeyError) as error:
        return f"it cannot be read ({error})"
    if not is_own:
        return f"it is of {of['path']}, from which this folder was copied"
    if folder.parent != MEMORY or not folder.name.startswith(PREFIX) or folder.is_symlink():
        return f"it names {folder}, which is no folder of copies"
    if folder.is_dir() and folder.stat().st_uid != os.geteuid():
        return f"it names {folder}, which another user owns"
    return folder


def identity(run_dir: Path) -> dict[str, Any]:
    """Return the path, device and inode of a folder, which distinguish it from its copies."""
    found = run_dir.stat()
    return {"path": os.path.realpath(run_dir), "device": found.st_dev, "inode": found.st_ino}


def drop_foreign_link(run_dir: Path) -> None:
    """Remove a link to copies that do not belong to this run; the copies themselves stay."""
    if (run_dir / LINK).is_file() and isinstance(why := linked_folder(run_dir), str):
        logger.warning("%s is passed over, no copies in memory are gone on from: %s", run_dir / LINK, why)
        (run_dir / LINK).unlink()


def newest_copy(run_dir: str | Path, say: Callable[[str], None] = logger.warning) -> Found | None:
    """Return the newest complete copy in memory, or None if there is none that can be used."""
    folder = copies_folder(run_dir)
    try:
        return newest_complete(folder, say) if folder else None
    except CheckpointError as error:
        say(f"the copies in memory are passed over: {error}")
        return None


def state_to_resume(
    trainer: RunConfig, say: Callable[[str], None] = logger.warning, again: bool = False
) -> Found | None:
    """Return where a run resumes: the newest of its checkpoints and in-memory copies, see `checkpoint_to_resume`."""
    own = (trainer.resume_mode == "auto" or again) and trainer.nnodes == 1
    copy = newest_copy(trainer.run_dir, say) if own else None
    try:
        found = checkpoint_to_resume(trainer, say, again)
    except CheckpointError as error:
        if copy is None:
            raise
        say(f"{error}; the copy in memory is taken")
        return copy
    is_of_run = found is None or found.path.resolve().parent == (Path(trainer.run_dir) / FOLDER).resolve()
    return copy if copy and (found is None or not is_of_run or copy.step > found.step) else found


def fetch_shelved(trainer: RunConfig, ray_init: RayInitConfig, say: Callable[[str], None], again: bool) -> None:
    """Write the nodes' in-memory copy to the run's checkpoints, if it is newer than these checkpoints."""
    link = copies_folder(trainer.run_dir)
    if trainer.nnodes == 1 or link is None or not (trainer.resume_mode == "auto" or again):
        return
    from meshrl.controller.ray import init_ray

    init_ray(**asdict(ray_init))
    folder = Path(trainer.run_dir).absolute() / FOLDER
    there = max((int(p.name.rpartition("_")[2]) for p in step_folders(folder) if not problems_of(p)), default=-1)
    aside = write_newest(link.name, there, lambda step: folder / f".global_step_{step}.fetched", trainer.deadlines.call)
    if aside is None:
        return
    if problems := problems_of(aside):
        say(f"the copy in the nodes' memory is passed over: {'; '.join(problems[:3])}")
        return
    path = aside.with_name(aside.name.removeprefix(".").removesuffix(".fetched"))
    if path.exists():
        shutil.rmtree(damaged := path.with_name(f"{path.name}.damaged"), ignore_errors=True)  # of an earlier fetch
        path.rename(damaged)
    aside.rename(path)
    say(f"the copy in the nodes' memory was written to {path}")


def remove_copies(run_dir: str | Path) -> None:
    """Remove a run's in-memory copies and the link to them."""
    if folder := copies_folder(run_dir):
        if "ray" in sys.modules:
            end_shelves(folder.name)
        # Rename first, because a cleaner process that is just starting may be about to make a file in the folder.
        gone = shm_cleaner.half_removed(folder)
        shutil.rmtree(gone, ignore_errors=True)  # left by an attempt that was killed at this point
        shutil.rmtree(folder.rename(gone), ignore_errors=True)
    (Path(run_dir) / LINK).unlink(missing_ok=True)


@contextmanager
def held_copies(trainer: RunConfig) -> Iterator[None]:
    """Keep a folder for in-memory copies inside the context, if `trainer.memory_copy_freq` is set.

    The copies are removed at the end, unless an infrastructure failure ended the run. The same command may then resume
    from them.
    """
    run_dir = Path(trainer.run_dir)
    drop_foreign_link(run_dir)
    if trainer.resume_mode != "auto":
        remove_copies(run_dir)  # of another run, which this run does not resume
    if trainer.memory_copy_freq < 0:
        yield
        return
    # With several nodes the name identifies the copies in peer memory, also from another machine and after the cleaner
    # process has removed the folder.
    folder = linked_folder(run_dir) if (run_dir / LINK).is_file() else _new_name(run_dir)
    assert isinstance(folder, Path)
    # If an earlier attempt's cleaner process still watches, the new one ends at once. The cleaner starts before the
    # folder is made, so that a kill at any point leaves no folder without a cleaner.
    words = [sys.executable, "-I", str(Path(shm_cleaner.__file__)), str(folder), str(HOLD_SECONDS)]
    # The cleaner inherits no open files: a reader of a killed run's output would otherwise wait for the cleaner's end.
    nothing = subprocess.DEVNULL
    warden = subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / shm_cleaner.LOCK, "wb+") as stream:
        _take_lock(stream)
        try:
            yield
        except BaseException as error:
            if kind_of(error).may_be_tried_again:
                raise
            _end(trainer, warden)
            raise
        _end(trainer, warden)


def _take_lock(stream: IO[bytes]) -> None:
    """Take the folder's lock. The cleaner process of an earlier attempt may hold it for a moment when it probes it."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.01)


def _new_name(run_dir: Path) -> Path:
    """Choose the name of a new folder for copies, and write the link from the run's folder to it."""
    if not MEMORY.is_dir():
        raise ValueError(f"trainer.memory_copy_freq needs {MEMORY}, which this machine does not have: set it to -1")
    run_dir.mkdir(parents=True, exist_ok=True)
    folder = MEMORY / f"{PREFIX}{secrets.token_hex(8)}"
    write_json(run_dir / LINK, {"folder": str(folder), "run": identity(run_dir)})
    return folder


def _end(trainer: RunConfig, warden: subprocess.Popen[bytes]) -> None:
    remove_copies(trainer.run_dir)
    warden.terminate()
    warden.wait(10)


class MemoryCopies:
    """The writer of in-memory copies. A write failure only ends the copying, because a run does not need the copies."""

    def __init__(
        self, writer: Checkpoints | None, say: Callable[[str], None], shelves: Callable[[], Shelves] | None = None
    ):
        self.writer, self.say, self._start_shelves = writer, say, shelves

    def copy_if_due(self, trainer: Resumable, beside: Checkpoints) -> None:
        """Copy the state after a step, unless a checkpoint of the step is already written synchronously."""
        writer = self.writer
        if writer is None or trainer.step % writer.every:
            return
        at_once = not any(part.background for part in beside.parts.values())
        if not (beside.is_due(trainer.step) and at_once):
            self._try(lambda: self._save(writer, trainer))

    def commit(self) -> None:
        """Complete the copy of a step after its metrics were logged, unless workers are still writing it."""
        writer = self.writer
        if writer is not None:
            self._try(lambda: self._complete(writer))

    def _save(self, writer: Checkpoints, trainer: Resumable) -> None:
        if self._start_shelves is not None and writer.shelves is None:
            try:
                writer.shelves = self._start_shelves()
            except Exception as error:
                raise CheckpointError(f"{type(error).__name__}: {error}") from error
        writer.save(trainer)

    def _complete(self, writer: Checkpoints) -> None:
        path = writer.commit(wait=False)
        if path and writer.shelves is not None:
            files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
            try:
                writer.shelves.complete(int(path.name.rpartition("_")[2]), files)
            except Exception as error:
                raise CheckpointError(f"{type(error).__name__}: {error}") from error
            shutil.rmtree(path)
        elif path and (problems := problems_of(path, checksums=False)):
            raise CheckpointError(f"{'; '.join(problems[:3])}: workers on another machine have another memory")

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CheckpointError as error:
            if kind_of(error).may_be_tried_again:
                raise
            self.writer = None
            self.say(f"there are no more copies of the state in memory (trainer.memory_copy_freq): {error}")
