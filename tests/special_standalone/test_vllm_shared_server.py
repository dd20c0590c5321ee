"""Runs in which one real vLLM server, cut over two ranks, generates for both of them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm_runs import APART, ROLLOUT, short_run

STEPS = 3
SERVER = (
    f"{ROLLOUT}.as_server=true", f"{ROLLOUT}.tensor_model_parallel_size=2", f"trainer.total_training_steps={STEPS}",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_on_the_trainers_ranks(tmp_path):
    rows, samples = short_run(tmp_path, *SERVER, "trainer.n_gpus_per_node=2", "reward_manager.overlap=true")
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
    ranks = (*APART, f"{ROLLOUT}.n_gpus_per_node=2", "trainer.n_gpus_per_node=1")
    rows, samples = short_run(tmp_path, *SERVER, *ranks, "async_training.max_staleness=1")
    assert all(0 <= sample["step"] - 1 - min_version(sample) <= 1 for sample in samples)
    assert max(row["training/staleness_max"] for row in rows) == 1
    assert rows[0]["training/rollout_log_prob_diff_max"] < 1e-4


def min_version(sample) -> int:
    versions = sample["tokens"]["version"]
    return min(versions) if isinstance(versions, list) else versions
