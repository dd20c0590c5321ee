"""Past steps taken again, the two halves of a run, gradients that are not finite, and an end on request."""

import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_algorithms_by_hand import TWO_MICRO_BATCHES
from test_layouts import UNEVEN, WITH_REFERENCE
from test_resume import assert_equal, without_own

from meshrl.cli import main
from meshrl.config import load_config
from meshrl.config.show import to_yaml
from meshrl.data.batch import DataProto
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.checkpoints import problems_of
from meshrl.trainer.health_checks import NonFiniteError
from meshrl.trainer.replay import explain_token, replay, replay_config, train_only
from meshrl.trainer.rl_trainer import PPOTrainer
from meshrl.trainer.run_state import Keeper, KeptBatches, RunStoppedError, batch_files, load_batch

RUN = (
    *UNEVEN,
    "actor_rollout_ref.rollout.max_num_seqs=48",  # a batch at once
    *TWO_MICRO_BATCHES,
    *WITH_REFERENCE,
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "trainer.total_training_steps=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "data.val_files=[]",
    "trainer.save_freq=2",
    "trainer.keep_batches_megabytes=50",
)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    # What a run keeps where, and what it would read of it, does not change its steps.
    kept = f"trainer.remote_dir={folder / 'mirror'}", "actor_rollout_ref.actor.checkpoint.load_contents=[model]"
    return task.train(folder / "run", *RUN, *kept)


