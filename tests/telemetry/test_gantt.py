"""The picture of a step, and the command that draws it."""

import itertools

import pytest

from meshrl.cli import main
from meshrl.telemetry.time_ledger import Span
from meshrl.telemetry.timeline import TimelineFile, draw_step, read_timeline

CONTROLLER, FIRST, SECOND = ("controller", 0), ("actor_rollout_ref", 0), ("actor_rollout_ref", 1)


@pytest.fixture
def run(tmp_path):
    """A run of two steps with a pipeline of two ranks."""
    file = TimelineFile(tmp_path / "timeline.json.gz")
    for step in (1, 2):
        accounts = {
            CONTROLLER: [(step, step + 0.7, "wait_actor_rollout_ref"), (step + 0.7, step + 1.0, "reward")],
            FIRST: [(step, step + 0.6, "update_forward"), (step + 0.6, step + 1.0, "wait_reward")],
            SECOND: [(step, step + 0.1, "wait_peers"), (step + 0.1, step + 1.0, "strange work")],
        }
        spans = {
            FIRST: [Span("pipeline chunk 0", "forward 0", step, step + 0.2), Span("calls", "f", step, step + 0.6)],
            SECOND: [Span("calls", "begin", step, step + 0.6), Span("calls", "begin", step + 0.1, step + 0.9)],
        }
        file.write(step, step, step + 1.0, accounts, spans, {SECOND: 2e-5})
    file.close()
    return tmp_path


def test_events_of_all_processes_with_their_names(run):
    events = read_timeline(run / "timeline.json.gz")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "controller", 1: "actor_rollout_ref rank 0", 2: "actor_rollout_ref rank 1"}
    assert len([e for e in events if e["name"] == "process_labels"]) == 1
    begun = [e for e in events if e["name"] == "begin" and e["args"]["step"] == 2]
    assert len({e["tid"] for e in begun}) == 2  # calls beside each other have lanes of their own
    assert [round(e["dur"]) for e in begun] == [600_000, 800_000]
    forwards = [e for e in events if e["name"] == "update_forward"]
    assert [round(b["ts"] - a["ts"]) for a, b in itertools.pairwise(forwards)] == [1_000_000]


@pytest.mark.parametrize("name", ["step.png", "step.svg"])
def test_a_step_is_drawn(run, name):
    path = draw_step(run, 1, run / name)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in head
    if name.endswith("svg"):
        # Letters are drawn as paths, named in comments.
        for label in ("controller", "actor_rollout_ref rank 1", "strange work", "update_forward", "wait_peers"):
            assert f"<!-- {label} -->" in path.read_text()


def test_the_command(run, tmp_path, capsys):
    assert main(["timeline", str(run)]) == 0
    assert (run / "timeline-step-2.png").exists()
    assert "timeline-step-2.png" in capsys.readouterr().out
    assert main(["timeline", str(run), "--step", "7"]) == 1
    assert "has no step 7: it has 1, 2" in capsys.readouterr().err
    assert main(["timeline", str(run), "--out", str(run / "x.pdf")]) == 1
    assert ".png or .svg" in capsys.readouterr().err
    (tmp_path / "x.json.gz").write_text("plain text")
    assert main(["timeline", str(tmp_path / "x.json.gz")]) == 1
    assert "x.json.gz is no timeline: Not a gzipped file" in capsys.readouterr().err
    assert main(["timeline", str(run / "nowhere")]) == 1
    assert "trainer.timeline=true" in capsys.readouterr().err
