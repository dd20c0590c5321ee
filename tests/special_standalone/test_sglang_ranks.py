"""SGLang's real server over two ranks: each takes its part of the weights, after every update."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

from contract import CHARACTERS, PROMPTS, chosen, log_probs_of, make_model, request
from test_sglang_server import ARGUMENTS

from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.requests import SamplingParams
from meshrl.rollout.sglang.sglang_engine import SglangServer


@pytest.mark.timeout(600)
def test_log_probs_are_exact_after_every_update(tmp_path):
    model, folder = make_model(0), tmp_path / "model"
    save_hf_folder(folder, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(folder)
    # One core for each rank, by number; without it SGLang wants a NUMA node for each.
    client = SglangServer(
        folder,
        arguments=ARGUMENTS | {"tp_size": 2},
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        start_seconds=500,
    )
    rollout = RemoteRollout(client, pad_token_id=0, bucket_bytes=50_000, deadline=120)
    try:
        for version, seed in enumerate((3, 4)):
            rollout.update_weights(make_model(seed).named_parameters(), version)
            answers = rollout.complete([request(p, SamplingParams(max_tokens=7, temperature=0.8)) for p in PROMPTS])
            assert {v for answer in answers for v in answer.versions} == {version}
            assert worst(make_model(seed), answers) < 2e-5
            assert worst(make_model(seed + 1), answers) > 0.1
    finally:
        rollout.close()


def worst(model, answers) -> float:
    """How far log-probs are from the model's own."""
    differences = [
        torch.tensor(a.log_probs) - chosen(log_probs_of(model, p, a.token_ids, 0.8), a.token_ids)
        for a, p in zip(answers, PROMPTS, strict=True)
    ]
    return max(float(d.abs().max()) for d in differences)
