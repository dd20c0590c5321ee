"""The GPU runner's kernels against plain loops; on a machine without a GPU they run where Triton can interpret them."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from meshrl.models.fp8 import FP8, in_8_bits
from meshrl.rollout.embedded import kernels
from meshrl.rollout.embedded.sampler import Settings, sample, step_keys
from meshrl.rollout.requests import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
HALF = torch.bfloat16 == DTYPE
pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="Triton's interpreter rounds to 8 bits otherwise, and knows no assembly"
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def pools_of(keys, values, scaled: bool) -> kernels.Pools:
    """Pools with these keys and values; in 8 bits, those that they are then are written back."""
    if not scaled:
        return kernels.Pools(keys, values)
    rounded = [in_8_bits(x) for x in (keys, values)]
    for x, (bits, scales) in zip((keys, values), rounded, strict=True):
        x.copy_(bits.float() * scales)
    (k, k_scales), (v, v_scales) = rounded
    return kernels.Pools(k, v, (k_scales[..., 0].contiguous(), v_scales[..., 0].log2()))


def plain(pools: kernels.Pools, name: str) -> torch.Tensor:
    pool = getattr(pools, name).float()
    if pools.scales is None:
        return pool
    return pool * (pools.scales[0] if name == "keys" else pools.scales[1].exp2())[..., None]


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize("window", [1 << 30, 7])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim"), [(5, 4, 2, 16), (3, 6, 1, 32), (70, 16, 8, 16)])
def test_paged_decode_attention(rows, heads, kv_heads, dim, window, scaled):
    size, most = 16, 4
    keys, values = (normal(rows * most, kv_heads, size, dim, seed=s) for s in (1, 2))
    if scaled:  # tokens' values are of different sizes
        values *= torch.logspace(-3, 0, size, device=DEVICE).to(DTYPE)[None, None, :, None]
    pools = pools_of(keys, values, scaled)
    query = normal(rows, heads, dim, seed=3)
    shuffled = torch.randperm(rows * most, generator=torch.Generator().manual_seed(4)).view(rows, most)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5))
    positions = torch.randint(0, size * most, (rows,), generator=torch.Generator().manual_seed(6))
    positions[1] = -1
    out = kernels.paged_decode(
        query, pools, shuffled.int().to(DEVICE), order.to(DEVICE), positions.to(DEVICE), 0.3, window
    ).float()
    for row in range(rows):
        blocks = shuffled[order[row]].to(DEVICE)
        end = int(positions[row]) + 1
        part = slice(max(0, end - window), end)
        k, v = (x[blocks].transpose(0, 1).flatten(1, 2).float()[:, part] for x in (keys, values))
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        wanted = ((query[row].float()[:, None] * k).sum(-1) * 0.3).softmax(-1)[:, :, None].mul(v).sum(1)
        wanted = wanted if end else torch.zeros_like(wanted)
        torch.testing.assert_close(out[row], wanted, rtol=0, atol=2e-2 if HALF else 1e-5)
        assert float((out[row] - wanted).norm()) <= (0.02 if HALF else 1e-4) * float(wanted.norm())


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize("norms", [True, False])
def test_rotating_and_storing(norms, scaled):
    tokens, heads, kv_heads, dim, size = 6, 3, 2, 16, 4
    qkv = normal(tokens, heads + 2 * kv_heads, dim)
    weights = (normal(dim, seed=1), normal(dim, seed=2)) if norms else None
    angles = torch.rand(tokens, dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    cos, sin = angles.cos().to(DEVICE, DTYPE), angles.sin().to(DEVICE, DTYPE)
    keys, values = (torch.zeros(5, kv_heads, size, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
    pools = pools_of(keys, values, scaled)
    slots = torch.tensor([0, 7, 8, 3, 19, 12], device=DEVICE)
    x = qkv.float()
    qk = x[:, : heads + kv_heads]
    if weights is not None:
        both = torch.cat([w.float().expand(n, -1) for w, n in zip(weights, (heads, kv_heads), strict=True)])
        qk = qk * (qk.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * both
    turned = torch.cat([-qk[..., dim // 2 :], qk[..., : dim // 2]], -1)
    qk = qk * cos.float()[:, None] + turned * sin.float()[:, None]
    value = x[:, heads + kv_heads :].clone()
    turning = kernels.Turning(weights, cos, sin, torch.arange(tokens, device=DEVICE), 1e-6)
    kernels.rotate_and_store(qkv, turning, pools, slots, heads)
    tolerance = 5e-2 if HALF else 1e-5
    torch.testing.assert_close(qkv[:, : heads + kv_heads].float(), qk, rtol=1e-2, atol=tolerance)
    found = kernels.stored(pools, slots, torch.float32)
    for ours, theirs in zip(found, (qkv[:, heads : heads + kv_heads].float(), value), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.0626 if scaled else 0, atol=0.01 if scaled else 0)
    assert int((pools.keys.float() != 0).any(-1).sum()) == tokens * kv_heads
    # The other way to store them, of any family.
    others = pools_of(torch.zeros_like(keys), torch.zeros_like(values), scaled)
    kernels.store(qkv[:, heads : heads + kv_heads], value.to(DTYPE), others, slots)
    for ours, theirs in zip(kernels.stored(others, slots, torch.float32), found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("norms", "scaled"), [(True, False), (False, False), pytest.param(True, True, marks=needs_gpu)]
)
@pytest.mark.parametrize("window", [1 << 30, 7])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim"), [(5, 4, 2, 16), (3, 6, 1, 32), (70, 16, 8, 16)])
def test_decoding_from_raw_products_is_turning_storing_and_decoding(rows, heads, kv_heads, dim, window, norms, scaled):
    """In one kernel or in two: the same pools to the bit but for the type's last place, the same attention."""
    size, most = 16, 4
    raw = normal(rows, heads + 2 * kv_heads, dim)
    weights = (normal(dim, seed=1), normal(dim, seed=2)) if norms else None
    angles = torch.rand(rows, dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    turning = kernels.Turning(
        weights, angles.cos().to(DEVICE, DTYPE), angles.sin().to(DEVICE, DTYPE),
        torch.randperm(rows, generator=torch.Generator().manual_seed(7)).to(DEVICE), 1e-6,
    )  # fmt: skip
    blocks = torch.randperm(rows * most, generator=torch.Generator().manual_seed(4)).view(rows, most)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5))
    positions = torch.randint(0, size * most, (rows,), generator=torch.Generator().manual_seed(6))
    positions[0] = 0  # nothing before it
    positions[2] = -1  # a place that nobody takes: into the block after the last
    slots = blocks[order, positions.clamp(min=0) // size] * size + positions % size
    slots[2] = rows * most * size
    where = [x.to(DEVICE) for x in (blocks.int(), order, positions)]
    pools = [
        pools_of(*(normal(rows * most + 1, kv_heads, size, dim, seed=s) for s in (8, 9)), scaled) for _ in range(2)
    ]
    found = kernels.paged_decode(
        raw[:, :heads], pools[0], *where, 0.3, window, (turning, slots.to(DEVICE))
    ).float()  # fmt: skip
    kernels.rotate_and_store(raw, turning, pools[1], slots.to(DEVICE), heads)
    wanted = kernels.paged_decode(raw[:, :heads], pools[1], *where, 0.3, window).float()
    tolerance = 0.15 if scaled else 8e-3 if HALF else 1e-6  # a number between two may be rounded to either
    for name in ("keys", "values"):
        one, other = (plain(pool, name)[:-1] for pool in pools)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0.02 if scaled else 1e-6)
        assert float((one != other).float().mean()) < (0.02 if HALF or scaled else 1)
    taken = positions >= 0
    # In 8 bits the newest token is seen before it is rounded by one, and after it by the other.
    torch.testing.assert_close(found[taken], wanted[taken], rtol=0, atol=0.12 if scaled else 2e-2 if HALF else 1e-5)


