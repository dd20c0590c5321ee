"""A run of two processes: its time adds up, what is slow has its name, and timeline and profile are there."""

import gzip
import json
from pathlib import Path

import pytest
from slow_reward import SECONDS
from test_algorithms_by_hand import TWO_MICRO_BATCHES
from test_layouts import UNEVEN

from meshrl.telemetry.timeline import draw_step

WORK = {"generate", "prefill", "ref", "log_prob", "update_forward", "update_backward", "update_optimizer", "sync"}


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledger")
    return task.train(
        folder / "run",
        *UNEVEN,
        *TWO_MICRO_BATCHES,
        "trainer.n_gpus_per_node=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.rollout_correction.bypass_mode=false",
        "reward.name=null",
        f"custom_reward_function.path={Path(__file__).parent / 'slow_reward.py'}",
        "reward_manager.name=batch",
        "trainer.timeline=true",
        "trainer.timeline_steps=[2,3]",
        "trainer.peak_tflops=1",
        "global_profiler.tool=torch",
        "global_profiler.steps=[3]",
        "global_profiler.ranks=[1]",
        f"global_profiler.save_path={folder / 'profile'}",
    )


def shares(row, who):
    prefix = f"ledger_s/{who}/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def test_every_step_adds_up_to_its_wall_clock(run):
    assert len(run.metrics) == 3
    for row in run.metrics:
        for who in ("controller", "actor_rollout_ref"):
            assert sum(shares(row, who).values()) == pytest.approx(row["timing_s/step"], rel=0.01)
            assert row[f"ledger/{who}/booked"] == pytest.approx(1, abs=0.01)
        assert shares(row, "actor_rollout_ref").keys() >= WORK


def test_phases_of_the_controller_and_books_of_the_workers_tell_one_story(run):
    for row in run.metrics:
        booked = shares(row, "actor_rollout_ref")
        # A mean over ranks cannot be longer than the phase that waits for the slowest.
        for phase, names in {"gen": ("generate", "prefill"), "ref": ("ref",), "sync": ("sync",)}.items():
            assert 0 < sum(booked[name] for name in names) <= row[f"timing_s/{phase}"] * 1.02 + 0.005
        update = sum(value for name, value in booked.items() if name.startswith("update_"))
        assert 0 < update <= row["timing_s/update_actor"] * 1.02 + 0.005


def test_a_slow_reward_shows_where_it_is_and_who_waits_for_it(run):
    for row in run.metrics:
        assert row["ledger_s/controller/reward"] >= SECONDS
        assert row["ledger_s/actor_rollout_ref/wait_reward"] >= 0.9 * SECONDS
        assert row["ledger_s/controller/wait_actor_rollout_ref"] <= row["timing_s/step"] - SECONDS


def test_operations_and_memory_of_each_phase(run):
    for row in run.metrics:
        for phase in ("gen", "old_log_prob", "ref", "update_actor"):
            assert row[f"mfu/{phase}"] == pytest.approx(row[f"perf/tflops/{phase}"])
            assert row[f"mfu/{phase}"] > 0
        assert any(name.startswith("memory/gen/") for name in row) == any("max_rss_gib" in name for name in row)


def test_the_timeline_is_whole_json_with_all_processes(run):
    with gzip.open(run.path / "timeline.json.gz", "rt") as file:
        events = [event for event in json.load(file) if event]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"controller", "actor_rollout_ref rank 0", "actor_rollout_ref rank 1"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in boxes} == {2, 3}
    calls = {(event["pid"], event["name"]) for event in boxes if event["cat"] == "calls"}
    assert {(pid, name) for pid in (1, 2) for name in ("generate_sequences", "update_actor")} <= calls
    assert draw_step(run.path, 2).exists()


def test_the_chosen_rank_and_step_have_a_profile(run):
    (path,) = (run.path.parent / "profile").iterdir()
    assert path.name == "step_3_actor_rollout_ref_rank_1.trace.json.gz"
    with gzip.open(path, "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any("aten::mm" in name or "aten::addmm" in name or "aten::linear" in name for name in names)
