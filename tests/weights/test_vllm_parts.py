"""Which part of every tensor a rank of vLLM keeps; the real engine's own cut is tested by `make test-vllm`."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig

from meshrl.rollout.vllm.arguments import Parallel, complaint, parallel_of
from meshrl.weights.placement import RolloutLayout
from meshrl.weights.vllm_parts import own_parts, owners_of_weights, unsent

CONFIG = Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=16, num_experts=4)


def settings(**more):
    return SimpleNamespace(
        **{
            "tensor_parallel_size": 2,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_expert_parallel": False,
            "enable_eplb": False,
            "expert_placement_strategy": "linear",
        }
        | more
    )


def test_a_rank_keeps_its_part():
    assert parallel_of(settings(), 1, CONFIG) == Parallel(2, 1)
    assert parallel_of(settings(enable_expert_parallel=True), 1, CONFIG) == Parallel(2, 1, ep=2)
    assert RolloutLayout.of(Parallel(2, 1), 6, "packed") == RolloutLayout(tp=2, dp=3, form="packed")
    assert RolloutLayout.of(Parallel(2, 1, ep=2), 6) == RolloutLayout(tp=2, dp=3, ep=2)


@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel_size": 1},
        {"enable_expert_parallel": True, "enable_eplb": True},
        {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
        {"enable_expert_parallel": True, "data_parallel_size": 2},
        {"data_parallel_size": 2},  # experts are cut over all of them
        {"prefill_context_parallel_size": 2},
        {"enable_expert_parallel": True, "tensor_parallel_size": 3},
    ],
    ids=str,
)
def test_it_keeps_everything_or_we_cannot_tell(more):
    assert parallel_of(settings(**more), 0, CONFIG) is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spreads", [False, True])
def test_nothing_else_is_copied(rank, spreads):
    layer = "model.layers.0."
    shapes = {
        f"{layer}self_attn.k_proj.weight": (16, 16),
        f"{layer}self_attn.o_proj.weight": (16, 32),
        f"{layer}input_layernorm.weight": (16,),
    } | {f"{layer}mlp.experts.{number}.up_proj.weight": (6, 16) for number in range(4)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    found = dict(own_parts(whole.items(), Parallel(2, rank, 2 if spreads else 0), CONFIG, torch.device("cpu")))
    expected = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    half = {size: slice(rank * size // 2, (rank + 1) * size // 2) for size in (6, 16, 32)}
    for name, tensor in expected.items():
        if "k_proj" in name:
            tensor[half[16]] = whole[name][half[16]]
        elif "o_proj" in name:
            tensor[:, half[32]] = whole[name][:, half[32]]
        elif "experts" in name and spreads:
            if int(name.split(".")[5]) // 2 == rank:
                tensor.copy_(whole[name])
        elif "experts" in name:
            tensor[half[6]] = whole[name][half[6]]
        else:
            tensor.copy_(whole[name])
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_not_sent_is_found_where_it_is_used(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)).to(dtype)
    model.register_parameter("packed_away", torch.nn.Parameter(torch.empty(0)))
    model.register_parameter("quantized", torch.nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), False))
    assert unsent(model) == []
    assert complaint([[], []], [[], []]) is None
    with torch.no_grad():
        model[1].weight[3, 5] = torch.nan
    assert unsent(model) == ["1.weight"]
    assert "vLLM's '1.weight' (2 parameters in all)" in (complaint([unsent(model), ["other"]], [[], []]) or "")


def test_a_dense_model_is_cut_alike_in_every_data_parallel_copy():
    assert parallel_of(settings(data_parallel_size=2), 1, SimpleNamespace()) == Parallel(2, 1)


def test_what_vllm_passed_over_is_told():
    told = complaint([[], []], [["attn.sinks"], ["attn.sinks"]]) or ""
    assert "did not take what it was sent for 'attn.sinks' (2 parameters in all)" in told


def test_a_shared_weight_has_several_owners():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False), "norm": nn.LayerNorm(4)})
    model["head"].weight = model["embed"].weight
    found = {name: [type(layer).__name__ for layer in layers] for name, layers in owners_of_weights(model).items()}
    assert found == {"embed.weight": ["Embedding", "Linear"], "norm.weight": ["LayerNorm"], "norm.bias": ["LayerNorm"]}