@needs_gpu
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_in_8_bits_the_size_of_values_does_not_matter(size):
    """Also where the newest token, which is not rounded, takes half of the attention."""
    rows, heads, kv_heads, dim, block, most = 6, 4, 2, 32, 16, 8
    raw = normal(rows, heads + 2 * kv_heads, dim)
    raw[:, heads : heads + kv_heads] = raw[:, :heads].view(rows, kv_heads, -1, dim).sum(2)  # it looks at itself
    raw[:, heads + kv_heads :] *= size
    keys, values = normal(rows * most, kv_heads, block, dim, seed=1), normal(rows * most, kv_heads, block, dim, seed=2)
    values *= size
    nothing = torch.zeros(1, dim, device=DEVICE, dtype=DTYPE)
    turning = kernels.Turning(None, nothing + 1, nothing, torch.zeros(rows, dtype=torch.long, device=DEVICE), 1e-6)
    table = torch.arange(rows * most, device=DEVICE).view(rows, most)
    positions = torch.tensor([block * most - 1 - at for at in range(rows)], device=DEVICE)
    slots = table.gather(1, (positions // block)[:, None])[:, 0] * block + positions % block
    where = table.int(), torch.arange(rows, device=DEVICE), positions
    found = [
        kernels.paged_decode(
            raw[:, :heads], pools_of(keys.clone(), values.clone(), scaled), *where, 0.2, 1 << 30, (turning, slots)
        ).float()
        for scaled in (False, True)
    ]
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.05


@pytest.mark.parametrize("parts", [1, 3])
def test_factors_of_rows(parts):
    """What a product leaves to be multiplied is, by every kernel that takes one."""
    rows, width = 5, 48
    factors = (torch.rand(rows, 1, generator=torch.Generator().manual_seed(9)) + 0.3).to(DEVICE)
    x, residual, weight = normal(parts, rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    given = x[0] if parts == 1 else x.float()
    total = residual.float() + (x.float().sum(0) * factors)
    wanted = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
    tolerance = 4e-2 if HALF else 1e-5
    out = kernels.add_and_norm(given, residual, weight, 1e-6, factors=factors)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=tolerance)
    torch.testing.assert_close(residual.float(), total, rtol=1e-2, atol=tolerance)
    both = normal(rows, 2 * width)
    gate, up = (both.float() * factors).chunk(2, -1)
    found = kernels.silu_and_multiply(both, factors=factors).float()
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=tolerance)
    # Queries, keys and values: as if the product had been multiplied before.
    qkv = normal(rows, 3 + 2 * 2, 16)
    angles = torch.rand(rows, 8, generator=torch.Generator().manual_seed(3)).repeat(1, 2).to(DEVICE)
    norms, order = (normal(16, seed=5), normal(16, seed=6)), torch.arange(rows, device=DEVICE)
    made = []
    for rows_of, left in ((qkv.clone(), factors), ((qkv.float() * factors[:, :, None]).to(DTYPE), None)):
        pools = kernels.Pools(*(torch.zeros(5, 2, 4, 16, device=DEVICE, dtype=DTYPE) for _ in range(2)))
        turning = kernels.Turning(norms, angles.cos().to(DTYPE), angles.sin().to(DTYPE), order, 1e-6, left)
        kernels.rotate_and_store(rows_of, turning, pools, order * 3, 3)
        made.append([rows_of, pools.keys, pools.values])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=tolerance)
    assert float((made[0][0] - qkv).abs().max()) > 0.1


