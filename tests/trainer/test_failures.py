"""Which failures are tried again, and how often."""

import json
import signal
import time
from types import SimpleNamespace

import pytest

from meshrl.config.keys import ConfigError
from meshrl.controller.calls import DeadlineError, GroupBrokenError, RayStartError, WorkerDied, WorkerError
from meshrl.environment import SUPERVISED_SINCE
from meshrl.rewards.results import RewardError
from meshrl.trainer.checkpoints import CheckpointError
from meshrl.trainer.fault_tolerance import Failure, Restarts, kind_of, surviving
from meshrl.trainer.health_checks import GateError, NonFiniteError
from meshrl.weights.transports import SyncError, SyncRefusedError


def died():
    return WorkerDied("gone", rank=1, role="actor", method="step", pid=3, exitcode=-signal.SIGKILL)


def worker_error(kind, text):
    return WorkerError(text, rank=0, role="actor", method="step", error_type=kind, traceback_text="")


def caused(error, cause):
    error.__cause__ = cause
    return error


late = DeadlineError("late", role="actor", method="step", answered=[], silent=[0], waited=1.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (died(), "infrastructure"),
        (late, "infrastructure"),
        (GroupBrokenError("broken"), "infrastructure"),
        (RayStartError("Ray could not be started"), "infrastructure"),
        (GroupBrokenError("rank 1 died: Received data size doesn't match expected size"), "user code"),
        (ConnectionResetError(), "infrastructure"),
        (SyncError("lost"), "infrastructure"),
        (worker_error("SyncError", "weight sync: rank 1 died"), "infrastructure"),
        (worker_error("RuntimeError", "[gloo/pair.cc] Connection closed by peer [127.0.0.1]"), "infrastructure"),
        (caused(CheckpointError("not written"), died()), "infrastructure"),
        (caused(CheckpointError("not written"), OSError(28, "No space left")), "data"),
        (CheckpointError("none is whole"), "data"),
        (FileNotFoundError("rows.parquet"), "data"),
        (NonFiniteError("too many"), "numeric"),
        (GateError("stopped"), "numeric"),
        (worker_error("FloatingPointError", "nan"), "numeric"),
        (SyncRefusedError("the ranks differ"), "user code"),
        (worker_error("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"), "user code"),
        (ValueError("Connection closed by peer"), "user code"),
        (ConfigError(["no"]), "user code"),
        # The service behind a reward function is the function's business.
        (caused(RewardError("failed"), ConnectionResetError()), "user code"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_kinds(error, kind):
    assert kind_of(error) == kind
    assert Failure(kind).may_be_tried_again == (kind == "infrastructure")


@pytest.mark.parametrize(("error", "attempts"), [(died(), 3), (ValueError("bug"), 1)])
def test_only_infrastructure_is_tried_again_and_within_the_budget(error, attempts, tmp_path):
    said, tried = [], []
    restarts = Restarts(tmp_path, 2, 0.0, say=said.append)

    def attempt():
        tried.append(1)
        raise error

    with pytest.raises(type(error)):
        surviving(attempt, restarts)
    assert len(tried) == attempts
    assert restarts.used == attempts - 1
    assert any("used up" in line for line in said) == (attempts == 3)


def test_waits_double_and_a_new_command_has_its_own_budget(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("meshrl.trainer.fault_tolerance.time.sleep", waits.append)
    restarts = Restarts(tmp_path, 12, 1.0, say=lambda text: None)
    while restarts.failed("gone", "infrastructure"):
        pass
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert restarts.resumed(3, kept_at=restarts.since) < 60
    assert restarts.metrics()["restarts/count"] == 12
    lost = restarts.metrics()["restarts/seconds_lost"]
    assert restarts.resumed(3, kept_at=restarts.since) + lost < time.time() - restarts.since + 0.01
    last = json.loads((tmp_path / "restarts.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("resumed", 3)
    assert Restarts(tmp_path, 12, 1.0).used == 0
    # A supervised run counts together with the command that supervises it.
    monkeypatch.setenv(SUPERVISED_SINCE, str(restarts.since))
    assert Restarts(tmp_path, 12, 1.0).used == 12


def test_what_a_restart_costs_is_counted_once(tmp_path, monkeypatch):
    """A rollout is replaced between a checkpoint and a death, and the start after it fails once: by hand."""
    clock = SimpleNamespace(time=lambda: now, sleep=lambda seconds: None)
    monkeypatch.setattr("meshrl.trainer.fault_tolerance.time", clock)
    told, now = [], 1000.0
    restarts = Restarts(tmp_path, 9, 0.0, since=1000.0, say=lambda text: None, tell=told.append)
    # The checkpoint is of 1010; a batch begun at 1020 is lost at 1023, and asked again at 1030.
    now = 1023.0
    restarts.failed("gone", "rollout")
    now = 1030.0
    assert restarts.resumed(4, kept_at=1020.0) == 10
    # A trainer dies at 1040 and again in the start at 1050; work goes on at 1065.
    now = 1040.0
    restarts.failed("gone", "infrastructure")
    now = 1050.0
    restarts.failed("gone", "infrastructure")
    now = 1065.0
    restarts.resumed(4, kept_at=1010.0)
    last = restarts.records()[-1]
    assert (last["thrown_away"], last["restart"]) == (20, 25)  # 1010 to 1020 and 1030 to 1040; 1040 to 1065
    assert told[-1] == {"restarts/count": 3, "restarts/seconds_lost": 55}
    # The next death: what was thrown away before 1065 is not lost again.
    now = 1075.0
    restarts.failed("gone", "infrastructure")
    now = 1080.0
    assert restarts.resumed(4, kept_at=1010.0) == 15
