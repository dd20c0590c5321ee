"""From a training engine into the real vLLM, version after version, as a worker does it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CHARACTERS, CONTEXT, PROMPTS, chosen, log_probs_of, make_model, request

from meshrl.config.engine import EngineConfig, FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.requests import SamplingParams
from meshrl.rollout.vllm.vllm_rollout import VllmRollout
from meshrl.weights.colocated import HybridEngine, policy_sync

TEMPERATURE = 0.8


@pytest.fixture
def engine(tmp_path):
    model = make_model(0)
    save_hf_folder(tmp_path / "model", model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(tmp_path / "model")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    precision = MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
    made = FSDPEngine(
        ModelConfig(path=str(tmp_path / "model"), enable_gradient_checkpointing=False),
        EngineConfig(fsdp_config=FSDPConfig(model_dtype="fp32", mixed_precision=precision)),
        OptimConfig(lr=1e-3),
        device=torch.device("cpu"),
    )
    made.initialize()
    return made


def worst(model, answers):
    """How far vLLM's log-probs are from the model's own."""
    found = []
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        own = chosen(log_probs_of(model, prompt, answer.token_ids, TEMPERATURE), answer.token_ids)
        found.append(float((torch.tensor(answer.log_probs) - own).abs().max()))
    return max(found)


def test_exact_for_every_version_and_silent_between(engine):
    rollout = VllmRollout(
        engine.model_config.path, pad_token_id=0, bucket_bytes=50_000, dtype="float32", max_model_len=CONTEXT,
        kv_cache_memory_bytes=32 << 20, enforce_eager=True, block_size=32,
    )  # fmt: skip
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=60.0)
    phases = HybridEngine(engine, rollout, sync, device=torch.device("cpu"))
    asked = SamplingParams(max_tokens=7, temperature=TEMPERATURE)
    models = []
    try:
        for version, seed in enumerate((3, 4, 5)):
            wanted = make_model(seed)
            own, new = dict(engine.hf_model.named_parameters()), dict(wanted.named_parameters())
            with torch.no_grad():
                for name, param in own.items():
                    param.copy_(new[name])
            metrics = phases.to_rollout(version)
            assert metrics["weight_sync/copied_bytes"] == sum(p.numel() * 4 for p in own.values())
            answers = rollout.complete([request(prompt, asked) for prompt in PROMPTS])
            models.append(wanted)
            assert {v for answer in answers for v in answer.versions} == {version}
            assert worst(models[-1], answers) < 2e-5
            assert version == 0 or worst(models[-2], answers) > 0.1
            phases.to_train()
            assert rollout.is_suspended()
        # Back to the last version, which is sent again.
        phases.back_to_rollout()
        answers = rollout.complete([request(prompt, asked) for prompt in PROMPTS])
        assert {v for answer in answers for v in answer.versions} == {2}
    finally:
        rollout.close()
    # The trainer's process group outlives the engine.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 1
