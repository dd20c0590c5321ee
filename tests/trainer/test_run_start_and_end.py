"""How a run opens its folder, and how it ends with its report."""

import os
import time
from types import SimpleNamespace

import pytest

from meshrl.config.keys import ConfigError
from meshrl.config.trainer import RunConfig
from meshrl.telemetry.run_folder import RunFolder
from meshrl.trainer.checkpoints import Found
from meshrl.trainer.fault_tolerance import Restarts
from meshrl.trainer.launch import as_it_was, is_finished, open_run, report_run, saying_what_is_kept


def test_a_new_run_does_not_move_the_model_that_it_starts_from(tmp_path):
    trainer, model = RunConfig(default_local_dir=str(tmp_path)), tmp_path / "model"
    model.mkdir()
    with pytest.raises(ConfigError, match=rf"trainer.default_local_dir: .*{model}"):
        open_run(trainer, None, Restarts(tmp_path, 0, 0.0, time.time()), str(model))
    assert model.is_dir()
    assert open_run(trainer, None, Restarts(tmp_path, 0, 0.0, time.time()), "elsewhere").moved_to is not None
    assert not model.exists()


def test_the_model_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path):
    """A run that goes on from a checkpoint elsewhere and has no step left still writes its model."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    trainer = RunConfig(default_local_dir=str(tmp_path / "run"))
    found, screen = Found(tmp_path / "other" / "global_step_1", 1, {}), SimpleNamespace(message=lambda text: None)
    with open_run(trainer, found, Restarts(tmp_path / "run", 0, 0.0, time.time())) as run:
        assert not is_finished(found, 1, run, trainer, screen)
        assert (run.moved_to / "model").is_dir()


def test_a_start_that_fails_leaves_the_earlier_run_where_it_was(tmp_path):
    said, restarts = [], Restarts(tmp_path, 0, 0.0, time.time())

    def start(fail, **kept):
        with (
            open_run(RunConfig(default_local_dir=str(tmp_path)), None, restarts) as run,
            as_it_was(run, restarts, said.append),
        ):
            run.start_log()
            run.write_config({"seed": 2}, {"seed": "default"})
            run.tensorboard.mkdir()
            for name, text in kept.items():
                (tmp_path / name.replace("_", ".")).write_text(text)
            raise fail

    earlier = {"config.yaml": "seed: 1\n", "metrics.jsonl": "{}\n", "log.txt": "all is well\n"}
    for name, text in earlier.items():
        (tmp_path / name).write_text(text)
    os.utime(tmp_path / "config.yaml", times=(1.0, 1.0))
    (tmp_path / "checkpoints" / "global_step_3").mkdir(parents=True)
    for fail in (RuntimeError("no memory"), KeyboardInterrupt()):
        with pytest.raises(type(fail)):
            start(fail)
        assert {name: (tmp_path / name).read_text() for name in earlier} == earlier
        there = {path.name for path in tmp_path.iterdir()} - {".lock"}
        assert there == {*earlier, "checkpoints", "log-failed-start.txt"}
        assert (tmp_path / "checkpoints" / "global_step_3").is_dir()
        assert not restarts.opened  # another attempt moves them aside again, and takes nothing of theirs for its own
    assert (
        said == [f"the earlier run's files are back in {tmp_path}; the log of this start is log-failed-start.txt"] * 2
    )
    with pytest.raises(RuntimeError):
        start(RuntimeError("later"), metrics_jsonl="{}\n")  # it has taken a step: its files stay
    assert (tmp_path / "previous-1" / "checkpoints").is_dir()
    assert restarts.opened
    assert len(said) == 2


def test_the_model_of_an_earlier_end_is_written_again(tmp_path):
    """The run was extended, and lost between its last checkpoint and its model."""
    trainer, screen = RunConfig(default_local_dir=str(tmp_path)), SimpleNamespace(message=lambda text: None)
    found = Found(tmp_path / "checkpoints" / "global_step_2", 2, {})
    found.path.mkdir(parents=True)
    (found.path / "trainer.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "report.html").write_text("")
    with RunFolder(tmp_path, resume=True) as run:
        assert is_finished(found, 2, run, trainer, screen)
        os.utime(tmp_path / "model", times=(1.0, 1.0))
        assert not is_finished(found, 2, run, trainer, screen)


def test_a_report_that_cannot_be_drawn_is_a_warning(tmp_path, monkeypatch):
    def broken(path):
        raise ValueError("math domain error")

    said = []
    monkeypatch.setattr("meshrl.trainer.launch.write_report", broken)
    with RunFolder(tmp_path) as run:
        run.start_log()
        report_run(run, SimpleNamespace(message=said.append))
    assert "could not be drawn: ValueError: math domain error" in said[0]
    assert "Traceback" in run.log.read_text()


def test_an_interruption_says_from_where_the_run_goes_on(tmp_path):
    trainer = RunConfig(default_local_dir=str(tmp_path))

    def interrupted():
        with saying_what_is_kept(trainer):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"no checkpoint was kept \(trainer.save_freq\); .* SIGTERM saves"):
        interrupted()
    for step, is_whole in ((5, True), (10, True), (15, False)):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        folder.mkdir(parents=True)
        if is_whole:
            (folder / "manifest.json").touch()
    with pytest.raises(KeyboardInterrupt, match="the same command goes on from global_step_10; "):
        interrupted()
