import logging
import math
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
import torch

from meshrl.telemetry import trackers
from meshrl.telemetry.run_folder import RunFolder
from meshrl.telemetry.trackers import LOGGERS, Tracking

pytestmark = pytest.mark.slow  # not part of `make test-quick`

CONFIG = {"trainer": {"seed": 1, "logger": ["console"]}, "data": {"train_files": None}}
METRICS = {"critic/score/mean": 0.25, "val-core/a b/acc/mean@4": 0.5, "actor/grad_norm": math.nan}


class Recorder:
    """A service that remembers, and fails when told to."""

    def __init__(self, *_):
        self.calls = []
        self.finished = 0
        self.broken = False

    def log(self, metrics, step):
        if self.broken:
            raise ConnectionError("the service is away")
        self.calls.append((step, dict(metrics)))

    def finish(self):
        self.finished += 1
        if self.broken:
            raise ConnectionError("still away")


@pytest.fixture
def recorder(monkeypatch):
    service = Recorder()
    monkeypatch.setattr(trackers, "_package", lambda name: None)
    monkeypatch.setitem(trackers._SERVICES, "wandb", lambda *_: service)
    return service


def tracking(tmp_path, *loggers):
    return Tracking(list(loggers), RunFolder(tmp_path), "project", "experiment", CONFIG)


def test_metrics_reach_file_and_service_alike(tmp_path, recorder):
    with tracking(tmp_path, "file", "wandb", "wandb") as fan:
        fan.log({"a": torch.tensor(0.5), "b": np.float32(0.25), "c": True, "d": 3}, 4)
    expected = {"a": 0.5, "b": 0.25, "c": 1.0, "d": 3.0, "training/nonfinite_metrics": 0.0}
    assert recorder.calls == [(4, expected)]
    record = RunFolder(tmp_path, resume=True).read_metrics()[0]
    assert {name: record[name] for name in expected} == expected
    assert recorder.finished == 1


def test_non_finite_values_are_logged_and_counted_per_step(tmp_path, recorder, caplog):
    with tracking(tmp_path, "wandb") as fan, caplog.at_level(logging.WARNING):
        fan.log({"a": math.nan, "b": -math.inf, "c": 1.0}, 1)
        fan.log({"d": math.inf}, 1)
        fan.log({"a": 1.0}, 2)
    counts = [metrics["training/nonfinite_metrics"] for _, metrics in recorder.calls]
    assert counts == [2, 3, 0]
    assert math.isnan(recorder.calls[0][1]["a"])
    assert "step 1: not a finite number: a, b" in caplog.text


def test_a_failing_service_is_counted_and_the_others_go_on(tmp_path, recorder, caplog):
    with tracking(tmp_path, "wandb") as fan:
        fan.log({"a": 1.0}, 1)
        recorder.broken = True
        fan.log({"a": 2.0}, 2)
        fan.log({"a": 3.0}, 3)
    assert "the service is away" in caplog.text
    records = RunFolder(tmp_path, resume=True).read_metrics()
    assert [record["a"] for record in records] == [1, 2, 3]
    assert [record.get("training/tracker_failures") for record in records] == [None, None, 1]


def test_the_metrics_file_is_written_whatever_the_loggers(tmp_path):
    with tracking(tmp_path) as fan:
        fan.log({"a": 1.0}, 1)
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_metric_that_is_no_number_is_named(tmp_path):
    with tracking(tmp_path) as fan, pytest.raises(ValueError, match=r"actor/lr.*str"):
        fan.log({"actor/lr": "high"}, 1)


def test_an_unknown_logger_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        tracking(tmp_path, "console", "tensorbord")
    assert LOGGERS == ("console", "file", "tensorboard", "wandb", "mlflow", "trackio", "swanlab")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab"])
def test_a_missing_package_is_an_error_with_the_pip_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"pip install {name}"):
        tracking(tmp_path, "console", name)


