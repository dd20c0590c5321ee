"""Optimizer steps whose gradient is NaN or infinite: the workers skip them; counted, dumped and limited here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.data.proto import DataProto
from meshrl.telemetry.timers import PhaseTimer
from meshrl.trainer.checkpoint import Checkpoints, Resumable

# The models that are trained, as their metrics call them.
TRAINED = {"actor": "the actor", "critic": "the critic", "train": "the model"}
SKIPPED, TAKEN = "skipped_steps", "optimizer_steps"
DUMPS = 3


class NonFiniteError(FloatingPointError):
    """Too many optimizer steps, or all of too many steps in a row, had a gradient that is not finite."""


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
    """Counts over the whole run; the first few are dumped (weights and batch).

    The run ends after `limit` skipped optimizer steps, and after `in_a_row` steps in a row in which all optimizer steps
    of a model were skipped: the run would only repeat itself.
    """

    def __init__(self, limit: int | None, in_a_row: int | None, dumps: Checkpoints, say: Callable[[str], None]):
        self.limit, self.in_a_row, self.dumps, self.say = limit, in_a_row, dumps, say
        # Dumps and checkpoints are written by the same workers, one at a time.
        self.before_dump: Callable[[], None] = lambda: None
        self.count = 0
        self.rows: dict[str, int] = {}  # of each model: the steps in a row, up to now, that changed nothing

    def check(self, trainer: Resumable, metrics: Mapping[str, Any], batch: DataProto | None) -> dict[str, float]:
        """Takes note of a step's metrics."""
        of_model = {name: int(found) for name in TRAINED if (found := metrics.get(f"{name}/{SKIPPED}")) is not None}
        for name, number in of_model.items():
            changed_nothing = number >= max(1, metrics.get(f"{name}/{TAKEN}", 1))
            self.rows[name] = self.rows.get(name, 0) + 1 if changed_nothing else 0
        skipped = sum(of_model.values())
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
        """A `NonFiniteError` after too many, or after too many in a row."""
        if self.limit is not None and self.count > self.limit:
            raise NonFiniteError(
                f"{self.count} optimizer steps had a gradient that is not finite, more than trainer.max_nan_steps "
                f"({self.limit or '0, or nan_gradient=stop'}): look at step {step} with meshrl replay, lower the "
                "learning rate or grad_clip"
            )
        longest = max(self.rows, key=self.rows.__getitem__, default=None)
        if longest is not None and self.in_a_row and (number := self.rows[longest]) >= self.in_a_row:
            raise NonFiniteError(
                f"{number} steps in a row changed nothing: every gradient of {TRAINED[longest]} was NaN or infinite, "
                f"so all its optimizer steps were skipped (trainer.max_nan_steps_in_a_row={self.in_a_row}; 0: go on). "
                "Likely causes: weights that are NaN, in the model's folder or since an optimizer step with too high a "
                "learning rate; a reward, advantage or loss of your own that is not finite; float16, which overflows. "
                f"Look at step {step - number + 1} ({longest}/grad_norm, and meshrl replay); checkpoints of step "
                f"{step - number} and earlier were written before"
            )

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"nonfinite_steps": self.count, "skipped_in_a_row": dict(self.rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there; checkpoints of earlier versions do not have the steps in a row."""
        self.count, self.rows = state["nonfinite_steps"], dict(state.get("skipped_in_a_row", {}))
