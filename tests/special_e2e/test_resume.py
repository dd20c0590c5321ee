"""A run that is stopped and gone on with equals one that was never stopped."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from test_layouts import UNEVEN, compare

from meshrl.config.load import load_config
from meshrl.config.sft import SFTConfig
from meshrl.trainer.checkpoint import CheckpointError, problems_of
from meshrl.trainer.run import sft, train

# Five batches of 12 make an epoch; validation at every second step; a learning rate that changes; dropout-free.
RUN = (
    *UNEVEN,
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "trainer.total_training_steps=7",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
)
# What a resumed run may have of its own: clocks, and what saving cost.
OWN = ("timing_s/", "perf/", "time", "checkpoint/")


class Stopped(Exception):
    """The end of the process, as far as the run is concerned."""


@pytest.fixture
def data(task, tmp_path):
    """62 prompts: five batches of 12 an epoch, two are left over."""
    file = tmp_path / "few.jsonl"
    lines = Path(task.files["prompts"]).read_text().splitlines() if task.files["prompts"].endswith("jsonl") else None
    if lines is None:
        import pyarrow.parquet as pq

        lines = [json.dumps(row) for row in pq.read_table(task.files["prompts"]).slice(0, 62).to_pylist()]
    file.write_text("\n".join(lines[:62]) + "\n")
    return f"data.train_files=[{file}]"


def stop_after(monkeypatch, step):
    """Ends the run when the metrics of a step have been logged and its checkpoint is in place."""
    from meshrl.trainer.checkpoint import Checkpoints

    commit = Checkpoints.commit

    def commit_and_stop(self, wait=False):
        commit(self, wait)
        if (self.folder / f"global_step_{step}").exists():
            raise Stopped

    monkeypatch.setattr(Checkpoints, "commit", commit_and_stop)


def stopped_and_gone_on(task, monkeypatch, folder, step, *options, then=()):
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(Stopped):
            task.train(folder, *options)
    return task.train(folder, *options, *then)


def equal(left, right, tolerance=0.0):
    """Metrics without clocks, and weights; to the bit unless a tolerance is given."""
    keep = lambda run: [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in run.metrics]  # noqa: E731
    if tolerance:
        compare(left, right, tolerance)
        return
    assert keep(left) == keep(right)
    assert all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)


@pytest.fixture
def whole(task, data, tmp_path):
    return task.train(tmp_path / "whole", *RUN, data)


@pytest.mark.parametrize("step", [2, 5], ids=["mid-epoch", "epoch's border"])
def test_one_process_goes_on_to_the_bit(task, data, whole, monkeypatch, tmp_path, step):
    gone_on = stopped_and_gone_on(task, monkeypatch, tmp_path / "run", step, *RUN, data)
    equal(whole, gone_on)
    assert not list((tmp_path / "run").glob("previous-*"))
    assert [row["step"] for row in gone_on.metrics] == list(range(8))
    assert [row["training/epoch"] for row in gone_on.metrics[1:]] == [0, 0, 0, 0, 0, 1, 1]
