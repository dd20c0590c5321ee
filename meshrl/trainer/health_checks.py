"""Health checks of training: gates that warn early with likely causes and remedies, and stop the run if configured.

before the update   NaN or inf in the tensors to train on
after each step     first step on-policy? rollout and trainer agree? entropy left? rewards that differ? the user's
limits

`NonFiniteSteps` counts optimizer steps that were skipped because their gradient was NaN or infinite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrl.config.keys import count, nearest
from meshrl.config.trainer import GatesConfig
from meshrl.data.batch import DataProto
from meshrl.files import write_json
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.trainer.checkpoints import Checkpoints, Resumable

logger = logging.getLogger(__name__)

DIFFERENCE, ENTROPY = "training/rollout_log_prob_diff_mean", "actor/entropy"
# The policy's KL to the old log-probs before the first optimizer step of a batch.
FIRST_KL = "actor/ppo_kl_before"
# A metric that every update of the policy has.
LEARNING_RATE = "actor/lr"
WITHOUT_SIGNAL = "training/zero_advantage_share"
# Tensors to train on. NaN and inf are counted under the response mask, and in scores and rewards anywhere.
EVERYWHERE = ("token_level_scores", "token_level_rewards")
UNDER_MASK = ("advantages", "returns", "old_log_probs", "rollout_log_probs", "ref_log_prob", "values")


class GateError(RuntimeError):
    """A finding of a gate that is configured to stop the run."""


@dataclass(frozen=True)
class Finding:
    """A finding of a gate: its message, and whether it stops the run."""

    gate: str
    message: str
    stops: bool


class Gates:
    """The gates of a run, which check every step.

    `say` receives warnings. Batches that stop a run are written to `folder`/dumps.
    """

    def __init__(
        self,
        config: GatesConfig,
        folder: Path,
        *,
        say: Callable[[str], None] | None = None,
        old_is_trainers: bool = True,
    ):
        """Set up the gates of a new run.

        `old_is_trainers` means that the old log-probs are the trainer's own, so that the first KL must be 0.
        """
        self.config, self.folder, self.old_is_trainers = config, folder, old_is_trainers
        self._say = say
        self._first_entropy: float | None = None
        self._first_step = True
        self._knows_metrics = False
        self._in_a_row: dict[str, int] = {}
        self._said: dict[str, int] = {}
        self._warnings = 0
        self._stopping: Finding | None = None
        self._batch: DataProto | None = None

    def check_batch(self, batch: DataProto, step: int) -> None:
        """Check the batch for NaN and inf before it is trained on; raise if `non_finite` is configured to stop.

        The batch is kept in case a later gate stops the run.
        """
        self._batch = batch
        if self.config.non_finite == "off" or not (bad := non_finite(batch)):
            return
        places = "; ".join(f"{name}: {count} values, first in sample {row}" for name, (count, row) in bad.items())
        message = (
            f"NaN or inf in what is to be trained on ({places}). A reward, a log-prob or a value overflowed, or the "
            "weights are already broken: look at the dump's samples, then at the last steps' grad_norm and ppo_kl"
        )
        finding = Finding("non_finite", message, self.config.non_finite == "stop")
        self._note(finding, step)
        if finding.stops:
            raise self._stop(finding, step, {})

    def after_step(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Check a step's metrics and return the gates' metrics; call `raise_if_stopped` after these are logged."""
        found = [*self._first(metrics), *self._every(metrics), *self._limits(metrics), *self._blind_limits(metrics)]
        self._first_step = self._first_step and FIRST_KL not in metrics  # the critic's warm-up has no such metric
        for finding in found:
            self._note(finding, step)
            if finding.stops and self._stopping is None:
                self._stopping = finding
        counts = {f"gates/{finding.gate}": 1.0 for finding in found}
        return counts | {"gates/warnings": float(self._warnings)}

    def raise_if_stopped(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raise a `GateError` if a gate of this step stops the run."""
        if self._stopping is not None:
            raise self._stop(self._stopping, step, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the gates carry from step to step."""
        remembered = {"first_entropy": self._first_entropy, "first_step": self._first_step, "said": dict(self._said)}
        return remembered | {"in_a_row": dict(self._in_a_row), "warnings": self._warnings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, for a resumed run."""
        self._first_entropy, self._first_step = state["first_entropy"], state["first_step"]
        self._said, self._in_a_row, self._warnings = dict(state["said"]), dict(state["in_a_row"]), state["warnings"]

    def _first(self, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        action, config = self.config.first_step, self.config
        if not self._first_step or action == "off":
            return
        kl = metrics.get(FIRST_KL)
        if self.old_is_trainers and kl is not None and not abs(kl) <= config.on_policy_kl:
            yield Finding(
                "first_step",
                f"before its first update the policy is {kl:.3g} nats from its own old log-probs, where 0 is right "
                f"(trainer.gates.on_policy_kl={config.on_policy_kl}): the update does not compute what the log-prob "
                "pass did. Look for dropout, another dtype or temperature, or attention that depends on packing",
                action == "stop",
            )
        difference = metrics.get(DIFFERENCE)
        if difference is not None and not difference <= config.log_prob_diff_mean:
            yield Finding(
                "first_step",
                f"the rollout's log-probs differ from the trainer's by {difference:.3g} nats a token on the first step "
                f"(limit {config.log_prob_diff_mean}): the rollout does not run the trainer's weights, or another "
                "dtype (8 bits on one side only?), chat template or sampling temperature. Run `meshrl verify`, and fix "
                "this before training",
                action == "stop",
            )

    def _every(self, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        config = self.config
        difference = metrics.get(DIFFERENCE, 0.0)
        watched = config.log_prob_diff != "off" and not self._first_step
        if watched and not difference <= config.log_prob_diff_mean:
            yield Finding(
                "log_prob_diff",
                f"the rollout's log-probs are {difference:.3g} nats a token off the trainer's "
                f"(trainer.gates.log_prob_diff_mean={config.log_prob_diff_mean}): samples are from another policy "
                "than the one that learns, which ends in collapse. Use algorithm.rollout_correction.rollout_is, a "
                "finer rollout.dtype, products in 8 bits on both sides (rollout.quantization and the actor's "
                "mixed_precision.product_dtype) or on none, or find out when it began to grow",
                config.log_prob_diff == "stop",
            )
        yield from self._entropy(metrics.get(ENTROPY))
        yield from self._rewards(metrics)

    def _entropy(self, entropy: float | None) -> Iterator[Finding]:
        config = self.config
        if entropy is None or config.entropy_collapse == "off":
            return
        if self._first_entropy is None:
            self._first_entropy = entropy
        if self._lasts("entropy_collapse", not entropy >= config.entropy_share * self._first_entropy):
            yield Finding(
                "entropy_collapse",
                f"the policy's entropy is {entropy:.3g}, down from {self._first_entropy:.3g}: it answers nearly the "
                "same whatever is drawn, so there is little left to learn from. If accuracy is not where you want it, "
                "raise clip_ratio_high, add an entropy_coeff or a KL, lower the learning rate, or go back to an "
                "earlier model",
                config.entropy_collapse == "stop",
            )

    def _rewards(self, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        config = self.config
        if config.equal_rewards == "off":
            return
        same = metrics.get("critic/score/max", 1.0) == metrics.get("critic/score/min", 0.0)
        # Equal scores are not enough: a critic, or the KL in the reward, may still give advantages.
        if self._lasts("equal_rewards", metrics.get(WITHOUT_SIGNAL) == 1.0):
            what = (
                f"every sample has the reward {metrics['critic/score/mean']:.3g}"
                if same
                else "no group's rewards differ"
            )
            if failed := int(metrics.get("reward/errors", 0)):
                what += f" ({count(failed, 'call')} of the reward function failed in the last step, see reward/errors)"
            yield Finding(
                "equal_rewards",
                f"{what} for {count(config.patience, 'step')}: advantages are 0 and nothing is learned. Is the reward "
                "function right (look at the samples)? Are prompts far too easy or hard? Then change them, raise "
                "rollout.n, or set algorithm.filter_groups.enable=true",
                config.equal_rewards == "stop",
            )

    def _limits(self, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        for name, entry in self.config.limits.items():
            fields = entry if isinstance(entry, dict) else {"max": entry}
            if name not in metrics:
                continue
            value, low, high = float(metrics[name]), fields.get("min"), fields.get("max")
            inside = (low is None or value >= low) and (high is None or value <= high)
            if not inside or math.isnan(value):
                bounds = f"{'' if low is None else low} to {'' if high is None else high}".strip()
                message = f"{name} is {value:.4g}, outside {bounds} (trainer.gates.limits)"
                yield Finding("limits", message, fields.get("then") == "stop")

    def _blind_limits(self, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        """Report limits of metrics that do not exist, once, after the policy's first update.

        Such a limit could never be exceeded.
        """
        if self._knows_metrics or LEARNING_RATE not in metrics:
            return
        self._knows_metrics = True
        # Only some steps have validation metrics.
        missing = [name for name in self.config.limits if name not in metrics and not name.startswith("val")]
        for name in missing:
            near, entry = nearest(name, metrics), self.config.limits[name]
            stops = isinstance(entry, dict) and entry.get("then") == "stop"
            message = f"trainer.gates.limits.{name}: this step has no such metric" + (f", but {near}" if near else "")
            message += "; limits see what a step measures, not its times"
            if stops:
                message += ". One that is to stop the run has to see: correct its name, or set then: warn"
            yield Finding("limits", message, stops)

    def _lasts(self, gate: str, is_off: bool) -> bool:
        """Return whether a condition has been wrong for `patience` steps in a row."""
        self._in_a_row[gate] = self._in_a_row.get(gate, 0) + 1 if is_off else 0
        return self._in_a_row[gate] >= self.config.patience

    def _note(self, finding: Finding, step: int) -> None:
        """Count a finding and report it, unless the same gate reported lately."""
        self._warnings += 1
        last = self._said.get(finding.gate)
        if last is not None and step - last < self.config.repeat_every and not finding.stops:
            return
        self._said[finding.gate] = step
        text = f"step {step}: {finding.message}"
        logger.warning("%s: %s", finding.gate, text)
        if self._say is not None:
            self._say(f"warning ({finding.gate}): {text}")

    def _stop(self, finding: Finding, step: int, metrics: Mapping[str, Any]) -> GateError:
        place = self._dump(finding, step, metrics)
        return GateError(
            f"step {step}: {finding.message}. Stopped by trainer.gates ({finding.gate}); the batch is in {place}"
        )

    def _dump(self, finding: Finding, step: int, metrics: Mapping[str, Any]) -> Path:
        folder = self.folder / "dumps" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._batch is not None:
            self._batch.save_to_disk(folder / "batch.dataproto")
        numbers = {name: float(value) for name, value in metrics.items()}
        said = {"step": step, "gate": finding.gate, "message": finding.message, "metrics": numbers}
        write_json(folder / "finding.json", said)
        return folder


def non_finite(batch: DataProto) -> dict[str, tuple[int, int]]:
    """Return the number of NaN or inf values of each tensor that has any, and the first sample with one."""
    mask = batch.batch["response_mask"].bool()
    found = {}
    for name in (*EVERYWHERE, *UNDER_MASK):
        if name not in batch.batch.keys():
            continue
        values: Tensor = batch.batch[name]
        bad = ~torch.isfinite(values) if name in EVERYWHERE else ~torch.isfinite(values) & mask
        if bool(bad.any()):
            found[name] = int(bad.sum()), int(bad.any(1).nonzero()[0])
    return found


# Optimizer steps whose gradient is NaN or infinite: workers skip them, and they are counted, dumped and limited here.

# The trained models by the prefix of their metrics, with their names in messages.
TRAINED = {"actor": "the actor", "critic": "the critic", "train": "the model"}
SKIPPED, TAKEN = "skipped_steps", "optimizer_steps"
DUMPS = 3


class NonFiniteError(FloatingPointError):
    """Too many optimizer steps with a non-finite gradient, in all or in a row."""


@dataclass(frozen=True)
class _WithBatch:
    """A trainer's state together with the batch whose gradient was not finite."""

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
    """The count of skipped optimizer steps over the whole run; the first few are dumped with weights and batch.

    The run ends after more than `limit` skipped optimizer steps. It also ends after `in_a_row` steps in a row in which
    all optimizer steps of a model were skipped, because further steps would repeat the same failure.
    """

    def __init__(self, limit: int | None, in_a_row: int | None, dumps: Checkpoints, say: Callable[[str], None]):
        self.limit, self.in_a_row, self.dumps, self.say = limit, in_a_row, dumps, say
        # Completes a pending checkpoint first: the same workers write dumps and checkpoints, one at a time.
        self.before_dump: Callable[[], None] = lambda: None
        self.count = 0
        self.rows: dict[str, int] = {}  # by model: the current number of steps in a row that changed nothing

    def check(self, trainer: Resumable, metrics: Mapping[str, Any], batch: DataProto | None) -> dict[str, float]:
        """Count the skipped optimizer steps in a step's metrics, and dump weights and batch of the first such steps."""
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
        """Raise a `NonFiniteError` after too many skipped optimizer steps, or too many steps in a row."""
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
        """Return the counts of skipped optimizer steps for a checkpoint."""
        return {"nonfinite_steps": self.count, "skipped_in_a_row": dict(self.rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts; checkpoints of earlier versions do not have the steps in a row."""
        self.count, self.rows = state["nonfinite_steps"], dict(state.get("skipped_in_a_row", {}))
