"""What a run keeps of itself: checkpoints, batches, dumps of what went wrong; and its end on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshrl.data.proto import DataProto
from meshrl.trainer.batches import KeptBatches
from meshrl.trainer.checkpoint import Checkpoints, Found, Resumable
from meshrl.trainer.memory_copies import MemoryCopies
from meshrl.trainer.nonfinite import NonFiniteSteps
from meshrl.trainer.stopping import RunStoppedError, StopRequest


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