def test_services_that_started_are_ended_when_a_later_one_cannot(tmp_path, recorder, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no server")

    monkeypatch.setitem(trackers._SERVICES, "mlflow", refuse)
    with pytest.raises(RuntimeError, match="no server"):
        tracking(tmp_path, "wandb", "mlflow")
    assert recorder.finished == 1


def test_tensorboard_events_hold_the_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking(tmp_path, "tensorboard") as fan:
        fan.log(METRICS, 1)
        fan.log({"critic/score/mean": 0.75}, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scores = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert scores == [(1, 0.25), (2, 0.75)]
    assert math.isnan(events.Scalars("actor/grad_norm")[0].value)


def test_mlflow_keeps_values_and_params_in_the_run_folder(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    for _ in range(2):
        with tracking(run, "mlflow") as fan:
            fan.log(METRICS, 1)
            fan.log({"critic/score/mean": 0.75}, 2)
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("project")
    first, second = client.search_runs([experiment.experiment_id])
    assert first.info.status == second.info.status == "FINISHED"
    assert first.info.run_name == "experiment"
    assert first.data.params == {"trainer.seed": "1", "trainer.logger": "['console']", "data.train_files": "None"}
    scores = client.get_metric_history(first.info.run_id, "critic/score/mean")
    assert sorted((metric.step, metric.value) for metric in scores) == [(1, 0.25), (2, 0.75)]
    assert client.get_metric_history(first.info.run_id, "val-core/a b/acc/mean_at_4")[0].value == 0.5
    assert math.isnan(client.get_metric_history(first.info.run_id, "actor/grad_norm")[0].value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "run"
    with Tracking(["mlflow"], RunFolder(run), "project", "experiment", CONFIG) as fan:
        fan.log({"critic/score/mean": 0.25}, 1)
    longer = {"trainer": {"seed": 2, "total_training_steps": 9}}
    with Tracking(["mlflow"], RunFolder(run, resume=True, last_step=1), "project", "experiment", longer) as fan:
        fan.log({"critic/score/mean": 0.75}, 2)
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (only,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    scores = client.get_metric_history(only.info.run_id, "critic/score/mean")
    assert sorted((metric.step, metric.value) for metric in scores) == [(1, 0.25), (2, 0.75)]
    assert (only.info.status, only.data.params["trainer.seed"]) == ("FINISHED", "1")
    assert only.data.params["trainer.total_training_steps"] == "9"


def test_mlflow_keeps_values_in_a_file_store(tmp_path, monkeypatch):
    import mlflow

    store = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse it unless asked
    with tracking(tmp_path / "run", "mlflow") as fan:
        fan.log({"critic/score/mean": 0.25}, 1)
        fan.log({"critic/score/mean": 0.75}, 2)
    client = mlflow.MlflowClient(store)
    (only,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    scores = client.get_metric_history(only.info.run_id, "critic/score/mean")
    assert sorted((metric.step, metric.value) for metric in scores) == [(1, 0.25), (2, 0.75)]
    assert not (tmp_path / "run" / "mlflow.db").exists()


def run_apart(tmp_path, name, environment, resume=False):
    """These two keep threads and settings per process, so each gets a process of its own."""
    script = (
        "import math, sys\n"
        "from meshrl.telemetry.run_folder import RunFolder\n"
        "from meshrl.telemetry.trackers import Tracking\n"
        f"run = RunFolder(sys.argv[1], resume={resume})\n"
        f"with Tracking([{name!r}], run, 'project', 'experiment', {CONFIG!r}) as fan:\n"
        "    fan.log({'critic/score/mean': 0.25, 'val-core/a/acc/mean@4': 0.5, 'actor/grad_norm': math.nan}, 1)\n"
        "    fan.log({'critic/score/mean': 0.75}, 2)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "run")]
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        command, env={**os.environ, **home, **environment}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def test_wandb_offline_keeps_the_run_in_the_run_folder(tmp_path):
    run_apart(tmp_path, "wandb", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = stored.read_bytes()
    for name in (b"critic/score/mean", b"val-core/a/acc/mean@4", b"experiment", b"project"):
        assert name in content
    assert b"never/logged" not in content


def test_a_resumed_run_goes_on_in_its_wandb_run_and_a_new_one_does_not(tmp_path):
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    ids = []
    for resume, environment in ((False, {}), (True, {}), (False, {}), (True, {"WANDB_RUN_ID": "mine"})):
        before = wandb_files(tmp_path)
        run_apart(tmp_path, "wandb", {**offline, **environment}, resume)
        (new,) = wandb_files(tmp_path) - before
        ids.append(RunFolder(tmp_path / "run", resume=True).read_tracker_ids()["wandb"])
        assert new.name == f"run-{ids[-1]}.wandb"
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] == "mine"


def wandb_files(tmp_path):
    return set((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_trackio_database_holds_the_values(tmp_path):
    run_apart(tmp_path, "trackio", {"TRACKIO_DIR": str(tmp_path / "trackio")})
    with sqlite3.connect(tmp_path / "trackio" / "project.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("experiment", 1), ("experiment", 2)]
    assert b'"critic/score/mean":0.25' in bytes(rows[0][2])
    assert b'"val-core/a/acc/mean@4":0.5' in bytes(rows[0][2])


def test_swanlab_offline_keeps_the_run_in_the_run_folder(tmp_path):
    pytest.importorskip("swanlab")
    for resume in (False, True):
        run_apart(tmp_path, "swanlab", {"SWANLAB_MODE": "offline"}, resume)
    first, second = (tmp_path / "run" / "swanlog").glob("run-*/*.swanlab")
    for stored in (first, second):
        content = stored.read_bytes()
        for name in (b"critic/score/mean", b"val-core/a/acc/mean@4", b"experiment", b"project"):
            assert name in content
        assert b"never/logged" not in content
