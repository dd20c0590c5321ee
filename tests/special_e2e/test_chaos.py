"""A supervised run under a seeded killer ends as the unkilled run does. `benchmarks/chaos.py` is the long version."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from meshrl.config.load import load_config
from meshrl.trainer.launch import train

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
STEPS = 8


@pytest.fixture(scope="module")
def chaos():
    spec = importlib.util.spec_from_file_location("chaos", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["chaos"]


def test_four_kills(chaos, tmp_path):
    """`chaos` itself compares weights, metrics and samples with those of the unkilled run, and looks who is left."""
    began = time.monotonic()
    chaos.prepare(tmp_path)
    words = chaos.command(tmp_path, tmp_path / "whole", "local", STEPS, 1)
    recipe, *overrides = words[words.index("--supervise") + 1 :]
    train(load_config(recipe, overrides).config, console=Console(quiet=True))  # here, where all is imported
    unkilled = chaos.Outcome(0, time.monotonic() - began)
    outcomes = chaos.chaos(tmp_path, kills=4, seed=2, steps=STEPS, per_run=4, unkilled=unkilled)
    assert sum(len(outcome.kills) for outcome in outcomes) == 4
    assert all(outcome.code == 0 for outcome in outcomes)
    assert len({aim for outcome in outcomes for aim in outcome.kills}) == 4  # each pair of who and phase once
    text = chaos.table(outcomes, "local")
    assert "equal to the unkilled run's | all" in text
    assert text.splitlines()[-1].endswith("| 4 |")


def test_its_comparison_can_fail(chaos, tmp_path):
    """Of the runs of the test above one with other samples, or a step twice, would be told apart."""
    import torch
    from safetensors.torch import save_file

    for name, steps in (("whole", (1, 2)), ("same", (1, 2)), ("twice", (1, 2, 2)), ("other", (1, 2))):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "samples").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model" / "model.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
        for step in (1, 2):
            (tmp_path / name / "samples" / f"{step}.jsonl").write_text("other" if (name, step) == ("other", 2) else "a")
    problems = [len(chaos.differences(tmp_path / name, tmp_path / "whole", 2)) for name in ("same", "twice", "other")]
    assert problems == [0, 1, 1]
