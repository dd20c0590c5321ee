"""Runs of the demo task, small enough for a test, that share one set of data and one warmed-up model."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from meshrl.config.load import load_config
from meshrl.config.rl import PPOConfig
from meshrl.config.validate import ensure_runnable
from meshrl.controller import warm_up
from meshrl.models.loading import load_model_config
from meshrl.models.tiny import make_tiny_model
from meshrl.telemetry.report import write_report
from meshrl.trainer.demo import ALPHABET, sft_run, write_data
from meshrl.trainer.launch import train


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    path: Path
    metrics: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """The demo's data, cut short, and its warmed-up model; `all_prompts` and `all_held_out` are the whole files."""

    folder: Path
    files: dict[str, str]
    model: Path

    def model_with_experts(self, folder: Path, **shape: Any) -> str:
        """Writes a random mixture of experts that reads this task's tokens; the override that names it."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=64,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None, **shape,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return f"actor_rollout_ref.model.path={folder}"

    def config(self, out: Path, *overrides: str) -> PPOConfig:
        """The demo's recipe on this data, on the CPU, an eighth of its samples a step; it must pass the checks."""
        loaded = load_config(
            "demo_grpo",
            [
                f"data.train_files=[{self.files['prompts']}]",
                f"data.val_files=[{self.files['held_out']}]",
                f"actor_rollout_ref.model.path={self.model}",
                f"trainer.default_local_dir={out}",
                "trainer.device=cpu",
                "trainer.logger=[file]",
                "data.train_batch_size=16",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "actor_rollout_ref.rollout.n=4",
                *overrides,
            ],
        )
        ensure_runnable(loaded.config)
        return loaded.config

    def train(self, out: Path, *overrides: str) -> Run:
        """Trains and reads back what the run wrote."""
        path = train(self.config(out, *overrides), console=Console(quiet=True))
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return Run(path, metrics, load_file(path / "model" / "model.safetensors"))


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """A run's report takes longer to draw than a short run to train; who wants it asks for `pictures`."""
    with patch("meshrl.trainer.launch.write_report"):
        yield


@pytest.fixture
def pictures() -> Iterator[None]:
    with patch("meshrl.trainer.launch.write_report", write_report):
        yield


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Made once, by whoever of the processes that share a run of the tests comes first."""
    warm_up("transformers.models.qwen3.modeling_qwen3")  # the model's class: else every worker imports it
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "task"
    with FileLock(f"{folder}.lock"):
        if not (folder / "files.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what another could not finish
            _make_task(folder)
    files = json.loads((folder / "files.json").read_text())
    return Task(folder, files, Path(files.pop("model")))


def _make_task(folder: Path) -> None:
    make_tiny_model(folder / "assets" / "model", ALPHABET)
    files = write_data(folder / "assets", seed=0)
    for name, rows in (("prompts", 640), ("held_out", 48)):
        whole = Path(files[name]).rename(folder / f"all_{name}.jsonl")
        Path(files[name]).write_text("".join(whole.read_text().splitlines(keepends=True)[:rows]))
        files[f"all_{name}"] = str(whole)
    with patch("meshrl.trainer.launch.write_report"):
        model = sft_run(folder, files, 0, Console(quiet=True))
    (folder / "files.json").write_text(json.dumps(files | {"model": str(model)}))


@pytest.fixture(scope="module")
def reward_model(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A model that scores the demo's answers at random, and its folder."""
    from transformers import AutoModelForTokenClassification

    config = load_model_config(str(task.model))
    config.num_labels, config.tie_word_embeddings = 1, False
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    folder = tmp_path_factory.mktemp("reward") / "model"
    model.save_pretrained(folder)
    return folder, model.eval()
