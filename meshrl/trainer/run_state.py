"""State that a run keeps on disk, and its end on request.

    Keeper        calls checkpoints, kept batches, dumps and the stop request at the right points of a step
    KeptBatches   the newest batches as they were generated, for `meshrl replay`
    StopRequest   SIGTERM: the step is finished and saved, then the run ends

The trainers call the `Keeper`, which is made in launch.py.
"""

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
    """The hooks that a trainer calls three times a step: with the batch, after the step, and after logging."""

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
        self.saves = True  # whether a stop request saves a checkpoint of the step

    def _complete_checkpoint(self) -> None:
        self.checkpoints.commit(wait=True)

    def keep_batch(self, batch: DataProto, metrics: Mapping[str, Any], step: int) -> None:
        """Keep a batch as it was generated, before the trainer adds columns."""
        self.batches.keep(batch, metrics, step)

    def after_step(self, trainer: Resumable, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Check for skipped optimizer steps; save a checkpoint if one is due or if the run was asked to stop."""
        found = self.nonfinite.check(trainer, metrics, self.batches.last)
        self._ending = self.stop.requested
        if self._ending and self.saves:
            self.checkpoints.save(trainer)
        else:
            self.checkpoints.save_if_due(trainer)
            self.copies.copy_if_due(trainer, self.checkpoints)
        return found

    def save_last(self, trainer: Resumable) -> None:
        """Save a checkpoint of a run that ends early, unless saving is off or this step was already saved."""
        if self.checkpoints.every > 0 and not self.checkpoints.is_due(trainer.step):
            self.checkpoints.save(trainer)
            self.checkpoints.commit(wait=True)

    def after_log(self, trainer: Resumable) -> None:
        """Complete the step's checkpoint, enforce the limits of non-finite steps, and end the run if requested."""
        self.checkpoints.commit(wait=self._ending)
        self.copies.commit()
        self.nonfinite.enforce(trainer.step)
        if self._ending:
            self.checkpoints.finish()
            what = ", which is saved: the same command goes on from there" if self.saves else ""
            raise RunStoppedError(f"stopped by SIGTERM after step {trainer.step}{what}")

    def restore(self, trainer: Resumable, found: Found | None) -> None:
        """Restore workers and trainer from a checkpoint, if one was found."""
        if found is not None:
            self.checkpoints.restore(trainer, found)

    def fit(self, trainer: Any) -> None:
        """Run a trainer to its end, with SIGTERM as a stop request, and complete its checkpoints."""
        with self.stop.listening():
            trainer.fit()
            self.checkpoints.finish()


# The newest batches of a run as they were generated, up to a total size.

NEWS = "metrics"
NAME = re.compile(r"step_(\d+)\.dataproto")


class KeptBatches:
    """The newest batches of a run as files, at most `megabytes` of them but always the newest.

    0 keeps none, None keeps all. `last` is the newest batch in memory.
    """

    def __init__(self, folder: Path, megabytes: int | None):
        self.folder, self.megabytes = folder, megabytes
        self.last: DataProto | None = None

    def keep(self, batch: DataProto, metrics: Mapping[str, Any], step: int) -> None:
        """Keep a batch before columns are added to it, with the metrics of its generation."""
        self.last = copy.copy(batch)
        self.last.meta_info = {**batch.meta_info, NEWS: dict(metrics)}
        if self.megabytes == 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, file in batch_files(self.folder).items():
            if number > step:  # of an earlier attempt; this run resumed before that step
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
    """Return the files of kept batches by step, in ascending order."""
    found = {int(match[1]): file for file in folder.glob("*.dataproto") if (match := NAME.fullmatch(file.name))}
    return dict(sorted(found.items()))


def load_batch(file: Path) -> tuple[DataProto, dict[str, Any]]:
    """Load a kept batch, and the metrics of its generation."""
    batch = DataProto.load_from_disk(file)
    return batch, dict(batch.meta_info.pop(NEWS, {}))


# SIGTERM, which a scheduler sends before it takes the machine away: the step is finished and saved, then the run ends.

EXIT_CODE = 128 + signal.SIGTERM


class RunStoppedError(BaseException):
    """The end of a run that was asked to stop before its last step.

    A `BaseException`, so that no handler of ordinary errors catches it.
    """

    exit_code = EXIT_CODE


class StopRequest:
    """A request by SIGTERM to end the run after its step.

    If the step is not finished and saved `deadline` seconds after the signal, the run ends at once.
    """

    def __init__(self, deadline: float):
        self.deadline, self.requested, self._is_late = deadline, False, False
        self._timer: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Make SIGTERM request a stop inside this context, instead of killing the process.

        Only the main thread can receive signals. In another thread this context changes nothing.
        """
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
            # A timer thread that sends the same signal, because reward functions use SIGALRM for their own limits.
            self._timer = threading.Timer(self.deadline, self._remind)
            self._timer.daemon = True
            self._timer.start()

    def _remind(self) -> None:
        self._is_late = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
