"""Chunked log-probs and entropies against log_softmax of the whole table of logits in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.config.families import UNSCALED, LogitScaling
from meshrl.engines import packed_model as module
from meshrl.engines.packed_model import linear_log_probs, linear_sum_pi_squared, tokens_per_chunk

TOKENS, DIM, VOCABULARY = 17, 6, 23


@pytest.fixture(params=[1, 5, TOKENS, 1000], ids=lambda n: f"{n} tokens a chunk")
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param * VOCABULARY)
    return request.param


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {
        "hidden": torch.randn(tokens, DIM, generator=generator).to(dtype),
        "weight": torch.randn(VOCABULARY, DIM, generator=generator).to(dtype),
        "bias": torch.randn(VOCABULARY, generator=generator).to(dtype),
        "targets": torch.randint(0, VOCABULARY, (tokens,), generator=generator),
    }


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    scaling: LogitScaling = UNSCALED,
):
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * scaling.factor
    if scaling.cap is not None:
        logits = (logits / scaling.cap).tanh() * scaling.cap
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def leaves(given: dict[str, Tensor], with_bias: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    names = ("hidden", "weight", "bias") if with_bias else ("hidden", "weight")
    return {name: given[name].detach().to(dtype).requires_grad_() for name in names}


def loss_of(log_probs: Tensor, entropy: Tensor, uses: str) -> Tensor:
    """Another weight for every token, so that swapped tokens are noticed."""
    weights = torch.linspace(-1.0, 2.0, max(len(log_probs), 1), dtype=log_probs.dtype)[: len(log_probs)]
    parts = {"log_probs": (weights * log_probs).sum(), "entropy": (weights.flip(0) * entropy).sum()}
    return sum(value for name, value in parts.items() if name in uses or uses == "both")


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
def test_values_and_gradients(temperature, with_bias, uses):
    given = inputs()
    ours, exact = leaves(given, with_bias, torch.float32), leaves(given, with_bias, torch.float64)
    got = linear_log_probs(
        ours["hidden"],
        ours["weight"],
        given["targets"],
        bias=ours.get("bias"),
        temperature=temperature,
        with_entropy=True,
    )
    want = reference(exact["hidden"], exact["weight"], given["targets"], exact.get("bias"), temperature)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    loss_of(*got, uses).backward()
    loss_of(*want, uses).backward()
    for name, leaf in ours.items():
        assert (leaf.grad.double() - exact[name].grad).abs().max() < 1e-5 * exact[name].grad.abs().max(), name


SCALINGS = [LogitScaling(0.125), LogitScaling(1.0, 2.0), LogitScaling(3.0, 1.5)]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
def test_scaled_and_capped_logits(temperature: float, scaling: LogitScaling, uses: str) -> None:
    given = inputs()
    ours, exact = leaves(given, True, torch.float32), leaves(given, True, torch.float64)
    names = ("hidden", "weight", "bias")
    got = linear_log_probs(
        ours["hidden"],
        ours["weight"],
        given["targets"],
        bias=ours["bias"],
        temperature=temperature,
        with_entropy=True,
        scaling=scaling,
    )
    hidden, weight, bias = (exact[name] for name in names)
    want = reference(hidden, weight, given["targets"], bias, temperature, scaling)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    loss_of(*got, uses).backward()
    loss_of(*want, uses).backward()
    for name, leaf in ours.items():
        assert (leaf.grad.double() - exact[name].grad).abs().max() < 1e-5 * exact[name].grad.abs().max(), name
    logits = (hidden @ weight.T + bias) * scaling.factor
    logits = logits if scaling.cap is None else (logits / scaling.cap).tanh() * scaling.cap
    sums = linear_sum_pi_squared(
        given["hidden"], given["weight"], bias=given["bias"], temperature=temperature, scaling=scaling
    )
    torch.testing.assert_close(sums.double(), (logits / temperature).softmax(-1).square().sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("chunk")
def test_the_result_with_entropy_is_the_result_without():
    given = inputs()
    plain, nothing = linear_log_probs(given["hidden"], given["weight"], given["targets"])
    both, entropy = linear_log_probs(given["hidden"], given["weight"], given["targets"], with_entropy=True)
    assert nothing is None
    assert entropy is not None
    assert torch.equal(plain, both)


@pytest.mark.usefixtures("chunk")
def test_the_comparison_notices_a_small_change():
    given = inputs()
    log_probs, entropy = linear_log_probs(given["hidden"], given["weight"], given["targets"], with_entropy=True)
    given["weight"][3, 2] += 1e-2
    moved, moved_entropy = reference(given["hidden"], given["weight"], given["targets"], None, 1.0)
    assert not torch.allclose(log_probs, moved, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(entropy, moved_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needs", ["hidden", "weight", "bias"])
@pytest.mark.usefixtures("chunk")
def test_only_what_requires_a_gradient_gets_one(needs):
    given = inputs()
    exact = leaves(given, True, torch.float64)
    given[needs].requires_grad_()
    log_probs, _ = linear_log_probs(given["hidden"], given["weight"], given["targets"], bias=given["bias"])
    log_probs.sum().backward()
    reference(exact["hidden"], exact["weight"], given["targets"], exact["bias"], 1.0)[0].sum().backward()
    for name in ("hidden", "weight", "bias"):
        assert (given[name].grad is not None) == (name == needs)
    torch.testing.assert_close(given[needs].grad.double(), exact[needs].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("chunk")
def test_repeated_targets_and_expanded_hidden_states():
    given = inputs()
    row = given["hidden"][:1].clone().requires_grad_()
    targets = torch.full((TOKENS,), 4)
    log_probs, _ = linear_log_probs(row.expand(TOKENS, DIM), given["weight"], targets)
    log_probs.sum().backward()
    exact = given["hidden"][:1].double().requires_grad_()
    (TOKENS * (exact @ given["weight"].double().T).log_softmax(-1)[0, 4]).backward()
    torch.testing.assert_close(row.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_bias", [False, True])
def test_no_tokens_still_give_every_weight_a_gradient_of_zeros(with_bias):
    given = inputs(0)
    ours = leaves(given, with_bias, torch.float32)
    got = linear_log_probs(ours["hidden"], ours["weight"], given["targets"], bias=ours.get("bias"), with_entropy=True)
    assert [x.shape for x in got] == [(0,), (0,)]
    (got[0].sum() + got[1].sum()).backward()
    assert torch.equal(ours["weight"].grad, torch.zeros(VOCABULARY, DIM))
    assert ours["hidden"].grad.shape == (0, DIM)
    if with_bias:
        assert torch.equal(ours["bias"].grad, torch.zeros(VOCABULARY))


@pytest.mark.usefixtures("chunk")
def test_half_precision_stays_near_float32():
    given = inputs(dtype=torch.bfloat16)
    ours, exact = leaves(given, False, torch.bfloat16), leaves(given, False, torch.float64)
    got = linear_log_probs(ours["hidden"], ours["weight"], given["targets"], with_entropy=True)
    want = reference(exact["hidden"], exact["weight"], given["targets"], None, 1.0)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=0.02, atol=0.05)
    loss_of(*got, "both").backward()
    loss_of(*want, "both").backward()
    for name, leaf in ours.items():
        assert leaf.grad.dtype == torch.bfloat16
        difference = (leaf.grad.double() - exact[name].grad).abs().max() / exact[name].grad.abs().max()
        assert difference < 0.03, name


def test_entropy_keeps_its_digits_when_all_logits_are_large():
    hidden = torch.randn(50, DIM, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(1))
    # Logits that are exact in float32, so that only the entropy's own rounding counts.
    hidden, weight = (hidden * 4).round() / 4, (weight * 4).round() / 4
    targets = torch.zeros(50, dtype=torch.long)
    _, entropy = linear_log_probs(hidden, weight, targets, bias=torch.full((VOCABULARY,), 300.0), with_entropy=True)
    _, exact = reference(hidden.double(), weight.double(), targets, None, 1.0)
    torch.testing.assert_close(entropy.double(), exact, rtol=1e-4, atol=3e-5)


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[200.0, -200.0]], requires_grad=True)
    log_probs, entropy = linear_log_probs(hidden, torch.eye(2) * 10, torch.tensor([0]), with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == 0.0
    assert abs(entropy.item()) < 1e-3
    assert torch.isfinite(hidden.grad).all()


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_is_ever_as_large_as_all_logits(monkeypatch):
    tokens, dim, vocabulary, per_chunk = 64, 4, 512, 8
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", per_chunk * vocabulary)
    hidden = torch.randn(tokens, dim, requires_grad=True)
    weight = torch.randn(vocabulary, dim, requires_grad=True)
    targets = torch.arange(tokens)
    with LargestTensor() as ours:
        log_probs, entropy = linear_log_probs(hidden, weight, targets, with_entropy=True, temperature=0.5)
        (log_probs.sum() + entropy.sum()).backward()
    assert ours.numel == per_chunk * vocabulary
    with LargestTensor() as plain:
        reference(hidden, weight, targets, None, 0.5)[0].sum().backward()
    assert plain.numel == tokens * vocabulary


def test_a_chunk_has_at_least_one_token():
    assert tokens_per_chunk(151_936) * 151_936 <= module.CHUNK_ELEMENTS
    assert tokens_per_chunk(module.CHUNK_ELEMENTS * 3) == 1


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_of_zero_has_no_log_probs(temperature):
    given = inputs()
    with pytest.raises(ValueError, match="temperature"):
        linear_log_probs(given["hidden"], given["weight"], given["targets"], temperature=temperature)


def test_shapes_that_do_not_belong_together_are_named():
    given = inputs()
    with pytest.raises(ValueError, match=r"\(17, 6\) and \(16,\)"):
        linear_log_probs(given["hidden"], given["weight"], given["targets"][1:])
    with pytest.raises(ValueError, match="hidden must be"):
        linear_log_probs(given["hidden"][None], given["weight"], given["targets"])


@pytest.mark.parametrize("with_bias", [False, True])
def test_kept_logits_give_what_logits_computed_twice_give(with_bias):
    given = inputs(dtype=torch.bfloat16)
    found = []
    for keep_bytes in (0, TOKENS * VOCABULARY * 2):
        ours = leaves(given, with_bias, torch.bfloat16)
        with CountProducts() as products:
            got = linear_log_probs(
                ours["hidden"],
                ours["weight"],
                given["targets"],
                bias=ours.get("bias"),
                with_entropy=True,
                keep_bytes=keep_bytes,
            )
            loss_of(*got, "both").backward()
        found.append((products.count, got, ours))
    (twice, want, exact), (once, got, ours) = found
    assert once == twice - 1
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    for name, leaf in ours.items():
        assert torch.equal(leaf.grad, exact[name].grad), name


def test_float32_logits_are_never_kept():
    given = inputs()
    with CountProducts() as products:
        ours = leaves(given, False, torch.float32)
        linear_log_probs(ours["hidden"], ours["weight"], given["targets"], keep_bytes=1 << 30)[0].sum().backward()
    assert products.count == 4  # logits, logits again, two gradients


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize(("tokens", "vocabulary", "keep"), [(37, 9001, 0), (37, 9001, 1 << 30), (5, 151936, 0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scaling", [UNSCALED, LogitScaling(0.5, 2.0)], ids=["unscaled", "capped"])
def test_the_gpu_kernels_equal_log_softmax(monkeypatch, uses, tokens, vocabulary, keep, temperature, scaling):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_ON_GPU", 16 * vocabulary)
    generator = torch.Generator().manual_seed(0)
    # Values whose products are exact in bfloat16: what differs is the kernels' own doing.
    hidden = torch.randint(-3, 4, (tokens, 64), generator=generator).bfloat16().cuda()
    weight = (torch.randint(-2, 3, (vocabulary, 64), generator=generator) / 8).bfloat16().cuda()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).cuda()
    ours, exact = (
        [x.clone().requires_grad_() for x in (hidden, weight)],
        [x.double().requires_grad_() for x in (hidden, weight)],
    )
    got = linear_log_probs(*ours, targets, temperature=temperature, with_entropy=True, keep_bytes=keep, scaling=scaling)
    want = reference(*exact, targets, None, temperature, scaling)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-3, atol=2e-3)
    loss_of(*(x.cpu() for x in got), uses).backward()
    loss_of(*(x.cpu() for x in want), uses).backward()
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine.grad.double() - theirs.grad).abs().max() < 0.02 * theirs.grad.abs().max()


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_sums_of_squares_are_those_of_the_whole_table(temperature: float, with_bias: bool) -> None:
    given = {name: value.double() for name, value in inputs().items() if name != "targets"}
    bias = given["bias"] if with_bias else None
    logits = given["hidden"] @ given["weight"].T + (0.0 if bias is None else bias)
    expected = (logits / temperature).softmax(-1).square().sum(-1).float()
    found = linear_sum_pi_squared(given["hidden"], given["weight"], bias=bias, temperature=temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
