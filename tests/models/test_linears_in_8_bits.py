"""Linears of 8-bit floats in training: rounded to the grid as it is defined, gradients, and which linears they are."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen2Config, Qwen3MoeConfig

from meshrl.config.engine import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.models.fp8 import (
    LARGEST,
    Fp8Projection,
    Linear8,
    compute_in_8_bits,
    in_8_bits,
    weight_scale,
    weights_in_8_bits,
)
from meshrl.models.loading import load_tokenizer
from meshrl.models.lora import add_adapters
from meshrl.models.tiny import make_tiny_model
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.build import build_rollout
from meshrl.rollout.embedded.layers import is_plain

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def grid():
    """All numbers of 8-bit floats that are not negative: 4 bits of exponent (bias 7), 3 of mantissa, no infinities."""
    small = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return torch.tensor(small + normal[:-1], dtype=torch.float64)  # the last would be no number


def rounded(x, *, whole=False):
    """Vectors along the last dim on the grid whose largest number is their own; of two as near, the even one.

    `whole`: on one whose unit is a power of two, and whose largest number is not less.
    """
    unit = x.abs().amax(-1, keepdim=True) / 448
    if whole:
        unit = 2 ** unit.log2().ceil()
    numbers = grid()
    distance = ((x / unit).abs()[..., None] - numbers).abs()
    nearest = distance.amin(-1, keepdim=True)
    # Mantissas alternate between odd and even.
    score = (distance == nearest) * (2 - torch.arange(len(numbers)) % 2)
    return numbers[score.argmax(-1)] * x.sign() * unit


def linear(rows, width, *, bias=True, seed=0):
    torch.manual_seed(seed)
    made = nn.Linear(width, rows, bias=bias)
    made.__class__ = Linear8
    return made


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def test_numbers_go_to_the_nearest_of_the_grid():
    x = torch.cat([torch.linspace(-448, 448, 999), grid().float(), -grid().float()])[None]
    values, scales = in_8_bits(x)
    assert float(scales) == 1
    torch.testing.assert_close(values.double(), rounded(x.double()), rtol=0, atol=0)
    assert grid().max() == LARGEST
    values, _ = in_8_bits(torch.zeros(2, 16))
    assert not values.double().any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (1,)])
def test_products_and_gradients_are_those_of_rounded_numbers(bias, shape):
    layer = linear(48, 32, bias=bias)
    x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-1, 2, x[..., 0].numel()).view(*shape, 1)).requires_grad_()
    out = layer(x)
    weight = layer.weight.detach().double()
    expected = rounded(x.detach().double()) @ rounded(weight, whole=True).T
    if bias:
        expected = expected + layer.bias.detach().double()
    assert relative(out.detach(), expected) < 1e-6
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert relative(plain.detach(), expected) > 1e-3  # the control: it is not the product of what was given
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    out.backward(gradient)
    flat = gradient.double().view(-1, 48)
    # The weight, too, is rounded by vectors of what is added up.
    assert relative(x.grad.view(-1, 32), rounded(flat) @ rounded(weight.T, whole=True).T) < 1e-6
    assert relative(layer.weight.grad, flat.T @ x.detach().double().view(-1, 32)) < 1e-6
    if bias:
        assert relative(layer.bias.grad, flat.sum(0)) < 1e-6


def test_weights_are_rounded_alike_whatever_they_share_a_scale_with():
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    weight *= torch.logspace(-1, 1, 64)[:, None]
    numbers = []
    for turned in (weight, weight.T):
        values, scales = weights_in_8_bits(turned)
        assert (scales.log2() % 1 == 0).all()
        assert 224 < values.float().abs().amax() <= 448
        numbers.append(values.float() * scales)
    projection = Fp8Projection([weight[:16], weight[16:]], [])
    numbers += [numbers.pop().T, projection.values.float() * projection.scale]
    # But for those below the least number of which all digits are kept: of the largest, a millionth.
    for other in numbers[1:]:
        assert (other - numbers[0]).abs().max() < 1e-5 * weight.abs().max()
        assert ((other - numbers[0]).abs() > 1e-6 * weight.abs()).float().mean() < 0.01
    assert weight_scale(torch.tensor(448.0)) == 1
    assert weight_scale(torch.tensor(449.0)) == 2
    assert weight_scale(torch.tensor(224.0)) == 0.5


def test_a_token_is_the_same_whoever_is_beside_it():
    layer = linear(32, 48)
    x = torch.randn(9, 48) * torch.logspace(-4, 4, 9)[:, None]
    torch.testing.assert_close(layer(x)[3:4], layer(x[3:4]), rtol=1e-6, atol=0)


def test_small_gradients_are_rounded_like_others():
    layer = linear(48, 32)
    x = torch.randn(5, 32, requires_grad=True)
    gradient = torch.randn(5, 48)
    found = [torch.autograd.grad(layer(x), x, gradient * factor)[0] / factor for factor in (1.0, 2.0**-66)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_frozen_weights_have_no_gradient_and_pass_one_on():
    layer = linear(32, 48).requires_grad_(False)
    x = torch.randn(3, 48, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda saved: saved):
        out = layer(x)
    assert kept == [layer.weight.shape]  # what came in is for their gradient alone
    out.sum().backward()
    assert layer.weight.grad is None
    assert x.grad.abs().sum() > 0


def test_layers_change_and_nothing_else():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))
    names, ids = [name for name, _ in model.named_parameters()], torch.arange(20)[None]
    before = model(ids).logits
    compute_in_8_bits(model, CPU)
    assert [name for name, _ in model.named_parameters()] == names
    linears = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears.pop("lm_head") is nn.Linear
    assert len(linears) == 2 * 7
    assert set(linears.values()) == {Linear8}
    difference = relative(model(ids).logits.detach(), before.detach().double())
    assert 1e-3 < difference < 0.2
    assert is_plain(model)  # rollouts that use these weights have layers of their own


@pytest.mark.parametrize(("config", "alone"), [(Qwen2Config(**SHAPE), False), (Olmo2Config(**SHAPE), True)])
def test_a_rollout_has_weights_of_its_own_where_it_would_run_these_linears(tmp_path, config, alone):
    make_tiny_model(tmp_path, "abc")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    made = RolloutConfig(dtype="float32"), ModelConfig(path=str(tmp_path)), model, load_tokenizer(tmp_path)
    assert build_rollout(*made, device=CPU, can_share=True).shares_weights
    compute_in_8_bits(model, CPU)
    rollout = build_rollout(*made, device=CPU, can_share=True)
    assert rollout.shares_weights != alone
    if alone:
        assert not any(isinstance(module, Linear8) for module in rollout.hf_model.modules())


def test_adapters_stay_as_they_are():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))
    compute_in_8_bits(model, CPU)
    add_adapters(model, ModelConfig(lora_rank=4))
    kinds = {
        "lora" if ".lora_" in name else "base": type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    assert kinds == {"lora": nn.Linear, "base": Linear8}
    assert not is_plain(model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
            "takes no experts, and Qwen3MoeForCausalLM has 4 a layer: leave it out",
        ),
        (
            Qwen2Config(**SHAPE | {"intermediate_size": 40}),
            "multiples of 16, and mlp.gate_proj of Qwen2ForCausalLM is 40 by 32: leave it out",
        ),
    ],
    ids=["experts", "sizes"],
)
def test_what_cannot_be_is_said_and_changes_nothing(config, words):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=words):
        compute_in_8_bits(model, CPU)
    assert not any(isinstance(module, Linear8) for module in model.modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    @pytest.mark.parametrize("rows", [1, 7, 300])
    def test_products_are_those_of_the_cpu(self, rows):
        layer = linear(96, 64).bfloat16()
        x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(rows, 96, dtype=torch.bfloat16)
        layer(x).backward(gradient)
        found = linear(96, 64).bfloat16().cuda()
        own = x.detach().cuda().requires_grad_()
        out = found(own)
        out.backward(gradient.cuda())
        assert relative(out.detach().cpu(), layer(x).detach().double()) < 1e-2
        assert relative(own.grad.cpu(), x.grad.double()) < 1e-2
        assert relative(found.weight.grad.cpu(), layer.weight.grad.double()) < 5e-3

    def test_compiled_layers_give_the_same_for_any_number_of_tokens(self):
        layer = linear(96, 64).bfloat16().cuda()
        compiled = torch.compile(layer.forward)
        for rows in (32, 41, 200, 7):
            x = torch.randn(rows, 64, dtype=torch.bfloat16, device="cuda")
            found = []
            for forward in (compiled, layer.forward):
                own = x.clone().requires_grad_()
                out = forward(own)
                out.sum().backward()
                found.append((out.detach(), own.grad, layer.weight.grad))
                layer.weight.grad = None
            for ours, theirs in zip(*found, strict=True):
                assert relative(ours, theirs.double()) < 1e-2
