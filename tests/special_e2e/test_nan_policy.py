"""A model whose weights are NaN: every kind of run ends with an error, and leaves whole checkpoints behind."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.cli import main
from meshrl.trainer.checkpoints import open_checkpoint, problems_of


@pytest.fixture(scope="module")
def nan_model(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nan") / "model"
    model = AutoModelForCausalLM.from_pretrained(task.model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def kinds(task, tmp_path_factory):
    """The words of a command of each kind, without its model."""
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs.write_text('{"prompt": "31>", "chosen": "13", "rejected": "31"}\n' * 8)
    policy = (
        f"data.train_files=[{task.files['prompts']}]",
        "data.val_files=[]",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.val_before_train=false",
        "trainer.gates.non_finite=off",  # which would see it in the log-probs
    )
    return {
        "train": ("demo_grpo", *policy),
        "ppo": ("demo_ppo", *policy, "trainer.critic_warmup=2"),
        "sft": ("demo_sft", f"data.train_files=[{task.files['demonstrations']}]", "data.train_batch_size=2"),
        "prefer": ("dpo", f"data.train_files=[{pairs}]", "data.train_batch_size=2", "data.max_length=16"),
    }


def run_words(folder):
    return (
        f"trainer.default_local_dir={folder}", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
        "trainer.logger=[file]", "trainer.total_training_steps=40", "trainer.test_freq=-1",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["train", "sft", "prefer"])
def test_a_run_that_only_skips_ends_with_an_error(kinds, nan_model, tmp_path, capfd, kind):
    recipe, *data = kinds[kind]
    model = "actor_rollout_ref.model" if kind == "train" else "model"
    words = [kind, recipe, *data, f"{model}.path={nan_model}", *run_words(tmp_path / "run"), "trainer.save_freq=4"]
    assert main(words) == 1
    said = capfd.readouterr().err
    of = "the actor" if kind == "train" else "the model"
    assert f"10 steps in a row changed nothing: every gradient of {of} was NaN or infinite" in said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert rows[-1]["training/nonfinite_steps"] >= 10
    kept = sorted((tmp_path / "run" / "checkpoints").glob("global_step_*"))
    assert [path.name for path in kept] == ["global_step_4", "global_step_8"]
    assert [problems_of(path) for path in kept] == [[], []]
    assert not (tmp_path / "run" / "model").exists()
    # The same command goes on from there, and two steps later the ten are full again.
    assert main(words) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert open_checkpoint(kept[-1]).step == 8
    # Told so, it goes on to its end, as it always did.
    assert main([*words, "trainer.max_nan_steps_in_a_row=0", "trainer.total_training_steps=12"]) == 0


def test_a_critic_that_learns_does_not_hide_it(task, kinds, nan_model, tmp_path, capfd):
    """While the critic warms up alone, for two steps, the policy has no update that could be skipped."""
    models = (f"actor_rollout_ref.model.path={nan_model}", f"critic.model.path={task.model}")
    assert main(["train", *kinds["ppo"], *models, *run_words(tmp_path / "run")]) == 1
    assert "10 steps in a row changed nothing: every gradient of the actor was NaN" in capfd.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("actor/skipped_steps") for row in rows] == [None] * 2 + [2.0] * 10
    assert [row["critic/skipped_steps"] for row in rows] == [0.0] * 12
    assert not (tmp_path / "run" / "model").exists()


def test_a_critic_that_is_nan_ends_a_run_at_once(task, kinds, nan_model, tmp_path, capfd):
    models = (f"actor_rollout_ref.model.path={task.model}", f"critic.model.path={nan_model}")
    assert main(["train", *kinds["ppo"], *models, *run_words(tmp_path / "run")]) == 1
    assert "the run failed: ValueError: values" in capfd.readouterr().err
    assert not (tmp_path / "run" / "model").exists()
