"""What only the in-process vLLM has: side effects to contain, arguments, tensor parallelism, adapters."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CHARACTERS, CONTEXT, PROMPTS, SHAPE, chosen, log_probs_of, make_from, make_model, request
from transformers import AutoConfig

from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.requests import Request, SamplingParams
from meshrl.rollout.vllm.arguments import command_line, engine_arguments
from meshrl.rollout.vllm.log_probs import sampling_fields
from meshrl.rollout.vllm.vllm_rollout import VllmRollout

SMALL = {
    "dtype": "float32",
    "max_model_len": CONTEXT,
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = make_model(0)
    path = tmp_path_factory.mktemp("vllm") / "model"
    save_hf_folder(path, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(path)
    return path


def worst(rollout, model, temperature=0.8):
    answers = rollout.complete([request(p, SamplingParams(max_tokens=7, temperature=temperature)) for p in PROMPTS])
    differences = [
        torch.tensor(a.log_probs) - chosen(log_probs_of(model, p, a.token_ids, temperature), a.token_ids)
        for a, p in zip(answers, PROMPTS, strict=True)
    ]
    return max(float(d.abs().max()) for d in differences)


def test_tensor_parallel_workers_get_their_weights_through_shared_memory(folder):
    rollout = VllmRollout(folder, pad_token_id=0, bucket_bytes=50_000, tensor_parallel_size=2, **SMALL)
    try:
        for version, seed in enumerate((3, 4)):
            rollout.update_weights(make_model(seed).named_parameters(), version)
            assert worst(rollout, make_model(seed)) < 2e-5
            assert worst(rollout, make_model(seed + 1)) > 0.1
        broken_updates(rollout, make_model(5))
        files = rollout._folder
        assert files.exists()
    finally:
        rollout.close()
    assert not files.exists()


def broken_updates(rollout, model):
    """Weights that are no numbers, and a stream that breaks off: told as what they are; the next heals."""
    wrong = {name: param.detach().clone() for name, param in model.named_parameters()}
    wrong["model.embed_tokens.weight"][40, 3] = torch.nan
    with pytest.raises(RuntimeError, match=r"'model.embed_tokens.weight' .* no numbers"):
        rollout.update_weights(wrong.items(), 2)
    assert rollout.is_suspended()

    def breaks_off():
        for number, pair in enumerate(model.named_parameters()):
            if number == 9:
                raise KeyError("the sender broke")
            yield pair

    with pytest.raises(KeyError, match="the sender broke"):
        rollout.update_weights(breaks_off(), 3)
    rollout.update_weights(model.named_parameters(), 4)
    assert worst(rollout, model) < 2e-5


def test_dummy_weights_side_effects_and_adapters(folder):
    """One engine for all three: starting it takes most of the time."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    rollout = VllmRollout(
        folder, pad_token_id=0, load_format="dummy", enable_lora=True, max_lora_rank=8, max_loras=2, **SMALL
    )
    try:
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == wanted
        assert torch.set_num_threads is set_num_threads
        assert torch.get_num_threads() == threads
        (refused,) = rollout.complete([request(PROMPTS[0], SamplingParams(max_tokens=2))])
        assert "no weights" in (refused.error or "")
        base = make_model(3)
        rollout.update_weights(base.named_parameters(), 0)
        assert worst(rollout, base) < 2e-5
        for seed in (0, 1):
            config, tensors, merged = adapter(base, seed)
            kept = {name: tensor.clone() for name, tensor in tensors.items()}
            rollout.update_adapter(config, tensors)
            assert worst(rollout, merged) < 5e-5
            assert worst(rollout, base) > 0.05
            assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())
        rollout.update_weights(base.named_parameters(), 1)
        assert worst(rollout, base) < 2e-5
        wrong = {name: param.detach().clone() for name, param in base.named_parameters()}
        wrong["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
        rollout.update_weights(wrong.items(), 2)
        answers = rollout.complete([request(prompt, SamplingParams(max_tokens=9)) for prompt in PROMPTS[:2]])
        assert [answer.finish_reason for answer in answers] == ["error"] * 2
        assert all("no numbers" in answer.error for answer in answers)
        assert not rollout.has_work()
        rollout.update_weights(base.named_parameters(), 3)
        assert worst(rollout, base) < 2e-5
    finally:
        rollout.close()


# Experts in one stack under another name; experts that vLLM reads in a way of its own, which only works once.
GRANITE = {"model_type": "granitemoe", "hidden_size": 128, "num_local_experts": 4}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 8} | {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": CONTEXT // 4,
    }
}


def of_family(fields, seed):
    fields = SHAPE | fields
    return make_from(AutoConfig.for_model(fields.pop("model_type"), **fields), seed, "eager")


@pytest.mark.parametrize("family", [GRANITE, GPT_OSS], ids=lambda family: family["model_type"])
def test_experts_of_other_families_are_renewed_or_it_is_said_that_they_are_not(family, tmp_path):
    model = of_family(family, 0)
    save_hf_folder(tmp_path, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(tmp_path)
    rollout = VllmRollout(tmp_path, pad_token_id=0, **SMALL)
    try:
        for version, seed in enumerate((3, 4)):
            weights = of_family(family, seed).named_parameters()
            if family is GPT_OSS:
                with pytest.raises(RuntimeError, match=r"did not take .* 'model.layers.0.attn.sinks'"):
                    rollout.update_weights(weights, version)
                assert rollout.is_suspended()
                continue
            rollout.update_weights(weights, version)
            assert worst(rollout, of_family(family, seed)) < 5e-5
            assert worst(rollout, of_family(family, seed + 1)) > 0.1
    finally:
        rollout.close()


def adapter(base, seed):
    """A LoRA adapter of the query and down projections, in peft's words, and the model that it makes."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = make_model(3), {}
    modules = dict(merged.named_modules())
    for name, module in modules.items():
        if name.endswith(("q_proj", "down_proj")):
            down = torch.randn(4, module.in_features, generator=generator) * 0.2
            up = torch.randn(module.out_features, 4, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            module.weight.data += up @ down * 2.0
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    return config, tensors, merged


def test_arguments_that_the_rollout_needs_cannot_be_taken_away():
    with pytest.raises(ValueError, match="logprobs_mode cannot be set"):
        engine_arguments("model", {"logprobs_mode": "raw_logprobs"})
    words = command_line("model", {"enforce_eager": True, "max_model_len": 64, "enable_prefix_caching": False})
    assert {"--enforce-eager", "--max-model-len=64", "--no-enable-prefix-caching"} <= set(words)


@pytest.mark.parametrize(
    ("stops", "skips"), [(("a",), True), (("<eos>",), False), (("a", "b<eos>"), False), ((), None)]
)
def test_vllm_writes_special_tokens_out_where_a_stop_string_names_one(stops, skips):
    request = Request("r", (1, 2), SamplingParams(max_tokens=3, stop=stops))
    fields = sampling_fields(request, 0, 9, lambda: frozenset({"<eos>"}))
    assert fields.get("skip_special_tokens") == skips
