"""Metric loggers: one small interface, with implementations for the console, files and tracking services.

Tracking:  sends the metrics of every step to all configured loggers
*Tracker:  metrics.jsonl, TensorBoard, Weights & Biases, MLflow, trackio, SwanLab
"""

import difflib
import importlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Protocol

from meshrl.telemetry.console import StepConsole
from meshrl.telemetry.run_folder import RunFolder, flatten_config

logger = logging.getLogger(__name__)

NON_FINITE = "training/nonfinite_metrics"
FAILURES = "training/tracker_failures"


class Tracker(Protocol):
    """An interface that receives the metrics of a run step by step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step under their names."""

    def finish(self) -> None:
        """End the recording; `log` is not called afterwards."""


class FileTracker:
    """A tracker that appends to metrics.jsonl in the run folder."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.append_metrics(metrics, step)

    def finish(self) -> None:
        """Do nothing, because every line is flushed when it is written."""


class TensorboardTracker:
    """A tracker that writes TensorBoard event files into `tensorboard/` of the run folder."""

    def __init__(self, run: RunFolder) -> None:
        _package("tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard")
        purge = None if run.last_step is None else run.last_step + 1
        self._writer = writer.SummaryWriter(log_dir=str(run.tensorboard), purge_step=purge)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandbTracker:
    """A tracker for Weights & Biases, with its files in the run folder.

    WANDB_MODE=offline keeps the run on this machine. A resumed run continues the same W&B run. If a step is logged
    again after a resume, W&B keeps the earlier values.
    """

    def __init__(self, run: RunFolder, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        wandb = _package("wandb")
        known = os.environ.get("WANDB_RUN_ID") or run.read_tracker_ids().get("wandb")
        self._run = wandb.init(
            project=project,
            name=experiment,
            config=dict(config),
            dir=str(run.path),
            id=known,
            resume="allow",
            allow_val_change=True,  # a resumed run may have another number of steps
        )
        run.keep_tracker_id("wandb", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A tracker for MLflow at MLFLOW_TRACKING_URI, or else in `mlflow.db` of the run folder.

    A resumed run continues its own MLflow run.
    """

    def __init__(self, run: RunFolder, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        mlflow = _package("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{run.path / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(project)
        # Without a user-provided server, MLflow would put artifacts into the current working directory.
        place = None if uri else (run.path / "mlflow_artifacts").as_uri()
        experiment_id = found.experiment_id if found else self._client.create_experiment(project, place)
        begun = self._begun(run, experiment_id) or self._client.create_run(experiment_id, run_name=experiment)
        self._run_id = begun.info.run_id
        run.keep_tracker_id("mlflow", self._run_id)
        params = [self._entities.Param(_mlflow_name(k)[:250], str(v)[:500]) for k, v in flatten_config(config)]
        params = [param for param in params if param.key not in begun.data.params]  # MLflow params are immutable
        for start in range(0, len(params), 100):
            self._client.log_batch(self._run_id, params=params[start : start + 100])

    def _begun(self, run: RunFolder, experiment_id: str) -> Any:
        """Reopen the MLflow run of this run folder; return None if the server or experiment does not have it."""
        known = run.read_tracker_ids().get("mlflow")
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            found = self._client.get_run(known) if known else None
        except exceptions.MlflowException:
            return None
        if found is None or found.info.experiment_id != experiment_id or found.info.lifecycle_stage != "active":
            return None
        self._client.update_run(known, status="RUNNING")
        return found

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        rows = [self._entities.Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(rows), 1000):
            self._client.log_batch(self._run_id, metrics=rows[start : start + 1000])

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioTracker:
    """A tracker for trackio's local database, which `trackio show` opens."""

    def __init__(self, run: RunFolder, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        self._trackio = _package("trackio")
        self._run = self._trackio.init(project=project, name=experiment, config=dict(config), embed=False)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._trackio.finish()


class SwanlabTracker:
    """A tracker for SwanLab, with its files in the run folder.

    SWANLAB_MODE=offline keeps the run on this machine. Online, a resumed run continues the same SwanLab run.
    """

    def __init__(self, run: RunFolder, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        swanlab = _package("swanlab")
        known = os.environ.get("SWANLAB_RUN_ID") or run.read_tracker_ids().get("swanlab")
        same = {"id": known, "resume": "allow"} if known else {}
        self._run = swanlab.init(
            project=project, name=experiment, config=dict(config), log_dir=str(run.path / "swanlog"), **same
        )
        if self._run.mode == "online":  # in other modes no run can be resumed
            run.keep_tracker_id("swanlab", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


_SERVICES: dict[str, Callable[[RunFolder, str, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": lambda run, project, experiment, config: TensorboardTracker(run),
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
}
LOGGERS = ("console", "file", *_SERVICES)


class Tracking:
    """A fan-out of metrics to the named loggers.

    metrics.jsonl is always written, because the report is made from it. If a service fails during the run, the failure
    is logged and counted (`training/tracker_failures`), and the run goes on.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        run: RunFolder,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        *,
        console: StepConsole | None = None,
    ) -> None:
        names = list(dict.fromkeys([loggers] if isinstance(loggers, str) else loggers))
        _check_names(names)
        for name in names:
            if name in _SERVICES:
                _package(name)
        # Metrics of the whole run, such as the number of dropped prompts; logged with every step.
        self.constants: dict[str, float] = {}
        self._own: list[Tracker] = [FileTracker(run)]
        if "console" in names:
            self._own.append(console or StepConsole(None))
        self._services: dict[str, Tracker] = {}
        self._step: int | None = None
        self._non_finite = 0
        self._failures = 0
        try:
            for name in names:
                if name in _SERVICES:
                    self._services[name] = _SERVICES[name](run, project_name, experiment_name, config)
        except BaseException:
            self.finish()
            raise

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send one step's metrics to all loggers, together with the number of values that are NaN or infinite."""
        values = {name: _as_float(name, value) for name, value in (self.constants | dict(metrics)).items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            logger.warning("step %d: not a finite number: %s", step, ", ".join(bad))
        # Metrics of one step may come in several calls. The count covers the whole step so far, because services keep
        # the last value.
        self._non_finite = len(bad) + (self._non_finite if step == self._step else 0)
        self._step = step
        values[NON_FINITE] = float(self._non_finite)
        if self._failures:
            values[FAILURES] = float(self._failures)
            self._failures = 0
        for tracker in self._own:
            tracker.log(values, step)
        for name, tracker in self._services.items():
            try:
                tracker.log(values, step)
            except Exception:
                self._failures += 1
                logger.warning("logger %s failed at step %d, the run goes on", name, step, exc_info=True)

    def finish(self) -> None:
        """Finish all loggers; a failing service does not keep the other services from finishing."""
        for tracker in self._own:
            tracker.finish()
        for name, tracker in self._services.items():
            try:
                tracker.finish()
            except Exception:
                logger.warning("logger %s failed at its end", name, exc_info=True)
        self._own, self._services = [], {}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in LOGGERS:
            near = difflib.get_close_matches(name, LOGGERS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"trainer.logger: there is no {name!r}{hint}; choose from {', '.join(LOGGERS)}")


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"trainer.logger names {name!r}, but its package does not import ({error}): "
            f"pip install {name}, or take {name!r} out of trainer.logger"
        ) from error


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name!r} must be a number, got {type(value).__name__}: {value!r:.80}") from None


def _mlflow_name(name: str) -> str:
    """Convert a metric name for MLflow, which allows no `@`: val-core/x/acc/mean@4 becomes val-core/x/acc/mean_at_4."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
