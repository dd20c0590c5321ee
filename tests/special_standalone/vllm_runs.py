"""Short runs of the demo's recipe in which a real vLLM generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from meshrl.config.load import load_config
from meshrl.config.validate import ensure_runnable
from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.demo import ALPHABET, write_data
from meshrl.trainer.launch import train

ROLLOUT = "actor_rollout_ref.rollout"
APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1")
REWARD = Path(__file__).parents[1] / "special_e2e" / "dense_reward.py"


def short_run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the steps of a run measured, and its samples."""
    make_tiny_model(folder / "model", ALPHABET)
    settings = [
        f"data.train_files=[{write_data(folder, seed=0)['prompts']}]",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"custom_reward_function.path={REWARD}", "reward.name=null",
        f"trainer.default_local_dir={folder / 'run'}", "trainer.device=cpu", "trainer.logger=[file]",
        "trainer.test_freq=-1", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "algorithm.rollout_correction.bypass_mode=false", f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.max_num_seqs=16", f"{ROLLOUT}.max_model_len=32", f"{ROLLOUT}.enforce_eager=true",
        f"{ROLLOUT}.update_weights_bucket_megabytes=1",
        f"{ROLLOUT}.engine_kwargs.vllm={{kv_cache_memory_bytes: 33554432, block_size: 32}}",
    ]  # fmt: skip
    config = load_config("demo_grpo", [*settings, *overrides]).config
    ensure_runnable(config)
    with patch("meshrl.telemetry.report.write_curves"):
        path = train(config, console=Console(quiet=True))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (path / "generations.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/grad_norm" in row], samples
