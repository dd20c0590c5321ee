"""The real vLLM on devices of its own: fed by a sharded trainer of another pool, and by the trainer of a whole run."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CONTEXT, PROMPTS, request
from pool_trials import BUCKET, DEADLINE, check_versions, fed_by_trainers, model_folder
from rich.console import Console

from meshrl.config.checks import ensure_runnable
from meshrl.config.load import load_config
from meshrl.models.tiny import make_tiny_model
from meshrl.rollout.requests import SamplingParams
from meshrl.rollout.vllm.engine import VllmRollout
from meshrl.trainer.demo import ALPHABET, write_data
from meshrl.trainer.run import train

ASKED = SamplingParams(max_tokens=24, temperature=0.8)
REWARD = Path(__file__).parents[1] / "special_e2e" / "dense_reward.py"


@pytest.mark.timeout(600)
def test_log_probs_are_exact_after_every_sync_also_of_answers_that_go_on_over_it(tmp_path):
    folder = model_folder(tmp_path / "model")
    rollout = VllmRollout(
        folder, pad_token_id=0, bucket_bytes=BUCKET, dtype="float32", max_model_len=CONTEXT, max_num_seqs=16,
        kv_cache_memory_bytes=32 << 20, enforce_eager=True, block_size=32,
    )  # fmt: skip
    step, steps, answers, enough = rollout.step, [], [], threading.Event()

    def step_until_new():
        if len(steps) == 8 and rollout.version == 0:
            enough.set()
            time.sleep(0.01)
            return []  # the rest is for the new version
        steps.append(rollout.version)
        return step()

    try:
        with fed_by_trainers(rollout, folder, tmp_path) as sync:
            asked = [request(prompt, ASKED) for prompt in PROMPTS]
            assert {answer.finish_reason for answer in rollout.complete(asked)} == {"error"}  # no weights yet
            sync(rollout, 0)
            check_versions(rollout.complete(asked), ASKED.temperature, {0})
            rollout.step = step_until_new
            thread = threading.Thread(target=lambda: answers.extend(rollout.complete(asked)))
            thread.start()
            assert enough.wait(DEADLINE)
            sync(rollout, 1)
            thread.join(DEADLINE)
        check_versions(answers, ASKED.temperature, {0, 1})
    finally:
        rollout.close()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A model and prompts for runs of the demo's recipe with a rollout of its own."""
    folder = tmp_path_factory.mktemp("task")
    make_tiny_model(folder / "model", ALPHABET)
    prompts = write_data(folder, seed=0)["prompts"]

    def start(out, *overrides):
        settings = [
            f"data.train_files=[{prompts}]", f"actor_rollout_ref.model.path={folder / 'model'}",
            f"custom_reward_function.path={REWARD}", "reward.name=null",
            f"trainer.default_local_dir={out}", "trainer.device=cpu", "trainer.logger=[file]", "trainer.test_freq=-1",
            "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "algorithm.rollout_correction.bypass_mode=false", "trainer.total_training_steps=4",
            "actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.max_num_seqs=16", "actor_rollout_ref.rollout.max_model_len=32",
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
            "actor_rollout_ref.rollout.enforce_eager=true",
            "actor_rollout_ref.rollout.engine_kwargs.vllm={kv_cache_memory_bytes: 33554432, block_size: 32}",
        ]  # fmt: skip
        config = load_config("demo_grpo", [*settings, *overrides]).config
        ensure_runnable(config)
        with patch("meshrl.telemetry.report.write_curves"):
            path = train(config, console=Console(quiet=True))
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        samples = [json.loads(line) for line in (path / "generations.jsonl").read_text().splitlines()]
        return [row for row in rows if "training/staleness_max" in row], samples

    return start


@pytest.mark.timeout(600)
def test_a_run_has_the_newest_weights_in_every_step(task, tmp_path):
    # Two ranks that are one vLLM, and samples that are scored as they end.
    cut = ("actor_rollout_ref.rollout.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    rows, samples = task(tmp_path / "run", *cut, "reward_manager.overlap=true")
    assert [row["training/staleness_max"] for row in rows] == [0.0] * 4
    assert {(sample["step"], sample["tokens"]["version"]) for sample in samples} == {(n + 1, n) for n in range(4)}
    assert max(row["training/rollout_log_prob_diff_max"] for row in rows) < 1e-4
    assert min(row["actor/grad_norm"] for row in rows) > 0


@pytest.mark.timeout(600)
def test_a_run_ahead_trains_on_samples_of_the_version_before(task, tmp_path):
    rows, samples = task(tmp_path / "run", "async_training.max_staleness=1", "async_training.partial_rollout=false")
    assert [row["training/partial_share"] for row in rows] == [0.0] * 4
    assert [sample["tokens"]["version"] for sample in samples if sample["step"] == 1] == [0, 0]
    assert all(0 <= sample["step"] - 1 - sample["tokens"]["version"] <= 1 for sample in samples)
    assert max(row["training/staleness_max"] for row in rows) == 1
    assert rows[0]["training/rollout_log_prob_diff_max"] < 1e-4
    # Weights that stayed as they were would be seen: this far are the log-probs of the version before.
    old = [row["rollout_corr/log_prob_abs_diff_max"] for row in rows if row["training/staleness_mean"] == 1]
    assert all(far > 0.1 for far in old)
