"""The real SGLang on devices of its own, fed by a sharded trainer of another pool."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

from contract import PROMPTS, request
from pool_trials import BUCKET, check_versions, fed_by_trainers, model_folder
from test_sglang_server import ARGUMENTS

from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.requests import SamplingParams
from meshrl.rollout.sglang.sglang_engine import SglangServer

ASKED = SamplingParams(max_tokens=24, temperature=0.8)


@pytest.mark.timeout(600)
def test_log_probs_are_exact_after_every_sync(tmp_path):
    folder = model_folder(tmp_path / "model")
    client = SglangServer(folder, arguments=ARGUMENTS, start_seconds=280)
    rollout = RemoteRollout(client, pad_token_id=0, bucket_bytes=BUCKET, deadline=120)
    try:
        with fed_by_trainers(rollout, folder, tmp_path) as sync:
            for version in (0, 1):
                sync(rollout, version)
                answers = rollout.complete([request(prompt, ASKED) for prompt in PROMPTS])
                check_versions(answers, ASKED.temperature, {version})
    finally:
        rollout.close()
