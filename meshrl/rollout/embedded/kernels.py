# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803
"""Triton kernels of the GPU runner: paged decode attention, the small steps around matmuls, and sampling.

Keys and values are stored in pools `[blocks, kv_heads, block_size, dim]`, so a tile of one head's keys is contiguous in
memory. In FP8, each head of a token has its own scale (for values, the scale's logarithm to the base 2 is stored).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshrl.models.fp8 import FP8, Rows8, in_8_bits

# If the rows alone give fewer programs than this, each row is split into parts whose partial results are merged.
WANTED_PROGRAMS = 512
MOST_SPLITS = 16
NO_WINDOW = 1 << 30


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Return the options for programmatic dependent launch (PDL), if GPU and driver support it.

    A kernel with PDL may be set up while the previous kernel ends. The kernel itself waits for the previous kernel.
    Before the wait it may only read data that is older than the previous kernel.
    """
    can = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    if can:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        can = version.value >= 12030  # CUDA graphs may contain PDL since this version
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def _in_8_bits(x, AXIS: tl.constexpr):
    """Convert vectors along `AXIS` to FP8, and return the scale of each, which maps its largest element to 448."""
    scale = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), AXIS, keep_dims=True), 1e-10) / 448.0
    return (x.to(tl.float32) / scale).to(tl.float8e4nv), scale


