"""FLOPs by formula against torch's own count of a real model's forward pass."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshrl.balance import flops_workload, get_workload


def test_flops_equal_those_counted_in_a_real_model() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=56,
        vocab_size=77,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)

    def counted(length: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
        products = counter.get_flop_counts()["Global"]
        return sum(products.values())

    # The counter sees the full square of eager attention, of which a causal kernel computes half.
    lengths = np.array([8, 16, 40])
    full_square = 4 * 3 * 4 * 12 * lengths**2
    np.testing.assert_allclose([counted(n) for n in lengths], flops_workload(config)(lengths) + full_square / 2)


def test_mixture_of_experts_counts_visited_experts() -> None:
    common = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
    }
    dense = flops_workload(SimpleNamespace(**common, intermediate_size=2 * 24))
    sparse = flops_workload(
        SimpleNamespace(**common, intermediate_size=999, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    )
    router = 2 * 2 * 16 * 8 * np.array([10.0])
    np.testing.assert_allclose(sparse(np.array([10])), dense(np.array([10])) + router)
    wrapped = flops_workload(SimpleNamespace(text_config=SimpleNamespace(**common, intermediate_size=48)))
    np.testing.assert_allclose(wrapped(np.array([10])), dense(np.array([10])))


def test_by_name() -> None:
    assert get_workload("tokens")(np.array([3, 4])).tolist() == [3, 4]
    assert get_workload("squared")(np.array([3, 4])).tolist() == [9, 16]
    with pytest.raises(ValueError, match="did you mean 'squared'"):
        get_workload("square")
    with pytest.raises(ValueError, match="needs the model's config"):
        get_workload("flops")
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        get_workload("flops", SimpleNamespace(hidden_size=3))


def test_layers_with_a_state_cost_the_same_for_every_token() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 10}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} | dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim"), 8
    )
    config = SimpleNamespace(**shape, **sizes, intermediate_size=48, layer_types=kinds)
    once, twice = flops_workload(config)(np.array([100, 200]))
    assert twice - 2 * once == 2 * (4 * 8) * (200**2 - 2 * 100**2)  # of one layer
