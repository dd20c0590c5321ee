"""The Megatron engine with TransformerEngine's layers, on a real GPU: as near to Hugging Face as bfloat16 is.

Its products of float32 are rounded to TF32, so that there is no float32 to compare: its bfloat16 must not be further
from the float32 reference than Megatron-Core's own layers and Hugging Face's model in bfloat16 are.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.config.engine import EngineConfig, MegatronConfig, ModelConfig
from meshrl.engines.engine_class import engine_class
from meshrl.models.loading import load_model, named_weights
from meshrl.tools.verify import (
    TEMPERATURE,
    Trial,
    differences,
    relative_difference,
    run_engine,
    run_reference,
    write_model,
)

HAS_ALL = torch.cuda.is_available() and all(map(importlib.util.find_spec, ("transformer_engine", "megatron")))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_ALL, reason="needs a CUDA device and TransformerEngine")]

PLAIN = {
    "vocab_size": 509,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": LATENT,
}
# How much further than the others it may be, for each thing that is compared.
MARGIN = 2.5


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trial(folder, **megatron):
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=False)
    return Trial(model, EngineConfig(strategy="megatron", megatron=MegatronConfig(**megatron)))


def outcome(folder, **megatron):
    """Two steps of the engine on the GPU."""
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        found = run_engine(trial(folder, **megatron), "cuda")
        return replace(found, log_probs=found.log_probs.cpu())
    finally:
        leave_parallel_state()


def rounded_log_probs(folder, batch):
    """By Hugging Face's model in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").cuda()
    ids, mask, responses = (batch.batch[name].cuda() for name in ("input_ids", "attention_mask", "response_mask"))
    width = responses.shape[1]
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    log_p = torch.log_softmax(logits[:, -width - 1 : -1].float() / TEMPERATURE, -1)
    return (log_p.gather(-1, ids[:, -width:, None])[..., 0] * responses).cpu()


def typical_difference(found, expected):
    """Of a token's log-prob. Not the largest: where rounding has a router choose other experts, a token is far off."""
    answered = expected.log_probs != 0
    return float((found.log_probs - expected.log_probs)[answered].abs().median())


@pytest.mark.parametrize("name", MODELS)
def test_two_steps(name, tmp_path):
    folder = write_model(AutoConfig.for_model(name, **(PLAIN | MODELS[name])), tmp_path / "model")
    case = trial(folder, dtype="bf16")
    reference, moved = run_reference(case), run_reference(case, perturb=1e-2)
    theirs = differences([outcome(folder, dtype="bf16", use_transformer_engine=False)], reference)
    found = outcome(folder, dtype="bf16", use_transformer_engine=True)
    ours = differences([found], reference)
    rounded = relative_difference(rounded_log_probs(folder, case.batches(PLAIN["vocab_size"])[0]), reference.log_probs)
    for what, difference in ours.items():
        limit = MARGIN * max(theirs[what], rounded)
        assert difference <= limit, (what, ours, theirs, rounded)
        control = differences([replace(moved, gradients={}, moments={})], reference)
        assert what in ("gradients", "moments") or control[what] > limit, (what, control, limit)
    nearly = outcome(folder, dtype="fp32", use_transformer_engine=True)
    assert typical_difference(nearly, reference) < typical_difference(found, reference) / 3


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_bit_for_bit(name, tmp_path):
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    folder = write_model(AutoConfig.for_model(name, **(PLAIN | MODELS[name])), tmp_path / "model")
    case = trial(folder, dtype="bf16", use_transformer_engine=True)
    try:
        engine = engine_class(case.engine)(case.model, case.engine, None, device=torch.device("cuda"))
        engine.initialize()
        assert any(type(part).__module__.startswith("transformer_engine") for part in engine.module.modules())
        found = {name: value.cpu().clone() for name, value in engine.per_tensor_params()}
    finally:
        leave_parallel_state()
    expected = named_weights(load_model(folder, "eager", dtype=torch.bfloat16))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].to(weight.dtype), weight) for key, weight in expected.items())
