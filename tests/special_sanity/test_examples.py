"""The examples: those that fit on a CPU take a step, launch scripts do what they say; test_docs.py does the rest."""

import json
import os
import signal
import stat
import string
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from meshrl.agents.calculator_task import make_calculator_model
from meshrl.config import ensure_runnable, load_config
from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.launch import train

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())
SCRIPTS = sorted(EXAMPLES.glob("cluster/*.s*"))
TINY = [
    "data.train_batch_size=2",
    "data.max_response_length=8",
    "data.val_files=[]",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.save_final_model=false",
    "trainer.device=cpu",
    "trainer.logger=[file]",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "plain", string.printable, hidden_size=32, max_position_embeddings=1024)
    make_calculator_model(folder / "chat", hidden_size=32, max_position_embeddings=1024)
    return folder


def test_there_are_the_promised_examples():
    assert FOLDERS == ["cluster", "code", "images", "judge", "long_context", "lora", "math", "moe", "tools"]
    assert all((EXAMPLES / name / "README.md").exists() for name in FOLDERS)
    listed = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"| `{name}` |" in listed for name in FOLDERS)


@pytest.mark.parametrize("name", ["math", "code", "judge", "lora", "tools"])
def test_a_step_of_those_that_fit(name, models, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = [
        *TINY,
        f"actor_rollout_ref.model.path={models / ('chat' if name == 'tools' else 'plain')}",
        f"trainer.default_local_dir={tmp_path}",
        *([f"reward.judge.path={models / 'plain'}", "reward.judge.max_tokens=4"] if name == "judge" else []),
        *(["reward.kwargs.strict=false", "reward_manager.num_processes=1"] if name == "code" else []),
        *(["data.max_response_length=24"] if name == "tools" else []),
    ]
    loaded = load_config(EXAMPLES / name / "recipe.yaml", overrides)
    ensure_runnable(loaded.config)
    monkeypatch.setattr("meshrl.telemetry.report.write_curves", lambda *_: None)  # longer than the step
    run = train(loaded.config, console=Console(quiet=True))
    (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["step"] == 1
    assert metrics["training/nonfinite_metrics"] == 0
    assert metrics["actor/grad_norm"] >= 0


def test_made_up_problems_are_the_shipped_ones(tmp_path):
    import runpy

    prepare = runpy.run_path(str(EXAMPLES / "math" / "prepare.py"))
    shipped = [json.loads(line) for line in (EXAMPLES / "math" / "problems.jsonl").read_text().splitlines()]
    assert list(prepare["made_up"]()) == shipped
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "some steps\n#### 1,250"}))
    (row,) = prepare["from_gsm8k"](file)
    assert row["ground_truth"] == "1250"
    assert "How many?" in row["prompt"]


def test_the_tool_and_its_reward():
    import runpy

    tools = runpy.run_path(str(EXAMPLES / "tools" / "my_tools.py"))
    rows = [json.loads(line) for line in (EXAMPLES / "tools" / "questions.jsonl").read_text().splitlines()]
    year, month, day = rows[0]["prompt"][0]["content"].split(" was ")[1].split(".")[0].split("-")
    assert tools["weekday"].function(int(year), int(month), int(day)) == rows[0]["ground_truth"]
    score = tools["compute_score"]
    assert score("weekday", "it was a monday", "monday", {}) == {"score": 1.0, "acc": 1.0}
    assert score("weekday", "monday or tuesday", "monday", {}) == {"score": 0.0, "acc": 1.0}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


@pytest.fixture
def stubs(tmp_path):
    """Commands that write down how they were called; `meshrl train` waits for a signal, says so, and ends with 7."""
    bodies = {
        "ray": "",
        "python": "echo 2",
        "meshrl": '[ "$1" = doctor ] || { trap "echo saved >> $CALLS; exit 7" TERM; echo up >> $CALLS; '
        "for _ in $(seq 300); do sleep 0.1; done; }",
    }
    for name, body in bodies.items():
        file = tmp_path / name
        file.write_text(f'#!/usr/bin/env bash\necho {name} "$@" >> "$CALLS"\n{body}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "NNODES": "2"}


def test_the_head_trains_on_all_machines_and_passes_a_signal_on(stubs, tmp_path):
    calls = tmp_path / "calls"
    words = ["bash", EXAMPLES / "cluster" / "ray_head.sh", "recipe.yaml", "trainer.seed=2"]
    head = subprocess.Popen(words, env=stubs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while "up\n" not in (calls.read_text() if calls.exists() else ""):
            assert time.monotonic() < deadline
            assert head.poll() is None
            time.sleep(0.05)
        head.send_signal(signal.SIGTERM)
        assert head.wait(timeout=60) == 7
    finally:
        head.kill()
        head.wait(timeout=10)
    said = calls.read_text().splitlines()
    train_call = next(line for line in said if line.startswith("meshrl train"))
    assert train_call == (
        "meshrl train --supervise recipe.yaml trainer.seed=2 trainer.backend=ray ray_init.address=auto "
        "trainer.nnodes=2 trainer.n_gpus_per_node=8"
    )
    assert said.index("meshrl doctor --address auto --ranks 1") < said.index(train_call) < said.index("saved")
    assert said[0].startswith("ray start --head")
    assert said[-1] == "ray stop --force"


def test_the_head_does_not_wait_for_ever(stubs):
    done = subprocess.run(
        ["bash", EXAMPLES / "cluster" / "ray_head.sh", "recipe.yaml"],
        env=stubs | {"NNODES": "3", "WAIT_SECONDS": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "fewer than 3 machines" in done.stderr
