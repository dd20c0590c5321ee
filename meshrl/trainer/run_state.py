"""What a run keeps of itself: checkpoints, batches, dumps of what went wrong; and its end on request."""

from __future__ import annotations

import copy
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from meshrl.data.batch import DataProto
from meshrl.trainer.checkpoints import Checkpoints, Found, Resumable
from meshrl.trainer.health_checks import NonFiniteSteps
from meshrl.trainer.memory_checkpoints import MemoryCopies


class Keeper:
    """The trainers call it three times a step: with the batch, after the step, and when its metrics are logged."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        batches: KeptBatches,
        nonfinite: NonFiniteSteps,
        stop: StopRequest,
        copies: MemoryCopies,
    ):
        self.checkpoints, self.batches, self.nonfinite, self.stop = checkpoints, batches, nonfinite, stop
        self.copies = copies
        nonfinite.before_dump = self._complete_checkpoint
        self._ending = False
        self.saves = True  # whether an end on request saves the step

    def _complete_checkpoint(self) -> None:
        self.checkpoints.commit(wait=True)

    def keep_batch(self, batch: DataProto, metrics: Mapping[str, Any], step: int) -> None:
        """Keeps a batch as it was generated."""
        self.batches.keep(batch, metrics, step)

    def after_step(self, trainer: Resumable, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Looks for steps that were skipped, and saves if it is time, or if this is to be the last step."""
        found = self.nonfinite.check(trainer, metrics, self.batches.last)
        self._ending = self.stop.requested
        if self._ending and self.saves:
            self.checkpoints.save(trainer)
        else:
            self.checkpoints.save_if_due(trainer)
            self.copies.copy_if_due(trainer, self.checkpoints)
        return found

    def save_last(self, trainer: Resumable) -> None:
        """Saves a run that ends before its last step, if it saves at all and has not just done so."""
        if self.checkpoints.every > 0 and not self.checkpoints.is_due(trainer.step):
            self.checkpoints.save(trainer)
            self.checkpoints.commit(wait=True)

    def after_log(self, trainer: Resumable) -> None:
        """Completes what was saved; ends the run where that was asked for."""
        self.checkpoints.commit(wait=self._ending)
        self.copies.commit()
        self.nonfinite.enforce(trainer.step)
        if self._ending:
            self.checkpoints.finish()
            what = ", which is saved: the same command goes on from there" if self.saves else ""
            raise RunStoppedError(f"stopped by SIGTERM after step {trainer.step}{what}")

    def restore(self, trainer: Resumable, found: Found | None) -> None:
        """Brings a trainer to where a checkpoint was written, if there is one."""
        if found is not None:
            self.checkpoints.restore(trainer, found)

    def fit(self, trainer: Any) -> None:
        """Runs a trainer to its end."""
        with self.stop.listening():
            trainer.fit()
            self.checkpoints.finish()


# The batches a run trained on, as they were generated: the newest ones, up to a size.

NEWS = "metrics"
NAME = re.compile(r"step_(\d+)\.dataproto")


class KeptBatches:
    """`megabytes` of batches at most, but always the newest; 0 keeps none, None all. `last` stays in memory."""

    def __init__(self, folder: Path, megabytes: int | None):
        self.folder, self.megabytes = folder, megabytes
        self.last: DataProto | None = None

    def keep(self, batch: DataProto, metrics: Mapping[str, Any], step: int) -> None:
        """Keeps a batch before anything is added to it, with what was measured while it was generated."""
        self.last = copy.copy(batch)
        self.last.meta_info = {**batch.meta_info, NEWS: dict(metrics)}
        if self.megabytes == 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, file in batch_files(self.folder).items():
            if number > step:  # of an attempt that this run has gone back behind
                file.unlink()
        self.last.save_to_disk(self.folder / f"step_{step}.dataproto")
        self._delete_old()

    def _delete_old(self) -> None:
        if self.megabytes is None:
            return
        room = self.megabytes << 20
        for number, file in enumerate(reversed(batch_files(self.folder).values())):
            room -= file.stat().st_size
            if room < 0 and number > 0:
                file.unlink()


def batch_files(folder: Path) -> dict[int, Path]:
    """The kept batches by step, in order."""
    found = {int(match[1]): file for file in folder.glob("*.dataproto") if (match := NAME.fullmatch(file.name))}
    return dict(sorted(found.items()))


def load_batch(file: Path) -> tuple[DataProto, dict[str, Any]]:
    """A kept batch, and what was measured while it was generated."""
    batch = DataProto.load_from_disk(file)
    return batch, dict(batch.meta_info.pop(NEWS, {}))


# SIGTERM, as a scheduler sends it before it takes the machine away: the step is finished, saved, and the run ends.

EXIT_CODE = 128 + signal.SIGTERM


class RunStoppedError(BaseException):
    """The run was asked to end before its last step; nothing that handles errors may take it for one of its own."""

    exit_code = EXIT_CODE


class StopRequest:
    """Hears SIGTERM. `deadline` seconds after it the run ends where it is, saved or not."""

    def __init__(self, deadline: float):
        self.deadline, self.requested, self._is_late = deadline, False, False
        self._timer: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM asks for an end instead of killing the process; only the main thread can hear it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            signal.signal(signal.SIGTERM, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_late:
            self._is_late = False
            raise RunStoppedError(
                f"stopped by SIGTERM: the step was not finished and saved within trainer.deadlines.stop "
                f"({self.deadline} s); the same command goes on from the checkpoint before"
            )
        if not self.requested:
            self.requested = True
            # A thread and the same signal: reward functions use the process's alarm for their own limits.
            self._timer = threading.Timer(self.deadline, self._remind)
            self._timer.daemon = True
            self._timer.start()

    def _remind(self) -> None:
        self._is_late = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