@triton.jit
def _in_16_bits(x):
    """Convert FP8 to float16 directly. The compiler would first permute single bytes into the layout of a matmul."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [x.to(tl.uint8, bitcast=True)],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _turned(at, factor, norm, cos, sin, d, inside, eps, D: tl.constexpr, NORM: tl.constexpr, AXIS: tl.constexpr):
    """Return the head at `at` (with `AXIS` 1: heads, `[heads, 1]`), normalised and rotated, in the memory's dtype."""
    kind = at.dtype.element_ty
    e = (d + D // 2) % D  # the element that each element is rotated with
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32) * factor
    y = tl.load(at + e, mask=inside, other=0.0).to(tl.float32) * factor
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) / D + eps)
        x = (x * r).to(kind).to(tl.float32) * tl.load(norm + d).to(tl.float32)
        y = (y * r).to(kind).to(tl.float32) * tl.load(norm + e).to(tl.float32)
    y *= tl.where(d < D // 2, -1.0, 1.0)
    return (x * tl.load(cos + d).to(tl.float32) + y * tl.load(sin + d).to(tl.float32)).to(kind)


@triton.jit
def _tile(
    q, m, total, acc, KP, VP, KS, VS, start, seen, scale,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Do one step of attention over N tokens from place `start` of the pools on.

    With `MASKED`, only the `seen` tokens take part. The other tokens may belong to other sequences or may be NaN, so
    the masked load does not read them.
    """
    d, j = tl.arange(0, DP), tl.arange(0, N)
    at = start * D + j[:, None] * D + d[None, :]
    if MASKED or D != DP:
        inside = seen[:, None] & (d < D)[None, :]
        k, v = tl.load(KP + at, mask=inside, other=0.0), tl.load(VP + at, mask=inside, other=0.0)
    else:
        k, v = tl.load(KP + at), tl.load(VP + at)
    if SCALED:
        k, v = k.to(tl.float16), _in_16_bits(v)
        k_scale, v_scale = tl.load(KS + start + j, mask=seen, other=0.0), tl.load(VS + start + j, mask=seen, other=0.0)
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SCALED:
        # The stored logarithm of a value's scale is added to the logit, which multiplies the attention weight.
        x = x * (k_scale * (scale * 1.4426950408889634))[None, :] + v_scale[None, :]
    else:
        x = x * (scale * 1.4426950408889634)
    if MASKED:
        x = tl.where(seen[None, :], x, -1e30)
    new = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - new[:, None])
    faded = tl.exp2(m - new)
    acc = acc * faded[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    if SCALED:
        p = p * tl.exp2(-v_scale)[None, :]
    return new, total * faded + tl.sum(p, 1), acc


@triton.jit
def _start_of(tile, table, h, HK: tl.constexpr, BS: tl.constexpr, N: tl.constexpr):
    """Return where the tokens of a tile start in the pools, in tokens."""
    block = tl.load(table + tile * N // BS).to(tl.int64)
    return (block * HK + h) * BS + tile * N % BS


@triton.jit
def _decode_kernel(
    Q, KP, VP, KS, VS, OUT, PART, STAT, TABLE, ORDER, POSITION, scale, q_row, table_row, window,
    QN, KN, COS, SIN, ANGLE, FACTOR, SLOT, eps,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, RAW: tl.constexpr, NORM: tl.constexpr,
    FACTORS: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b, h, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // HK
    length = tl.load(POSITION + b).to(tl.int32) + 1
    first = tl.maximum(length - window, 0)
    table = TABLE + tl.load(ORDER + b) * table_row
    g, d, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, N)
    mask = (g < group)[:, None] & (d < D)[None, :]
    row = Q + b * q_row
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if RAW:  # queries as the matmul left them, followed by keys and values: the newest token's are stored here
        angle, slot = tl.load(ANGLE + b) * D, tl.load(SLOT + b)
        cos, sin = COS + angle, SIN + angle
        factor = tl.load(FACTOR + b) if FACTORS else 1.0
        q = _turned(row + (h * group + g)[:, None] * D, factor, QN, cos, sin, d[None, :], mask, eps, D, NORM, 1)
        new_k = _turned(row + (H + h) * D, factor, KN, cos, sin, d, d < D, eps, D, NORM, 0)
        new_v = tl.load(row + (H + HK + h) * D + d)
        if FACTORS:
            new_v = (new_v.to(tl.float32) * factor).to(new_v.dtype)
        here = s == 0  # only the first part of a row has the newest token
        to = (slot // BS * HK + h) * BS + slot % BS
        if SCALED:
            k8, new_k_scale = _in_8_bits(new_k, 0)
            v8, new_v_scale = _in_8_bits(new_v, 0)
            tl.store(KP + to * D + d, k8, mask=here)
            tl.store(VP + to * D + d, v8, mask=here)
            tl.store(KS + to + tl.arange(0, 1), new_k_scale, mask=here)
            tl.store(VS + to + tl.arange(0, 1), tl.log2(new_v_scale), mask=here)
        else:
            tl.store(KP + to * D + d, new_k, mask=here)
            tl.store(VP + to * D + d, new_v, mask=here)
        own = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * (scale * 1.4426950408889634)
        unit = tl.sum(new_v_scale, 0) if SCALED else 1.0  # as in `_tile`: attention weights are those of FP8 values
        m = tl.where(here, own + tl.log2(unit) if SCALED else own, -1e30)
        total = tl.where(here, tl.full((GP,), 1.0, tl.float32) / unit, 0.0)
        acc = tl.where(here, tl.zeros((GP, DP), tl.float32) + (new_v.to(tl.float32) / unit)[None, :], 0.0)
        length -= 1
    else:
        q = tl.load(row + (h * group + g)[:, None] * D + d[None, :], mask=mask, other=0.0)
        m = tl.full((GP,), -1e30, tl.float32)
        total = tl.zeros((GP,), tl.float32)
        acc = tl.zeros((GP, DP), tl.float32)
    if SCALED:
        q = q.to(tl.float16)  # FP8 converts to float16 in one instruction
    tiles = tl.cdiv(length, N)
    each = tl.cdiv(tiles - first // N, SPLITS)
    begin = first // N + s * each
    end = tl.minimum(begin + each, tiles)
    # Masks are only needed for the last tile, if it is not full, and for the tile in which a window begins.
    inner = begin
    if WINDOW:
        inner = tl.minimum(end, begin + (begin * N < first).to(tl.int32))
        for tile in tl.range(begin, inner, num_stages=1):
            seen = (tile * N + j < length) & (tile * N + j >= first)
            start = _start_of(tile, table, h, HK, BS, N)
            m, total, acc = _tile(q, m, total, acc, KP, VP, KS, VS, start, seen, scale, D, DP, N, True, SCALED)
    whole = tl.maximum(inner, tl.minimum(end, length // N))
    for tile in tl.range(inner, whole):
        start = _start_of(tile, table, h, HK, BS, N)
        m, total, acc = _tile(q, m, total, acc, KP, VP, KS, VS, start, j >= 0, scale, D, DP, N, False, SCALED)
    for tile in tl.range(whole, end, num_stages=1):
        start, seen = _start_of(tile, table, h, HK, BS, N), tile * N + j < length
        m, total, acc = _tile(q, m, total, acc, KP, VP, KS, VS, start, seen, scale, D, DP, N, True, SCALED)
    if SPLITS == 1:
        out = acc / tl.maximum(total, 1e-30)[:, None]
        at_out = (b * H + h * group + g)[:, None] * D + d[None, :]
        tl.store(OUT + at_out, out.to(OUT.dtype.element_ty), mask=mask)
    else:
        part = (b * H + h * group + g) * SPLITS + s
        tl.store(PART + part[:, None] * D + d[None, :], acc, mask=mask)
        tl.store(STAT + part * 2, m, mask=g < group)
        tl.store(STAT + part * 2 + 1, total, mask=g < group)


@triton.jit
def _merge_kernel(
    PART, STAT, OUT, D: tl.constexpr, SPLITS: tl.constexpr, DP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    s, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    m = tl.load(STAT + (row * SPLITS + s) * 2)
    total = tl.load(STAT + (row * SPLITS + s) * 2 + 1)
    weight = tl.exp2(m - tl.max(m, 0))
    at = (row * SPLITS + s)[:, None] * D + d[None, :]
    part = tl.load(PART + at, mask=(d < D)[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.maximum(tl.sum(total * weight, 0), 1e-30)
    tl.store(OUT + row * D + d, out.to(OUT.dtype.element_ty), mask=d < D)


@dataclass(frozen=True)
class Turning:
    """The normalisation (`norms`) and rotation of queries and keys. Token i uses row `angles[i]` of cos and sin.

    With `factors`, all values of token i must first be multiplied by `factors[i]`.
    """

    norms: tuple[Tensor, Tensor] | None
    cos: Tensor
    sin: Tensor
    angles: Tensor
    eps: float
    factors: Tensor | None = None


@dataclass(frozen=True)
class Pools:
    """Keys and values `[blocks, kv_heads, block_size, dim]`. FP8 has scales `[blocks, kv_heads, block_size]`."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def both_scales(self) -> tuple[Tensor, Tensor]:
        """The key and value scales, or unused tensors if the cache is not FP8."""
        return self.scales or (self.keys, self.values)


def paged_decode(
    query: Tensor, pools: Pools, table: Tensor, order: Tensor, positions: Tensor, scale: float, window: int,
    raw: tuple[Turning, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one token per row over the row's blocks.

    `query` is `[rows, heads, dim]`, contiguous in heads and dim. Row i has its blocks in `table[order[i]]` and attends
    to tokens 0 to `positions[i]` (-1: none), but at most to the last `window` of them. Each key head serves `heads /
    kv_heads` query heads.

    `raw` is a pair of a `Turning` and the slots of the new tokens. In this case `query` is followed in memory by keys
    and values, as in `rotate_and_store`, and this function also does that function's work. The result of a row without
    tokens is then the row's own value. dim must be a power of two, at least 16.
    """
    rows, heads, dim = query.shape
    _, kv_heads, block_size, _ = pools.keys.shape
    out, part, stat, splits = _room_for_parts(rows, heads, kv_heads, dim, query)
    tile = min(block_size, TILE)
    if raw is None:
        more, norms, factors = (query, query, query, query, query, query, order, 0.0), None, None
    else:
        if dim < 16 or dim & (dim - 1):
            raise ValueError(f"a head of {dim} cannot be taken as the product left it: not a power of two, or below 16")
        turning, slots = raw
        norms, factors = turning.norms, turning.factors
        given = factors if factors is not None else query
        more = (*(norms or (query, query)), turning.cos, turning.sin, turning.angles, given, slots, turning.eps)
    _decode_kernel[(rows, kv_heads, splits)](
        query, pools.keys, pools.values, *pools.both_scales, out, part, stat, table, order, positions, scale,
        query.stride(0), table.stride(0), window, *more, H=heads, HK=kv_heads, D=dim, BS=block_size, SPLITS=splits,
        GP=max(16, triton.next_power_of_2(heads // kv_heads)), DP=max(16, triton.next_power_of_2(dim)), N=tile,
        RAW=raw is not None, NORM=norms is not None, FACTORS=factors is not None,
        SCALED=pools.scales is not None, WINDOW=window < NO_WINDOW, **DECODE, **early(query.device),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows * heads,)](
            part, stat, out, D=dim, SPLITS=splits, DP=triton.next_power_of_2(dim), **early(query.device)
        )
    return out


# On an H200, within 2 % of the fastest among tiles of 16 to 128 tokens, 1 to 8 warps and 1 to 5 stages (4.1 TB/s).
TILE = 32
DECODE = {"num_warps": 1, "num_stages": 3}


def _room_for_parts(rows: int, heads: int, kv_heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Allocate the result, partial results and their statistics, and choose the number of parts per row."""
    out = torch.empty((rows, heads, dim), dtype=like.dtype, device=like.device)
    splits = 1
    while splits < MOST_SPLITS and rows * kv_heads * splits < WANTED_PROGRAMS:
        splits *= 2
    if splits == 1:
        return out, out, out, 1
    part = torch.empty(rows * heads * splits * dim, dtype=torch.float32, device=like.device)
    stat = torch.empty(rows * heads * splits * 2, dtype=torch.float32, device=like.device)
    return out, part, stat, splits


@triton.jit
def _turn_halves(at, factor, norm, cos, sin, d, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Normalise and rotate heads at `at` `[heads, 1]`; return two halves `[heads, D / 2]` in the memory's dtype.

    Each element is read once, so the result may be written in place.
    """
    half: tl.constexpr = D // 2
    kind = at.dtype.element_ty
    x = tl.load(at + d[None, :], mask=inside, other=0.0).to(tl.float32) * factor
    y = tl.load(at + half + d[None, :], mask=inside, other=0.0).to(tl.float32) * factor
    if NORM:
        r = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        x = (x * r).to(kind).to(tl.float32) * tl.load(norm + d)[None, :].to(tl.float32)
        y = (y * r).to(kind).to(tl.float32) * tl.load(norm + half + d)[None, :].to(tl.float32)
    cx, cy = tl.load(cos + d)[None, :].to(tl.float32), tl.load(cos + half + d)[None, :].to(tl.float32)
    sx, sy = tl.load(sin + d)[None, :].to(tl.float32), tl.load(sin + half + d)[None, :].to(tl.float32)
    return (x * cx - y * sx).to(kind), (y * cy + x * sy).to(kind)


@triton.jit
def _rotate_store_kernel(
    QKV, QN, KN, COS, SIN, ANGLE, FACTOR, KP, VP, KS, VS, SLOT, eps, row,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, HP: tl.constexpr, HKP: tl.constexpr,
    NORM: tl.constexpr, FACTORS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT + n)
    angle = tl.load(ANGLE + n) * D
    half: tl.constexpr = D // 2
    pool = slot // BS * HK * BS + slot % BS
    h, g, d, e = tl.arange(0, HP), tl.arange(0, HKP), tl.arange(0, half), tl.arange(0, D)
    queries, keys = (h < H)[:, None], (g < HK)[:, None]
    factor = tl.load(FACTOR + n) if FACTORS else 1.0
    at = QKV + n * row + h[:, None] * D
    x, y = _turn_halves(at, factor, QN, COS + angle, SIN + angle, d, queries, eps, D, NORM)
    tl.store(at + d[None, :], x, mask=queries)
    tl.store(at + half + d[None, :], y, mask=queries)
    at = QKV + n * row + (H + g)[:, None] * D
    x, y = _turn_halves(at, factor, KN, COS + angle, SIN + angle, d, keys, eps, D, NORM)
    to = pool + g[:, None] * BS
    tl.store(at + d[None, :], x, mask=keys)
    tl.store(at + half + d[None, :], y, mask=keys)
    at = QKV + n * row + (H + HK + g)[:, None] * D + e[None, :]
    values = tl.load(at, mask=keys, other=0.0)
    if FACTORS:
        values = (values.to(tl.float32) * factor).to(values.dtype)
        tl.store(at, values, mask=keys)
    if SCALED:
        largest = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True), tl.max(tl.abs(y), 1, keep_dims=True))
        k_scale = tl.maximum(largest.to(tl.float32), 1e-10) / 448.0
        x, y = (x.to(tl.float32) / k_scale).to(tl.float8e4nv), (y.to(tl.float32) / k_scale).to(tl.float8e4nv)
        values, v_scale = _in_8_bits(values, 1)
        tl.store(KS + to, k_scale, mask=keys)
        tl.store(VS + to, tl.log2(v_scale), mask=keys)
    tl.store(KP + to * D + d[None, :], x, mask=keys)
    tl.store(KP + to * D + half + d[None, :], y, mask=keys)
    tl.store(VP + to * D + e[None, :], values, mask=keys)


def rotate_and_store(qkv: Tensor, turning: Turning, pools: Pools, slots: Tensor, heads: int) -> None:
    """Normalise and rotate queries and keys of qkv `[tokens, heads + 2 kv_heads, dim]` in place; store keys and values.

    `slots[i]` is the place of token i in the pools (block * block_size + offset).
    """
    tokens, _, dim = qkv.shape
    kv_heads, block_size = pools.keys.shape[1], pools.keys.shape[2]
    first, second = turning.norms or (qkv, qkv)
    _rotate_store_kernel[(tokens,)](
        qkv, first, second, turning.cos, turning.sin, turning.angles,
        turning.factors if turning.factors is not None else qkv, pools.keys, pools.values, *pools.both_scales, slots,
        turning.eps, qkv.stride(0),
        H=heads, HK=kv_heads, D=dim, BS=block_size, HP=triton.next_power_of_2(heads),
        HKP=triton.next_power_of_2(kv_heads), NORM=turning.norms is not None,
        FACTORS=turning.factors is not None, SCALED=pools.scales is not None, num_warps=4,
    )  # fmt: skip


def store(key: Tensor, value: Tensor, pools: Pools, slots: Tensor) -> None:
    """Store key and value `[tokens, kv_heads, dim]` in the pools at `slots`, quantised if the pools are FP8."""
    block_size = pools.keys.shape[2]
    place = slots // block_size, slice(None), slots % block_size
    if pools.scales is None:
        pools.keys[place], pools.values[place] = key, value
        return
    for x, pool, scales in zip((key, value), _bits(pools), pools.scales, strict=True):
        rows, scale = in_8_bits(x)
        pool[place] = rows.view(torch.uint8)
        scales[place] = (scale if x is key else scale.log2())[..., 0]


def _bits(pools: Pools) -> tuple[Tensor, Tensor]:
    """Return FP8 keys and values viewed as integers, because torch cannot index FP8 tensors."""
    return pools.keys.view(torch.uint8), pools.values.view(torch.uint8)


def stored(pools: Pools, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read keys and values `[tokens, kv_heads, dim]` at `slots`, dequantised to `dtype` if the pools are FP8."""
    block_size = pools.keys.shape[2]
    place = slots // block_size, slice(None), slots % block_size
    if pools.scales is None:
        return pools.keys[place], pools.values[place]
    scales = pools.scales[0][place], pools.scales[1][place].exp2()
    key, value = (
        (pool[place].view(FP8).float() * scale[..., None]).to(dtype)
        for pool, scale in zip(_bits(pools), scales, strict=True)
    )
    return key, value


@triton.jit
def _add_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, SCALE, FACTOR, eps, part, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr,
    FACTORS: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)
    inside = c < C
    w = tl.load(WEIGHT + c, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    r = tl.load(RESIDUAL + n * C + c, mask=inside, other=0.0)
    if PARTS > 0:
        x = tl.load(X + n * C + c, mask=inside, other=0.0).to(tl.float32)
        for p in tl.static_range(1, PARTS):
            x += tl.load(X + p * part + n * C + c, mask=inside, other=0.0).to(tl.float32)
        if FACTORS:
            x *= tl.load(FACTOR + n)
        r = (r.to(tl.float32) + x.to(r.dtype).to(tl.float32)).to(r.dtype)
        tl.store(RESIDUAL + n * C + c, r, mask=inside)
    x = r.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)).to(r.dtype).to(tl.float32)
    _store_row((x * w).to(r.dtype), OUT, SCALE, n, c, C, SCALED)


@triton.jit
def _store_row(x, OUT, SCALE, n, c, C, SCALED: tl.constexpr):
    """Store row n. With `SCALED`, store it in FP8 with its scale."""
    if SCALED:
        x, scale = _in_8_bits(x, 0)
        tl.store(SCALE + n + tl.arange(0, 1), scale)
    tl.store(OUT + n * C + c, x, mask=c < C)


def _room_for_rows(rows: int, width: int, like: Tensor, in_8_bits: bool) -> tuple[Tensor, Tensor]:
    """Allocate rows and their FP8 scales. Without FP8, the second tensor is unused."""
    out = torch.empty(rows, width, dtype=FP8 if in_8_bits else like.dtype, device=like.device)
    return out, torch.empty(rows, 1, dtype=torch.float32, device=like.device) if in_8_bits else out


def add_and_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, *, factors: Tensor | None = None,
    in_8_bits: bool = False,
) -> Any:  # fmt: skip
    """Add x, or the sum of parts `[parts, rows, width]`, to the residual in place; return the residual's RMS norm.

    With `factors`, row i of x is first multiplied by `factors[i]`. The result is a tensor, or `Rows8` with `in_8_bits`.
    """
    rows, width = residual.shape
    out, scales = _room_for_rows(rows, width, residual, in_8_bits)
    parts = 0 if x is None else len(x) if x.dim() == 3 else 1
    _add_norm_kernel[(rows,)](
        residual if x is None else x, residual, weight, out, scales, out if factors is None else factors, eps,
        rows * width, C=width, CP=triton.next_power_of_2(width), PARTS=parts, FACTORS=factors is not None,
        SCALED=in_8_bits,
        num_warps=4 if width <= 4096 else 8, **early(residual.device),
    )  # fmt: skip
    return Rows8(out, scales) if in_8_bits else out


@triton.jit
def _silu_mul_kernel(
    X, OUT, SCALE, FACTOR, C, BLOCK: tl.constexpr, FACTORS: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    if EARLY:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(X + n * 2 * C + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + n * 2 * C + C + c, mask=inside, other=0.0)
    if FACTORS:
        factor = tl.load(FACTOR + n)
        gate *= factor
        up = (up.to(tl.float32) * factor).to(up.dtype)
    act = (gate / (1 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    _store_row((act * up.to(tl.float32)).to(up.dtype), OUT, SCALE, n, c, C, SCALED)


def silu_and_multiply(x: Tensor, *, factors: Tensor | None = None, in_8_bits: bool = False) -> Any:
    """Compute silu(gate) * up of x `[rows, gate and up]`. `factors` and the result are as in `add_and_norm`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out, scales = _room_for_rows(rows, width, x, in_8_bits)
    # A row's scale depends on the whole row, so with FP8 one program computes the whole row.
    block = triton.next_power_of_2(width) if in_8_bits else min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(rows, triton.cdiv(width, block))](
        x, out, scales, out if factors is None else factors, width, BLOCK=block, FACTORS=factors is not None,
        SCALED=in_8_bits, num_warps=max(4, min(block // 1024, 16)), **early(x.device),
    )  # fmt: skip
    return Rows8(out, scales) if in_8_bits else out


@triton.jit
def _rows_kernel(X, OUT, SCALE, C, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    _store_row(tl.load(X + n * C + c, mask=c < C, other=0.0), OUT, SCALE, n, c, C, True)


def rows_in_8_bits(x: Tensor) -> Rows8:
    """Quantise contiguous rows to FP8 in one pass, as `in_8_bits` does."""
    rows, width = x.shape
    out, scales = _room_for_rows(rows, width, x, True)
    block = triton.next_power_of_2(width)
    _rows_kernel[(rows,)](
        x, out, scales, width, BLOCK=block, num_warps=max(4, min(block // 1024, 16)), **early(x.device)
    )  # fmt: skip
    return Rows8(out, scales)


# Logits are summed in stretches of this many. A program sums several stretches.
STRETCH, STRETCHES = 1024, 4


@triton.jit
def _sums_kernel(LOGITS, HEAT, TOP, SUM, V, row, count, STRETCH: tl.constexpr, STRETCHES: tl.constexpr):
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(HEAT + b).to(tl.float32)
    cold = tl.where(heat == 0, 1.0, 1 / heat)
    stretch = s * STRETCHES + tl.arange(0, STRETCHES)
    at = stretch[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    x = tl.load(LOGITS + b * row + at, mask=at < V, other=-float("inf")).to(tl.float32) * cold
    top = tl.maximum(tl.max(x, 1), -1e30)
    total = tl.sum(tl.exp2((x - top[:, None]) * 1.4426950408889634), 1)
    tl.store(TOP + b * count + stretch, top, mask=stretch < count)
    tl.store(SUM + b * count + stretch, total, mask=stretch < count)


@triton.jit
def _choose_kernel(
    LOGITS, HEAT, KEY, TOP, SUM, TOKEN, LOG_PROB, V, row, count, STRETCH: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    heat = tl.load(HEAT + b).to(tl.float32)
    cold = tl.where(heat == 0, 1.0, 1 / heat)
    c, i = tl.arange(0, COUNT), tl.arange(0, STRETCH)
    tops = tl.load(TOP + b * count + c, mask=c < count, other=-1e30)
    top = tl.max(tops, 0)
    sums = tl.load(SUM + b * count + c, mask=c < count, other=0.0) * tl.exp(tops - top)
    total = tl.sum(sums, 0)
    # Select by the row's number in [0, 1), which has 53 bits, on the cumulative sum: first the stretch, then the token.
    u = ((tl.load(KEY + b) >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    upto = tl.cumsum(sums.to(tl.float64), 0)
    point = u * tl.max(upto, 0)
    which = tl.sum((upto <= point).to(tl.int32), 0)
    which = tl.where(heat == 0, tl.argmax(tops, 0), tl.minimum(which, count - 1))
    before = tl.sum(tl.where(c < which, sums.to(tl.float64), 0.0), 0)
    at = which * STRETCH + i
    x = tl.load(LOGITS + b * row + at, mask=at < V, other=-float("inf")).to(tl.float32) * cold
    weights = tl.exp(x - top).to(tl.float64)
    inner = tl.sum((tl.cumsum(weights, 0) + before <= point).to(tl.int32), 0)
    # Rounding may put the number after the stretch's end. In this case take the stretch's last possible token.
    last = tl.max(tl.where(weights > 0, i, 0), 0)
    token = tl.where(heat == 0, tl.argmax(x, 0), tl.minimum(inner, last))
    found = tl.sum(tl.where(i == token, x, 0.0), 0)
    tl.store(TOKEN + b, (which * STRETCH + token).to(tl.int64))
    tl.store(LOG_PROB + b, (found - top - tl.log(total)).to(tl.float64))


def sample_rows(logits: Tensor, keys: Tensor, temperatures: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
    """Sample a token for each row of logits `[rows, vocabulary]` with the number in the row's key, as `sampler.draw`.

    Writes tokens (int64) and log-probs (float64) at the row's temperature (float64; 0: the likeliest token).
    """
    rows, vocabulary = logits.shape
    count = triton.cdiv(vocabulary, STRETCH)
    tops, sums = torch.empty(2, rows, count, dtype=torch.float32, device=logits.device)
    _sums_kernel[(rows, triton.cdiv(count, STRETCHES))](
        logits, temperatures, tops, sums, vocabulary, logits.stride(0), count,
        STRETCH=STRETCH, STRETCHES=STRETCHES, num_warps=4,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, temperatures, keys, tops, sums, tokens, log_probs, vocabulary, logits.stride(0), count,
        STRETCH=STRETCH, COUNT=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