@pytest.mark.parametrize("step", [1, 4], ids=["from the first weights", "over a step from a checkpoint"])
def test_a_past_step_to_the_bit(run, step):
    found = replay(run.path, step)
    assert found.differences == {}
    names = {"actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "critic/score/mean", "critic/advantages/max"}
    assert names <= found.numbers.keys()
    assert len(found.numbers) > 25


def test_rewards_that_say_more_than_a_number_are_replayed_too(task, tmp_path):
    own = ("reward.name=null", f"custom_reward_function.path={Path(__file__).parent / 'dict_reward.py'}")
    run = task.train(tmp_path / "run", *RUN, *own, "trainer.total_training_steps=1")
    found = replay(run.path, 1)
    assert found.differences == {}
    assert found.metrics["replay/score_difference"] == 0


def test_another_batch_is_noticed(run, tmp_path, capsys):
    folder = shutil.copytree(run.path, tmp_path / "run")
    file = folder / "batches" / "step_3.dataproto"
    batch = DataProto.load_from_disk(file)
    batch.batch["rollout_log_probs"][0, 0] += 1e-3
    batch.batch["responses"][0, 0] += 1
    batch.batch["input_ids"][0, -batch.batch["responses"].shape[1]] += 1
    batch.save_to_disk(file)
    assert main(["replay", str(folder), "3"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "actor/grad_norm " in line]
    assert "differs" in line


def test_a_token_is_explained(run, capsys):
    """In the first mini-batch the policy is still the old one; in the second it has moved."""
    ratios = []
    batch, _ = load_batch(run.path / "batches" / "step_1.dataproto")
    rollout = batch.batch["rollout_log_probs"]
    for half in (slice(0, 24), slice(24, 48)):
        # the token that the policy was least sure of
        row, column = divmod(int(rollout[half].argmin()), rollout.shape[1])
        at = (half.start + row, column)
        found = replay(run.path, 1, at)
        lines = list(explain_token(found, at))
        tensors = found.batch.batch
        assert lines[0].startswith(f"sample {at[0]}, token {at[1]}")
        assert "  sampled with version   0" in lines
        assert f"  advantage              {float(tensors['advantages'][at]):.9g}" in lines
        assert f"  log-prob, rollout      {float(rollout[at]):.9g}" in lines
        new = found.metrics["watched/log_prob"] / found.metrics["watched/seen"]
        ratios.append(math.exp(new - float(tensors["old_log_probs"][at])))
        assert f"  ratio                  {ratios[-1]:.9g}, bounds [0.8, 1.2]: not clipped" in lines
    assert ratios[0] == 1.0
    assert 1e-4 < abs(ratios[1] - 1) < 0.2
    assert main(["replay", str(run.path), "1", "--token", "0,0"]) == 0
    assert "same to the bit" in capsys.readouterr().out


def test_a_run_is_replayed_however_it_saves(run, tmp_path):
    critic = [
        "algorithm.adv_estimator=gae",
        "critic.checkpoint.async_save=true",
        "critic.checkpoint.save_contents=[model]",
    ]
    of_another = run.path / "checkpoints" / "global_step_2"
    begun = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={of_another}"]
    for words in (critic, begun):
        files = RunFiles(tmp_path)
        files.config.write_text(to_yaml(load_config(run.path / "config.yaml", words).config))
        made = replay_config(files, None, str(tmp_path / "again"), [])
        assert made.trainer.resume_from_path == (str(of_another) if words is begun else None)


def test_what_was_not_kept_is_said(run, tmp_path, capsys):
    folder = shutil.copytree(run.path, tmp_path / "run")
    (folder / "batches" / "step_3.dataproto").unlink()
    assert main(["replay", str(folder), "4"]) == 1
    assert "has not kept the batches of steps [3]" in capsys.readouterr().err


def test_batches_are_kept_up_to_a_size(tmp_path):
    batch = DataProto.from_dict({"x": torch.zeros(100, 1000)})  # 400 kB
    kept = KeptBatches(tmp_path, 1)
    for step in range(1, 6):
        kept.keep(batch, {"a": 1.0}, step)
    assert list(batch_files(tmp_path)) == [4, 5]
    assert load_batch(tmp_path / "step_5.dataproto")[1] == {"a": 1.0}
    large = KeptBatches(tmp_path / "large", 0)
    large.keep(batch, {}, 1)
    assert not (tmp_path / "large").exists()


def test_the_two_halves_make_a_step(task, run, tmp_path, capsys):
    once = (*RUN, "trainer.total_training_steps=2", "trainer.save_freq=-1")
    words = ["demo_grpo", *once, f"data.train_files=[{task.files['prompts']}]", "trainer.device=cpu"]
    words += [f"actor_rollout_ref.model.path={task.model}", f"trainer.default_local_dir={tmp_path / 'rollout'}"]
    assert main(["train", *words, "--rollout-only"]) == 0
    folder = tmp_path / "rollout" / "batches"
    assert f"batches: {folder}" in capsys.readouterr().out
    assert list(batch_files(folder)) == [1, 2]
    assert not (tmp_path / "rollout" / "model").exists()
    kept, _ = load_batch(run.path / "batches" / "step_1.dataproto")
    generated, _ = load_batch(folder / "step_1.dataproto")
    assert all(torch.equal(kept.batch[name], generated.batch[name]) for name in kept.batch.keys())
    # nothing was trained in between: the second batch has the first weights
    assert int(load_batch(folder / "step_2.dataproto")[0].batch["versions"].max()) == 0
    path = train_only(task.config(tmp_path / "train", *RUN), folder / "step_1.dataproto", console=QUIET)
    rows = [row for row in task_metrics(path) if row["step"] == 1]
    expected = without_own(run)[0]
    assert {name: rows[0][name] for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean")} == {
        name: expected[name] for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean")
    }
    with pytest.raises(ValueError, match="no batches at"):
        train_only(task.config(tmp_path / "none", *RUN), tmp_path / "nowhere", console=QUIET)


def task_metrics(path):
    import json

    return [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def broken(monkeypatch):
    """From step 2 on, the update gets advantages that are NaN."""
    update = PPOTrainer.update_actor

    def update_with_nan(self, batch):
        if self.step >= 2:
            batch.batch["advantages"] = batch.batch["advantages"] * math.nan
        return update(self, batch)

    monkeypatch.setattr(PPOTrainer, "update_actor", update_with_nan)


def test_gradients_that_are_not_finite_are_counted_dumped_and_limited(task, broken, tmp_path):
    plain = (*RUN, "trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.keep_batches_megabytes=0")
    # with checkpoints that are written in the background while the first of them is dumped
    background = ("trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.async_save=true")
    skipped = task.train(tmp_path / "skipped", *plain, *background)
    assert [problems_of(path) for path in sorted((tmp_path / "skipped" / "checkpoints").glob("global_step_*"))] == [
        []
    ] * 3
    assert [row["training/nonfinite_steps"] for row in skipped.metrics] == [0, 2, 4]
    first = task.train(tmp_path / "first", *plain, "trainer.total_training_steps=1")
    assert all(torch.isfinite(weight).all() for weight in skipped.weights.values())
    for name, weight in first.weights.items():
        assert torch.equal(skipped.weights[name], weight) or "lr" in name
    with pytest.raises(NonFiniteError, match=r"4 optimizer steps .*max_nan_steps \(3\): look at step 3"):
        task.train(tmp_path / "limited", *plain, "trainer.max_nan_steps=3")
    assert len(task_metrics(tmp_path / "limited")) == 3
    with pytest.raises(NonFiniteError, match=r"2 optimizer steps .*nan_gradient=stop"):
        task.train(tmp_path / "stopped", *plain, "trainer.nan_gradient=stop")
    assert len(task_metrics(tmp_path / "stopped")) == 2
    # the dump is enough to see it again, though the run kept nothing else
    assert replay(tmp_path / "stopped", 2).metrics["actor/skipped_steps"] == 2
    found = replay(tmp_path / "limited", 2)
    assert found.metrics["actor/skipped_steps"] == 2
    assert found.numbers["critic/score/mean"][0] == found.numbers["critic/score/mean"][1]


def signal_at(monkeypatch, step, sleep=0.0):
    keep = Keeper.keep_batch

    def keep_and_signal(self, batch, metrics, at):
        keep(self, batch, metrics, at)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(sleep)

    monkeypatch.setattr(Keeper, "keep_batch", keep_and_signal)


def test_sigterm_finishes_the_step_saves_and_ends(task, run, tmp_path, monkeypatch):
    options = (*RUN, "trainer.save_freq=-1")
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        with pytest.raises(RunStoppedError, match="after step 3, which is saved"):
            task.train(tmp_path / "run", *options)
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["global_step_3"]
    assert_equal(run, task.train(tmp_path / "run", *options))


def test_sigterm_has_a_deadline(task, tmp_path, monkeypatch):
    signal_at(monkeypatch, 1, sleep=60)
    started = time.monotonic()
    with pytest.raises(RunStoppedError, match=r"within trainer\.deadlines\.stop \(1\.0 s\)"):
        task.train(tmp_path / "run", *RUN, "trainer.deadlines.stop=1")
    assert time.monotonic() - started < 50


def test_the_command_ends_with_the_signals_exit_code(task, tmp_path, monkeypatch, capsys):
    signal_at(monkeypatch, 1)
    config = ["demo_grpo", *RUN, f"data.train_files=[{task.files['prompts']}]", "trainer.device=cpu"]
    config += [f"actor_rollout_ref.model.path={task.model}", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(["train", *config]) == 143
    assert "the same command goes on from there" in capsys.readouterr().err
