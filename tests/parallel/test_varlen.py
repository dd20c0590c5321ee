"""The kernels for packed rows against attention written out, document by document."""

import sys
import types

import pytest
import torch
from torch import Tensor

from meshrl.parallel import attention

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def borders_of(lengths: list[int], device: torch.device = CPU) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, borders: tuple[Tensor, Tensor], scaling: float, window: int | None
) -> Tensor:
    """Attention of each document by itself, every query aligned to the last key."""
    group = query.shape[1] // key.shape[1]
    outputs = []
    for i in range(len(borders[0]) - 1):
        own, seen = (slice(int(b[i]), int(b[i + 1])) for b in borders)
        q = query[own].transpose(0, 1)
        k, v = (x[seen].transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
        at = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[:, None]
        distance = at - torch.arange(k.shape[1], device=q.device)
        hidden = (distance < 0) | (distance >= (window or k.shape[1]))
        scores = (q @ k.mT * scaling).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def random_rows(
    queries: list[int], keys: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(queries))
    shapes = (sum(queries), heads[0], dim), (sum(keys), heads[1], dim), (sum(keys), heads[1], dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def far(left: Tensor, right: Tensor) -> float:
    left, right = left.detach().double(), right.detach().double()
    return float((left - right).norm() / right.norm())


def test_flash_4_is_for_gpus():
    assert not attention.has_flash_4(CPU)


def test_a_kernel_for_one_size_gets_values_of_the_queries_size(monkeypatch):
    lengths = [4, 1, 7]
    borders = borders_of(lengths), borders_of(lengths)
    query, key, wide = (x.requires_grad_() for x in random_rows(lengths, lengths, (4, 4), 6, torch.float64, CPU))
    value = wide[..., :3]

    def kernel(q, k, v, *_, scale, **__):
        assert q.shape == k.shape == v.shape
        return written_out(q, k, v, borders, scale, None)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    out = attention.attend_varlen(query, key, value, borders, (7, 7), 0.7, None)
    wanted = written_out(query, key, value, borders, 0.7, None)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(x.square().sum(), (query, key, wide), retain_graph=True) for x in (out, wanted)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("returns_pair", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_flash_4_is_told_the_documents_and_the_window(monkeypatch, window, returns_pair):
    queries, keys = [4, 1, 3], [9, 1, 7]
    borders = borders_of(queries), borders_of(keys)

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
    ):
        assert causal
        assert (max_seqlen_q, max_seqlen_k) == (4, 9)
        assert window_size in ((None, None), ((window or 0) - 1, 0))
        seen = None if window_size[0] is None else window_size[0] + 1
        out = written_out(q, k, v, (cu_seqlens_q, cu_seqlens_k), softmax_scale, seen)
        return (out, None) if returns_pair else out

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(attention, "has_flash_4", lambda device: True)
    rows = random_rows(queries, keys, (4, 2), 8, torch.float64, CPU)
    out = attention.attend_varlen(*rows, borders, (4, 9), 0.7, window)
    torch.testing.assert_close(out, written_out(*rows, borders, 0.7, window), rtol=1e-12, atol=1e-12)


CASES = [
    ([130, 7, 7, 1, 64], None, (16, 8), 128, None),
    ([130, 7, 7, 1, 64], None, (16, 8), 128, 20),
    ([5, 7, 300], [50, 7, 329], (16, 8), 128, None),
    ([33, 200, 64], None, (14, 2), 64, None),
    ([100, 3], None, (4, 4), 96, None),
    ([100, 30], None, (4, 1), 256, None),
]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("queries", "keys", "heads", "dim", "window"), CASES)
@pytest.mark.parametrize("kernel", ["torch", "flash 4"])
def test_a_kernel_equals_attention_written_out(monkeypatch, kernel, queries, keys, heads, dim, window):
    device, keys = torch.device("cuda"), keys or queries
    if kernel == "flash 4" and not attention.has_flash_4(device):
        pytest.skip("FlashAttention 4 is not installed, or this is no Hopper GPU")
    monkeypatch.setattr(attention, "has_flash_4", lambda device: kernel == "flash 4")
    borders = borders_of(queries, device), borders_of(keys, device)
    half = [x.requires_grad_() for x in random_rows(queries, keys, heads, dim, torch.bfloat16, device)]
    exact = [x.detach().double().requires_grad_() for x in half]
    out = attention.attend_varlen(*half, borders, (max(queries), max(keys)), dim**-0.5, window)
    wanted = written_out(*exact, borders, dim**-0.5, window)
    assert out.dtype == torch.bfloat16
    assert far(out, wanted) < 5e-3
    weights = torch.randn_like(out)
    ours, theirs = torch.autograd.grad(out, half, weights), torch.autograd.grad(wanted, exact, weights.double())
    for gradient, right in zip(ours, theirs, strict=True):
        assert far(gradient, right) < 1e-2
    moved = [queries[0] - 1, queries[1] + 1, *queries[2:]]
    shifted = [keys[0] - 1, keys[1] + 1, *keys[2:]]
    other = attention.attend_varlen(
        *half, (borders_of(moved, device), borders_of(shifted, device)), (max(moved), max(shifted)), dim**-0.5, window
    )
    assert far(other, wanted) > 5e-3


@pytest.mark.gpu
@on_gpu
def test_flash_4_compiles_nothing_for_other_lengths(monkeypatch):
    device = torch.device("cuda")
    if not attention.has_flash_4(device):
        pytest.skip("FlashAttention 4 is not installed, or this is no Hopper GPU")
    import cutlass.cute

    def step(lengths: list[int]) -> None:
        borders = borders_of(lengths, device), borders_of(lengths, device)
        rows = [x.requires_grad_() for x in random_rows(lengths, lengths, (16, 8), 128, torch.bfloat16, device)]
        attention.attend_varlen(*rows, borders, (max(lengths), max(lengths)), 0.1, None).sum().backward()

    for lengths in ([700, 20, 300], [9, 5]):  # there is another kernel for documents that all fit one block
        step(lengths)
    compiled: list[object] = []
    whole = cutlass.cute.compile
    monkeypatch.setattr(cutlass.cute, "compile", lambda *a, **k: compiled.append(a) or whole(*a, **k))
    for lengths in ([5], [1, 2, 1], [4096, 9], [40] * 50, [1000, 77, 3000, 1], [129, 128, 127]):
        step(lengths)
    assert not compiled
