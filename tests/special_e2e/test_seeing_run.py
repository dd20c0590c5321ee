"""A policy that sees: it learns what only its images tell, on every layout the same, and its model can be used."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from conftest import Run
from rich.console import Console
from safetensors.torch import load_file
from test_layouts import compare
from transformers import AutoModelForImageTextToText

from meshrl.config.load import load_config
from meshrl.config.supervised import SFTConfig
from meshrl.config.validate import ensure_runnable
from meshrl.data.images import ImageReader, as_png
from meshrl.trainer.launch import train, train_supervised

EXAMPLE = Path(__file__).parents[2] / "examples/images"
# The recipe with half of its samples and larger steps.
LEARNING = (
    "trainer.total_training_steps=24",
    "trainer.test_freq=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=4e-3",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
)
SHORT = (
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=90",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
)


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """The example's own data and model."""
    folder = tmp_path_factory.mktemp("colours")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", str(folder)])
        runpy.run_path(str(EXAMPLE / "prepare.py"), run_name="__main__")
    return folder


def trained(folder, out, *overrides, recipe="recipe.yaml"):
    loaded = load_config(
        str(EXAMPLE / recipe),
        [
            f"data.train_files=[{folder / 'train.parquet'}]",
            f"data.val_files=[{folder / 'test.parquet'}]",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"trainer.default_local_dir={out}",
            "trainer.device=cpu",
            "trainer.logger=[file]",
            *overrides,
        ],
    )
    ensure_runnable(loaded.config)
    path = train(loaded.config, console=Console(quiet=True))
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return Run(path, metrics, load_file(path / "model" / "model.safetensors"))


def accuracies(run):
    return [row["val-core/colours/acc/mean@1"] for row in run.metrics if "val-core/colours/acc/mean@1" in row]


@pytest.fixture(scope="module")
def learnt(colours, tmp_path_factory):
    return trained(colours, tmp_path_factory.mktemp("learnt"), *LEARNING, "trainer.test_freq=24")


def test_it_learns_what_only_its_images_tell(learnt):
    first, *_, last = accuracies(learnt)
    assert first < 0.3
    assert last > 0.9
    gaps = [row["training/rollout_log_prob_diff_max"] for row in learnt.metrics if row["step"] > 0]
    assert max(gaps) < 1e-4  # what generates and what trains see the same


def test_the_control_without_colours_does_not(colours, tmp_path):
    """Every image is grey: all prompts are the same, and one answer is right for a quarter of them."""
    grey = as_png(np.full((16, 16, 3), 128, np.uint8))
    for name in ("train", "test"):
        rows = pandas.read_parquet(colours / f"{name}.parquet")
        rows["images"] = [[{"bytes": grey, "path": None}]] * len(rows)
        rows.to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "model").symlink_to(colours / "model")
    run = trained(tmp_path, tmp_path / "run", *LEARNING)
    assert max(accuracies(run)) < 0.45


def test_its_model_can_be_used(learnt, colours):
    """By Transformers, with how images are read beside the weights: it answers what it has learnt."""
    folder = learnt.path / "model"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    reader = ImageReader(folder)
    from meshrl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(folder)
    rows = pandas.read_parquet(colours / "test.parquet")[:16]
    right = 0
    for row in rows.itertuples():
        image = row.images[0]["bytes"]
        text = f"<|vision_start|>{'<|image_pad|>' * reader.num_tokens(image)}<|vision_end|>?"
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        pixels = reader.pixels(image)
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(
                input_ids=ids, pixel_values=pixels.values, image_grid_thw=torch.tensor([pixels.grid]),
                mm_token_type_ids=kinds,
            ).logits[0, -1]  # fmt: skip
        right += tokenizer.decode([int(logits.argmax())]) == row.ground_truth
    assert right >= 14


@pytest.fixture(scope="module")
def one_process(colours, tmp_path_factory):
    return trained(colours, tmp_path_factory.mktemp("one"), *SHORT)


APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.ref.nnodes=1",
    "actor_rollout_ref.ref.n_gpus_per_node=1",
)
LAYOUTS = {
    "two": ("trainer.n_gpus_per_node=2",),
    "shared rows": ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"),
    "apart": APART,
    "one rollout of two": ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
    "streamed and saved": ("data.streaming=true", "data.shuffle=false", "trainer.save_freq=1"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_run(colours, one_process, tmp_path, layout):
    options = LAYOUTS[layout]
    if "data.shuffle=false" in options:
        one_process = trained(colours, tmp_path / "plain", *SHORT, "data.shuffle=false")
    run = trained(colours, tmp_path / "run", *SHORT, *options)
    compare(one_process, run, 1e-4)


def test_images_that_come_in_the_middle_of_a_conversation(colours, tmp_path):
    """What generates and what trains see the same, and so do two ranks; to leave the images out is something else."""
    world = f"actor_rollout_ref.rollout.multi_turn.environment={EXAMPLE / 'later.py'}:"
    blind = tmp_path / "blind.py"
    blind.write_text((EXAMPLE / "later.py").read_text().replace(", images=self.sample.images", ""))
    # Two micro-batches of each mini-batch.
    short = (*SHORT, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=250")
    options = (*short, world + "ShownLater")
    one = trained(colours, tmp_path / "one", *options, recipe="later.yaml")
    assert all(row["training/rollout_log_prob_diff_max"] < 1e-5 for row in one.metrics)
    assert any(row["agent/ended_by/environment"] > 0.2 for row in one.metrics)
    two = trained(colours, tmp_path / "two", *options, "trainer.n_gpus_per_node=2", recipe="later.yaml")
    compare(one, two, 1e-4)
    unseen = (*short, f"actor_rollout_ref.rollout.multi_turn.environment={blind}:ShownLater")
    with pytest.raises(AssertionError):
        compare(one, trained(colours, tmp_path / "unseen", *unseen, recipe="later.yaml"), 1e-4)


def test_a_frozen_tower_stays_as_it_was(colours, tmp_path):
    run = trained(colours, tmp_path / "run", *SHORT, "actor_rollout_ref.actor.freeze_vision_tower=true")
    first = load_file(colours / "model/model.safetensors")
    changed = {"visual" in name for name, weight in run.weights.items() if not torch.equal(weight, first[name])}
    assert changed == {False}


def fine_tuned(folder, out, *overrides):
    """The losses on held-out images of a model that is told the answers."""
    for name in ("train", "test"):
        rows = pandas.read_parquet(folder / f"{name}.parquet").rename(columns={"ground_truth": "response"})
        rows.to_parquet(out.parent / f"{name}.parquet")
    loaded = load_config(
        None,
        [
            f"data.train_files=[{out.parent / 'train.parquet'}]",
            f"data.val_files=[{out.parent / 'test.parquet'}]",
            "data.train_batch_size=32",
            "data.max_length=32",
            f"model.path={folder / 'model'}",
            "engine.fsdp_config.mixed_precision.param_dtype=fp32",
            "optim.lr=2e-3",
            f"trainer.default_local_dir={out}",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            "trainer.logger=[file]",
            *overrides,
        ],
        SFTConfig,
    )
    ensure_runnable(loaded.config)
    path = train_supervised(loaded.config, console=Console(quiet=True))
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row["val/loss"] for row in metrics if "val/loss" in row], path


def test_fine_tuning_on_images(colours, tmp_path):
    options = ("trainer.total_training_steps=24", "trainer.test_freq=4", "optim.lr=4e-3")
    losses, path = fine_tuned(colours, tmp_path / "one", *options, "model.enable_gradient_checkpointing=false")
    # Two tokens are learned, and the second is always the end: not to know the colour costs log(4) / 2.
    assert losses[-1] < 0.1 < np.log(4) / 2 < losses[0]
    assert (path / "model/preprocessor_config.json").is_file()
    few = ("data.train_batch_size=12", "trainer.total_training_steps=2")
    short = (*few, "trainer.test_freq=1", "data.max_token_len_per_gpu=90")
    one, _ = fine_tuned(colours, tmp_path / "short", *short)
    two, _ = fine_tuned(colours, tmp_path / "two", *short, "trainer.n_gpus_per_node=2")
    assert two == pytest.approx(one, rel=1e-4)