@pytest.mark.parametrize("width", [32, 48])
def test_adding_and_norming(width):
    x, residual, weight = normal(5, width), normal(5, width, seed=1), normal(width, seed=2)
    total = (x + residual).float()
    wanted = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
    out = kernels.add_and_norm(x, residual, weight, 1e-6)
    tolerance = 3e-2 if HALF else 1e-5
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=tolerance)
    torch.testing.assert_close(residual.float(), total)
    again = kernels.add_and_norm(None, residual, weight, 1e-6)
    torch.testing.assert_close(again, out)
    parts = torch.stack([x.float() * share for share in (0.5, 0.25, 0.25)])
    in_parts = kernels.add_and_norm(parts, normal(5, width, seed=1), weight, 1e-6)
    torch.testing.assert_close(in_parts.float(), out.float(), rtol=1e-2, atol=tolerance)


def is_near(rows: kernels.Rows8, wanted: torch.Tensor) -> None:
    """Rounded to 8 bits: within half a step of three bits of each number, and of the smallest that there are."""
    assert rows.values.dtype == FP8
    assert rows.scales.shape == (len(wanted), 1)
    largest = wanted.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(rows.scales, largest / 448, rtol=1e-2, atol=0)
    error = (rows.values.float() * rows.scales - wanted).abs()
    assert bool((error <= 0.075 * wanted.abs() + largest / 448 / 512 + 1e-6).all())


