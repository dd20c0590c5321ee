"""Models without memory for their parameters: any size, with the buffers of a model that was really built."""

import psutil
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from meshrl.models.loading import LARGE, empty_causal_lm, persistent_buffers, without_memory

SMALL = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512, "rope_theta": 5e5,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, rope_parameters=YARN),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, head_dim=16),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}), **EXPERTS, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=12,
        kv_lora_rank=10, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=6, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_shapes_ties_and_buffers_are_those_of_a_real_model(family, dtype):
    config = CONFIGS[family]
    empty = empty_causal_lm(config, "eager", dtype)
    real = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    parameters, wanted = dict(empty.named_parameters()), dict(real.named_parameters())
    assert list(parameters) == list(wanted)  # so the same ones are tied
    for name, parameter in parameters.items():
        assert parameter.is_meta
        assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (
            wanted[name].shape, wanted[name].dtype, wanted[name].requires_grad,
        )  # fmt: skip
    buffers, real_buffers = dict(empty.named_buffers()), dict(real.named_buffers())
    assert list(buffers) == list(real_buffers)
    assert any(name.endswith("inv_freq") for name in buffers)
    for name, buffer in buffers.items():
        # Those that are weights are never rounded.
        exact = name in persistent_buffers(empty) and buffer.is_floating_point()
        assert buffer.dtype == (torch.float32 if exact else real_buffers[name].dtype)
        assert torch.equal(buffer, real_buffers[name]), name
    assert set(empty.state_dict()) == set(real.state_dict())


def test_a_model_that_no_machine_could_hold_takes_next_to_nothing():
    """61 layers with expert tensors of up to 2 PB each: more than addresses reach."""
    sizes = {"moe_intermediate_size": 1 << 18, "n_routed_experts": 1 << 18}
    with pytest.raises(RuntimeError):
        torch.empty(sizes["n_routed_experts"], 2 * sizes["moe_intermediate_size"], 7168, dtype=torch.bfloat16)
    before = psutil.Process().memory_info().rss
    model = empty_causal_lm(DeepseekV3Config(**sizes), "eager", torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) > 5e15
    assert psutil.Process().memory_info().rss - before < 1 << 30
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_only_what_is_made_inside_and_large_or_a_parameter_is_without_memory():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Parameter(torch.ones(3), requires_grad=False)
            self.large = nn.Parameter(torch.zeros(LARGE))
            self.register_parameter("none", None)
            self.register_buffer("table", torch.arange(5.0).cos())
            self.register_buffer("mask", torch.ones(7, 7).tril())
            self.register_buffer("large_mask", torch.ones(2, LARGE // 2, dtype=torch.bool).tril())

    with without_memory():
        layer = Layer()
        there = torch.zeros(LARGE, device="cpu", dtype=torch.int8)
    assert layer.small.is_meta
    assert not layer.small.requires_grad
    assert layer.large.is_meta
    assert layer.none is None
    assert torch.equal(layer.table, torch.arange(5.0).cos())
    assert torch.equal(layer.mask, torch.ones(7, 7).tril())
    assert layer.large_mask.sum() == 3
    assert not there.is_meta
    with pytest.raises(ZeroDivisionError), without_memory():
        1 / 0  # noqa: B018
    after = Layer()
    assert not after.small.is_meta
    assert not after.large.is_meta


class Fillings(TorchDispatchMode):
    """Counts what would fill a tensor without memory."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "normal" in str(func) and args[0].is_meta
        return func(*args, **(kwargs or {}))


def test_what_has_no_memory_is_not_filled():
    with Fillings() as plain, torch.device("meta"):
        AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"])
    with Fillings() as ours:
        empty_causal_lm(CONFIGS["qwen3_moe"], "eager")
    assert (plain.count > 0, ours.count) == (True, 0)
