"""The real vLLM on devices of its own: fed by a sharded trainer of another pool, and by the trainer of a whole run."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CONTEXT, PROMPTS, request
from pool_trials import BUCKET, DEADLINE, check_versions, fed_by_trainers, model_folder
from vllm_runs import APART, ROLLOUT, short_run

from meshrl.rollout.requests import SamplingParams
from meshrl.rollout.vllm.vllm_rollout import VllmRollout

ASKED = SamplingParams(max_tokens=24, temperature=0.8)
STEPS = ("trainer.total_training_steps=4",)


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


@pytest.mark.timeout(600)
def test_a_run_has_the_newest_weights_in_every_step(tmp_path):
    # Two ranks that are one vLLM, and samples that are scored as they end.
    cut = (f"{ROLLOUT}.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2")
    rows, samples = short_run(tmp_path, *APART, *STEPS, *cut, "reward_manager.overlap=true")
    assert [row["training/staleness_max"] for row in rows] == [0.0] * 4
    assert {(sample["step"], sample["tokens"]["version"]) for sample in samples} == {(n + 1, n) for n in range(4)}
    assert max(row["training/rollout_log_prob_diff_max"] for row in rows) < 1e-4
    assert min(row["actor/grad_norm"] for row in rows) > 0


@pytest.mark.timeout(600)
def test_a_run_ahead_trains_on_samples_of_the_version_before(tmp_path):
    ahead = ("async_training.max_staleness=1", "async_training.partial_rollout=false")
    rows, samples = short_run(tmp_path, *APART, *STEPS, f"{ROLLOUT}.n_gpus_per_node=1", *ahead)
    assert [row["training/partial_share"] for row in rows] == [0.0] * 4
    assert [sample["tokens"]["version"] for sample in samples if sample["step"] == 1] == [0, 0]
    assert all(0 <= sample["step"] - 1 - sample["tokens"]["version"] <= 1 for sample in samples)
    assert max(row["training/staleness_max"] for row in rows) == 1
    assert rows[0]["training/rollout_log_prob_diff_max"] < 1e-4
    # Weights that stayed as they were would be seen: this far are the log-probs of the version before.
    old = [row["rollout_corr/log_prob_abs_diff_max"] for row in rows if row["training/staleness_mean"] == 1]
    assert all(far > 0.1 for far in old)
