"""Runs in which one real vLLM server, cut over two ranks, generates for both of them."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
from rich.console import Console

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from test_vllm_pools import REWARD

from meshrl.config.checks import ensure_runnable
from meshrl.config.load import load_config
from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.demo import ALPHABET, write_data
from meshrl.trainer.run import train

ROLLOUT = "actor_rollout_ref.rollout"
APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")
STEPS = 3


def run(folder, *overrides):
    """A short run of the demo's recipe; what its steps measured, and its samples."""
    make_tiny_model(folder / "model", ALPHABET)
    settings = [
        f"data.train_files=[{write_data(folder, seed=0)['prompts']}]",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"custom_reward_function.path={REWARD}", "reward.name=null",
        f"trainer.default_local_dir={folder / 'run'}", "trainer.device=cpu", "trainer.logger=[file]",
        "trainer.test_freq=-1", f"trainer.total_training_steps={STEPS}",
        "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "algorithm.rollout_correction.bypass_mode=false",
        f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.as_server=true", f"{ROLLOUT}.tensor_model_parallel_size=2",
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


@pytest.mark.timeout(600)
def test_on_the_trainers_ranks(tmp_path):
    rows, samples = run(tmp_path, "trainer.n_gpus_per_node=2", "reward_manager.overlap=true")
    assert {(sample["step"], sample["tokens"]["version"]) for sample in samples} == {(n + 1, n) for n in range(STEPS)}
    assert max(row["training/rollout_log_prob_diff_max"] for row in rows) < 1e-4
    assert min(row["actor/grad_norm"] for row in rows) > 0
    # One copy of the model a step, however many ranks there are.
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    for row in rows:
        moved = row["weight_sync/received_bytes"] + row["weight_sync/copied_bytes"]
        assert 0.9 * size < moved < 1.1 * size


@pytest.mark.timeout(600)
def test_on_ranks_of_its_own_and_ahead(tmp_path):
    rows, samples = run(tmp_path, *APART, "async_training.max_staleness=1", "trainer.n_gpus_per_node=1")
    assert all(0 <= sample["step"] - 1 - min_version(sample) <= 1 for sample in samples)
    assert max(row["training/staleness_max"] for row in rows) == 1
    assert rows[0]["training/rollout_log_prob_diff_max"] < 1e-4


def min_version(sample) -> int:
    versions = sample["tokens"]["version"]
    return min(versions) if isinstance(versions, list) else versions
