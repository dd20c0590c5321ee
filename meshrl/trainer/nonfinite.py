"""Optimizer steps whose gradient is NaN or infinite: the workers skip them; counted, dumped and limited here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.data.proto import DataProto
from meshrl.telemetry.timers import PhaseTimer
from meshrl.trainer.checkpoint import Checkpoints, Resumable

SKIPPED = ("actor/skipped_steps", "critic/skipped_steps", "train/skipped_steps")
DUMPS = 3


class NonFiniteError(FloatingPointError):
    """Too many optimizer steps had a gradient that is not finite."""


@dataclass(frozen=True)
class _WithBatch:
    """A trainer's state together with the batch that it stumbled over."""

    trainer: Resumable
    batch: DataProto | None

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def timer(self) -> PhaseTimer:
        return self.trainer.timer

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.state_dict() | ({} if self.batch is None else {"batch": self.batch})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.trainer.load_state_dict(state)


class NonFiniteSteps:
    """Counts over the whole run; the first few are dumped (weights and batch), and after `limit` the run ends."""

    def __init__(self, limit: int | None, dumps: Checkpoints, say: Callable[[str], None]):
        self.limit, self.dumps, self.say = limit, dumps, say
        # Dumps and checkpoints are written by the same workers, one at a time.
        self.before_dump: Callable[[], None] = lambda: None
        self.count = 0

    def check(self, trainer: Resumable, metrics: Mapping[str, Any], batch: DataProto | None) -> dict[str, float]:
        """Takes note of a step's metrics."""
        skipped = int(sum(metrics.get(name, 0) for name in SKIPPED))
        self.count += skipped
        if skipped and len(list(self.dumps.folder.glob("global_step_*"))) < DUMPS:
            self.before_dump()
            self.dumps.save(_WithBatch(trainer, batch))  # type: ignore[arg-type]
            self.dumps.commit(wait=True)
            self.say(
                f"step {trainer.step}: {skipped} optimizer steps were skipped, their gradient is not finite; weights "
                f"and batch are in {self.dumps.folder / f'global_step_{trainer.step}'} for meshrl replay"
            )
        return {"training/nonfinite_steps": float(self.count)}

    def enforce(self, step: int) -> None:
        """A `NonFiniteError` after too many."""
        if self.limit is not None and self.count > self.limit:
            raise NonFiniteError(
                f"{self.count} optimizer steps had a gradient that is not finite, more than trainer.max_nan_steps "
                f"({self.limit or '0, or nan_gradient=stop'}): look at step {step} with meshrl replay, lower the "
                "learning rate or grad_clip"
            )
