import json
import logging
import math
import subprocess
import sys

import numpy as np
import pytest
import yaml

from meshrl.telemetry.run_folder import RunFiles, RunFolder, check_unheld, flatten_config


def test_metrics_come_back_as_written_and_every_line_is_strict_json(tmp_path):
    run = RunFolder(tmp_path / "deep" / "run")
    run.append_metrics({"a/b": 0.1, "bad": math.nan, "big": math.inf, "small": -math.inf}, 1)
    run.append_metrics({"a/b": 1e-30}, 2)

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    for line in run.metrics.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second = RunFiles(run.path).read_metrics()
    assert (first["step"], first["a/b"], first["big"], first["small"]) == (1, 0.1, math.inf, -math.inf)
    assert math.isnan(first["bad"])
    assert second["a/b"] == 1e-30
    assert first["time"] <= second["time"]


def test_each_line_is_on_disk_when_the_call_returns(tmp_path):
    # The process dies without closing anything; its lines must be there.
    script = (
        "import os, sys; from meshrl.telemetry.run_folder import RunFolder\n"
        "run = RunFolder(sys.argv[1])\n"
        "for step in range(3): run.append_metrics({'x': step / 2}, step)\n"
        "os._exit(9)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == 9
    assert [record["x"] for record in RunFiles(tmp_path).read_metrics()] == [0, 0.5, 1]


def test_a_half_written_last_line_is_left_out_at_every_cut(tmp_path):
    run = RunFolder(tmp_path)
    run.append_metrics({"x": 1.5}, 1)
    whole = run.metrics.read_bytes()
    run.append_generations([{"prompt": "né", "response": "漢字", "score": 1}], 1)
    run.append_metrics({"x": 2.5}, 2)
    both = run.metrics.read_bytes()
    for cut in range(len(whole), len(both)):
        run.metrics.write_bytes(both[:cut])
        expected = [1.5, 2.5] if cut == len(both) - 1 else [1.5]
        assert [record["x"] for record in run.read_metrics()] == expected
    generations = run.generations.read_bytes()
    for cut in range(len(generations) - 1):
        run.generations.write_bytes(generations[:cut])
        assert run.read_generations() == []


def test_a_broken_line_in_the_middle_is_named(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.append_metrics({"x": 1.0}, 1)
    with open(run.metrics, "ab") as stream:
        stream.write(b'{"step": 2, "x"\n[1, 2]\n')
    run.append_metrics({"x": 3.0}, 3)
    with caplog.at_level(logging.WARNING):
        assert [record["x"] for record in run.read_metrics()] == [1.0, 3.0]
    assert "metrics.jsonl:2" in caplog.text
    assert "metrics.jsonl:3" in caplog.text


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe\x00", b"a: \x00"])
def test_a_config_that_cannot_be_read_is_named_and_left_out(tmp_path, caplog, content):
    run = RunFolder(tmp_path)
    run.config.write_bytes(content)
    run.config_sources.write_bytes(content)
    assert run.read_config() == run.read_config_sources() == {}
    assert f"{run.config} cannot be read" in caplog.text
    assert f"{run.config_sources} cannot be read" in caplog.text


def test_resume_continues_the_files_behind_a_half_written_line(tmp_path):
    run = RunFolder(tmp_path)
    run.append_metrics({"x": 1.0}, 1)
    with open(run.metrics, "ab") as stream:
        stream.write(b'{"step": 2, "x": 2.')
    again = RunFolder(tmp_path, resume=True)
    again.append_metrics({"x": 2.5}, 2)
    assert again.moved_to is None
    assert [record["x"] for record in again.read_metrics()] == [1.0, 2.5]


def test_a_second_run_moves_the_first_aside_and_loses_nothing(tmp_path):
    for number in range(3):
        run = RunFolder(tmp_path)
        run.write_config({"run": number}, {"run": "recipe"})
        run.append_metrics({"x": float(number)}, 1)
        run.append_generations([{"prompt": "p", "response": "r", "score": number}], 1)
        run.tensorboard.mkdir()
        (run.tensorboard / "events").write_text(str(number))
        (run.checkpoints / f"global_step_{number}").mkdir(parents=True)
        run.model.mkdir()
        (run.model / "model.safetensors").write_text(str(number))
        (run.dumps / f"step_{number}").mkdir(parents=True)
        (tmp_path / "stall-1.txt").write_text(str(number))
        run.report.write_text("report")
        assert (run.moved_to is None) == (number == 0)
    assert run.moved_to == tmp_path / "previous-2"
    for number, folder in ((0, tmp_path / "previous-1"), (1, tmp_path / "previous-2"), (2, tmp_path)):
        files = RunFiles(folder)
        assert files.read_config() == {"run": number}
        assert files.read_metrics()[0]["x"] == number
        assert files.read_generations()[0]["score"] == number
        assert (files.tensorboard / "events").read_text() == str(number)
        assert files.report.exists()
        assert [path.name for path in files.checkpoints.iterdir()] == [f"global_step_{number}"]
        assert (files.model / "model.safetensors").read_text() == str(number)
        assert [path.name for path in files.dumps.iterdir()] == [f"step_{number}"]
        assert (folder / "stall-1.txt").read_text() == str(number)
    assert not (tmp_path / "previous-3").exists()


def test_an_empty_or_foreign_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert RunFolder(tmp_path).moved_to is None
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "notes.txt")


def test_hostile_text_survives_the_round_trip(tmp_path):
    text = 'a"\\\n\r\x00\x1b[31m\u2028\u202e\ud800 漢 </script>'
    run = RunFolder(tmp_path)
    row = {"prompt": text, "response": text * 2, "score": np.float32(0.5), "ids": np.arange(3), "bad": math.nan}
    run.append_generations([row, {"prompt": "next"}], 7)
    first, second = run.read_generations()
    assert first["prompt"] == text
    assert first["response"] == text * 2
    assert (first["score"], first["ids"], first["step"], first["bad"]) == (0.5, [0, 1, 2], 7, "nan")
    assert second == {"step": 7, "prompt": "next"}


def test_the_config_is_plain_yaml_in_the_given_order(tmp_path):
    run = RunFolder(tmp_path)
    config = {"z": {"lr": 1e-6, "none": None, "on": True}, "a": ("x", 2), "path": tmp_path}
    run.write_config(config, {"z.lr": "command line"})
    loaded = yaml.safe_load(run.config.read_text())
    assert list(loaded) == ["z", "a", "path"]
    assert loaded == {"z": {"lr": 1e-6, "none": None, "on": True}, "a": ["x", 2], "path": str(tmp_path)}
    assert run.read_config_sources() == {"z.lr": "command line"}
    assert dict(flatten_config(config)) == {
        "z.lr": 1e-6,
        "z.none": None,
        "z.on": True,
        "a": ("x", 2),
        "path": tmp_path,
    }
    assert not list(tmp_path.glob("*.part"))


def test_the_log_file_gets_what_the_package_logs_until_close(tmp_path, monkeypatch):
    # What half a character does to the run's log is ours; what it does to the test runner's is not.
    monkeypatch.setattr(logging.getLogger("meshrl"), "propagate", False)
    with RunFolder(tmp_path) as run:
        run.start_log()
        logging.getLogger("meshrl.trainer").info("step %d done \ud800", 3)
        logging.getLogger("elsewhere").warning("not ours")
    logging.getLogger("meshrl.trainer").info("after the end")
    assert "INFO meshrl.trainer: step 3 done" in run.log.read_text()
    assert "not ours" not in run.log.read_text()
    assert "after the end" not in run.log.read_text()
    assert not logging.getLogger("meshrl").handlers


def test_reserved_names_are_refused_and_missing_files_read_as_empty(tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="step"):
        run.append_metrics({"step": 1.0}, 1)
    assert not run.metrics.exists()
    files = RunFiles(tmp_path / "nowhere")
    assert (files.read_metrics(), files.read_generations(), files.read_config()) == ([], [], {})
    assert not files.path.exists()


def test_a_run_that_goes_on_cuts_later_steps(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(5):
        run.append_metrics({"x": float(step)}, step)
        run.append_generations([{"prompt": "p", "response": "r", "score": step}], step)
    before = run.metrics.read_bytes().splitlines(keepends=True)
    with run.metrics.open("ab") as stream:
        stream.write(b'{"step": 5, "ti')  # killed while it wrote
    on = RunFolder(tmp_path, resume=True, last_step=2)
    assert on.metrics.read_bytes() == b"".join(before[:3])
    assert [row["score"] for row in on.read_generations()] == [0, 1, 2]
    on.append_metrics({"x": 9.0}, 3)
    assert [row["step"] for row in on.read_metrics()] == [0, 1, 2, 3]
    assert on.moved_to is None


WRITES = """
import sys
from meshrl.telemetry.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.append_metrics({"a": 1.0}, 1)
print(flush=True)
sys.stdin.read()
"""


def test_two_runs_do_not_share_a_folder(tmp_path):
    words = [sys.executable, "-c", WRITES, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        refused = rf"a run is writing into .* \(process {other.pid} on .*choose another folder"
        for tried in (lambda: RunFolder(tmp_path), lambda: RunFolder(tmp_path, resume=True)):
            with pytest.raises(ValueError, match=refused):
                tried()
        with pytest.raises(ValueError, match=refused):
            check_unheld(tmp_path)
        assert len(RunFiles(tmp_path).read_metrics()) == 1  # whoever only reads may
        other.kill()
    check_unheld(tmp_path)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.append_metrics({"a": 2.0}, 2)
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]


def test_a_checkpoint_that_was_being_written_is_not_kept_with_an_earlier_run(tmp_path):
    for name in ("global_step_2", ".global_step_4.partial", ".global_step_1.deleted"):
        (tmp_path / "checkpoints" / name / "actor").mkdir(parents=True)
    with RunFolder(tmp_path) as run:
        assert [path.name for path in (run.moved_to / "checkpoints").iterdir()] == ["global_step_2"]