@needs_gpu
@pytest.mark.parametrize("width", [32, 48])
def test_rows_in_8_bits(width):
    x, residual, weight = normal(5, width), normal(5, width, seed=1), normal(width, seed=2)
    is_near(kernels.rows_in_8_bits(x), x.float())
    plain = kernels.add_and_norm(x, residual.clone(), weight, 1e-6).float()
    is_near(kernels.add_and_norm(x, residual, weight, 1e-6, in_8_bits=True), plain)
    both = normal(5, 2 * width)
    is_near(kernels.silu_and_multiply(both, in_8_bits=True), kernels.silu_and_multiply(both).float())
    nothing = kernels.rows_in_8_bits(torch.zeros(2, width, device=DEVICE, dtype=DTYPE))
    assert not nothing.values.float().any()


def test_silu_and_multiply():
    x = normal(5, 2 * 40)
    gate, up = x.float().chunk(2, -1)
    tolerance = 3e-2 if HALF else 1e-5
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.silu_and_multiply(x).float(), wanted, rtol=1e-2, atol=tolerance)


def draw(logits: torch.Tensor, temperature: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    heat = torch.full((count,), temperature, dtype=torch.float64, device=DEVICE)
    tokens = torch.zeros(count, dtype=torch.long, device=DEVICE)
    log_probs = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    kernels.sample_rows(logits.expand(count, -1).contiguous(), keys, heat, tokens, log_probs)
    return tokens.cpu(), log_probs.cpu()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("vocabulary", [5, 100])
def test_tokens_are_drawn_from_the_soft_max(vocabulary, temperature):
    count = 20_000 if DEVICE == "cuda" else 60
    logits = normal(vocabulary) * 2
    tokens, log_probs = draw(logits, temperature, count)
    exact = (logits.double().cpu() / temperature).softmax(-1)
    torch.testing.assert_close(log_probs, exact.log()[tokens], rtol=1e-4, atol=1e-4)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    kept = exact * count > (5 if DEVICE == "cuda" else 0.5)
    deviations = (counts - exact * count)[kept] / (exact * count)[kept].sqrt()
    assert float(deviations.abs().max()) < 5
    statistic = float((deviations**2).sum())
    assert statistic < int(kept.sum()) + 5 * (2 * int(kept.sum())) ** 0.5


@pytest.mark.parametrize("vocabulary", [7, 2500, 5000])
def test_the_tokens_are_those_of_the_sampler(vocabulary):
    """The same numbers on the same cumulative sums as on a CPU, but for rounding."""
    count = 200 if DEVICE == "cuda" else 12
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE) * 3
    seeds, steps = np.arange(count, dtype=np.int64) * 977, np.arange(count, dtype=np.int64) % 5
    how = Settings.of([SamplingParams(4, temperature=0.8)] * count)
    wanted = sample(logits.cpu(), how, torch.from_numpy(seeds), torch.from_numpy(steps))
    tokens = torch.zeros(count, dtype=torch.long, device=DEVICE)
    log_probs = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    heat = torch.full((count,), 0.8, dtype=torch.float64, device=DEVICE)
    kernels.sample_rows(logits, torch.from_numpy(step_keys(seeds, steps)).to(DEVICE), heat, tokens, log_probs)
    same = tokens.cpu() == wanted.tokens
    assert int(same.sum()) >= count - 1
    torch.testing.assert_close(log_probs.cpu().float()[same], wanted.log_probs[same], rtol=1e-4, atol=1e-4)


def test_greedy_takes_the_likeliest():
    logits = normal(300)
    tokens, log_probs = draw(logits, 0.0, 5)
    assert tokens.tolist() == [int(logits.argmax())] * 5
    torch.testing.assert_close(log_probs, logits.double().cpu().log_softmax(-1).max().expand(5), rtol=1e-4, atol=1e-4)
