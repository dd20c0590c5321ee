# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803
"""Triton kernels of the GPU runner: paged decode attention, the small steps around matrix products, and sampling.

Keys and values lie in pools [blocks, kv_heads, block_size, dim]: a tile of one head's keys is one stretch of memory.
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

# Partial results of a row are worth computing apart when rows alone do not fill the processor.
WANTED_PROGRAMS = 512
MOST_SPLITS = 16


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may be set up while the one before it ends, where processor and driver can.

    It waits for that one itself, and before it waits reads only what is older than it.
    """
    can = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    if can:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        can = version.value >= 12030  # since then it may be part of recorded graphs
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def _turned(at, norm, cos, sin, d, inside, eps, D: tl.constexpr, NORM: tl.constexpr, AXIS: tl.constexpr):
    """The head at `at` (with `AXIS` 1: heads, [heads, 1]), normalised and rotated, in the memory's type."""
    kind = at.dtype.element_ty
    e = (d + D // 2) % D  # the element that each one is rotated with
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + e, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) / D + eps)
        x = (x * r).to(kind).to(tl.float32) * tl.load(norm + d).to(tl.float32)
        y = (y * r).to(kind).to(tl.float32) * tl.load(norm + e).to(tl.float32)
    y *= tl.where(d < D // 2, -1.0, 1.0)
    return (x * tl.load(cos + d).to(tl.float32) + y * tl.load(sin + d).to(tl.float32)).to(kind)


@triton.jit
def _decode_kernel(
    Q, KP, VP, OUT, PART, STAT, TABLE, ORDER, POSITION, scale, q_row, table_row, window,
    QN, KN, COS, SIN, ANGLE, SLOT, eps,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, RAW: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
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
    if RAW:  # queries as the product left them, followed by keys and values: the newest token's are stored here
        angle, slot = tl.load(ANGLE + b) * D, tl.load(SLOT + b)
        cos, sin = COS + angle, SIN + angle
        q = _turned(row + (h * group + g)[:, None] * D, QN, cos, sin, d[None, :], mask, eps, D, NORM, 1)
        new_k = _turned(row + (H + h) * D, KN, cos, sin, d, d < D, eps, D, NORM, 0)
        new_v = tl.load(row + (H + HK + h) * D + d)
        here = s == 0  # of a row's parts one has the newest token
        to = ((slot // BS * HK + h) * BS + slot % BS) * D + d
        tl.store(KP + to, new_k, mask=here)
        tl.store(VP + to, new_v, mask=here)
        own = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * (scale * 1.4426950408889634)
        m = tl.where(here, own, -1e30)
        total = tl.where(here, tl.full((GP,), 1.0, tl.float32), 0.0)
        acc = tl.where(here, tl.zeros((GP, DP), tl.float32) + new_v.to(tl.float32)[None, :], 0.0)
        length -= 1
    else:
        q = tl.load(row + (h * group + g)[:, None] * D + d[None, :], mask=mask, other=0.0)
        m = tl.full((GP,), -1e30, tl.float32)
        total = tl.zeros((GP,), tl.float32)
        acc = tl.zeros((GP, DP), tl.float32)
    tiles = tl.cdiv(length, N)
    each = tl.cdiv(tiles - first // N, SPLITS)
    begin = first // N + s * each
    end = tl.minimum(begin + each, tiles)
    for tile in range(begin, end):
        place = tile * N
        block = tl.load(table + place // BS).to(tl.int64)
        base = ((block * HK + h) * BS + place % BS) * D
        seen = (place + j < length) & (place + j >= first)
        inside = seen[:, None] & (d < D)[None, :]
        k = tl.load(KP + base + j[:, None] * D + d[None, :], mask=inside, other=0.0)
        v = tl.load(VP + base + j[:, None] * D + d[None, :], mask=inside, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        x = tl.where(seen[None, :], x, -1e30)
        new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - new[:, None])
        faded = tl.exp2(m - new)
        acc = acc * faded[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(p, 1)
        m = new
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
    """How queries and keys are normalised (`norms`) and rotated: token i by row `angles[i]` of cos and sin."""

    norms: tuple[Tensor, Tensor] | None
    cos: Tensor
    sin: Tensor
    angles: Tensor
    eps: float


def paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, order: Tensor, positions: Tensor, scale: float,
    window: int, raw: tuple[Turning, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one token a row, query [rows, heads, dim] (heads and dim contiguous), over the row's blocks.

    Row i has its blocks in `table[order[i]]` and looks at tokens 0 to `positions[i]` (-1: none), of those at the last
    `window`. Each key head serves `heads / kv_heads` query heads. With `raw`, its turning and slots, `query` is
    followed in memory by keys and values, as in `rotate_and_store`, whose work is done here, too (of a row without
    tokens the result is then its own value); dim must be a power of two, at least 16.
    """
    rows, heads, dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    out, part, stat, splits = _room_for_parts(rows, heads, kv_heads, dim, query)
    tile = min(block_size, DECODE["N"])
    if raw is None:
        more, norms = (query, query, query, query, query, order, 0.0), None
    else:
        if dim < 16 or dim & (dim - 1):
            raise ValueError(f"a head of {dim} cannot be taken as the product left it: not a power of two, or below 16")
        turning, slots = raw
        norms = turning.norms
        more = (*(norms or (query, query)), turning.cos, turning.sin, turning.angles, slots, turning.eps)
    _decode_kernel[(rows, kv_heads, splits)](
        query, keys, values, out, part, stat, table, order, positions, scale, query.stride(0), table.stride(0), window,
        *more, H=heads, HK=kv_heads, D=dim, BS=block_size, SPLITS=splits,
        GP=max(16, triton.next_power_of_2(heads // kv_heads)), DP=max(16, triton.next_power_of_2(dim)), N=tile,
        RAW=raw is not None, NORM=norms is not None,
        num_warps=DECODE["num_warps"], num_stages=DECODE["num_stages"], **early(query.device),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows * heads,)](
            part, stat, out, D=dim, SPLITS=splits, DP=triton.next_power_of_2(dim), **early(query.device)
        )
    return out


# On an H200 within 2 % of the fastest of tiles of 16 to 128 tokens, 1 to 8 warps and 1 to 5 stages (4.1 TB/s).
DECODE = {"N": 32, "num_warps": 1, "num_stages": 3}


def _room_for_parts(rows: int, heads: int, kv_heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The result, partial results and their statistics, and how many parts each row is cut into."""
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
def _turn_halves(at, norm, cos, sin, d, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads at `at` [heads, 1], normalised and rotated, as two halves [heads, D / 2] in the memory's type.

    Each element is read once, so that it may be written in place.
    """
    half: tl.constexpr = D // 2
    kind = at.dtype.element_ty
    x = tl.load(at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + half + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        x = (x * r).to(kind).to(tl.float32) * tl.load(norm + d)[None, :].to(tl.float32)
        y = (y * r).to(kind).to(tl.float32) * tl.load(norm + half + d)[None, :].to(tl.float32)
    cx, cy = tl.load(cos + d)[None, :].to(tl.float32), tl.load(cos + half + d)[None, :].to(tl.float32)
    sx, sy = tl.load(sin + d)[None, :].to(tl.float32), tl.load(sin + half + d)[None, :].to(tl.float32)
    return (x * cx - y * sx).to(kind), (y * cy + x * sy).to(kind)


@triton.jit
def _rotate_store_kernel(
    QKV, QN, KN, COS, SIN, ANGLE, KP, VP, SLOT, eps, row,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, HP: tl.constexpr, HKP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT + n)
    angle = tl.load(ANGLE + n) * D
    half: tl.constexpr = D // 2
    pool = (slot // BS * HK) * BS * D + slot % BS * D
    h, g, d, e = tl.arange(0, HP), tl.arange(0, HKP), tl.arange(0, half), tl.arange(0, D)
    queries, keys = (h < H)[:, None], (g < HK)[:, None]
    at = QKV + n * row + h[:, None] * D
    x, y = _turn_halves(at, QN, COS + angle, SIN + angle, d, queries, eps, D, NORM)
    tl.store(at + d[None, :], x, mask=queries)
    tl.store(at + half + d[None, :], y, mask=queries)
    at = QKV + n * row + (H + g)[:, None] * D
    x, y = _turn_halves(at, KN, COS + angle, SIN + angle, d, keys, eps, D, NORM)
    to = KP + pool + g[:, None] * BS * D + d[None, :]
    tl.store(at + d[None, :], x, mask=keys)
    tl.store(at + half + d[None, :], y, mask=keys)
    tl.store(to, x, mask=keys)
    tl.store(to + half, y, mask=keys)
    values = tl.load(QKV + n * row + (H + HK + g)[:, None] * D + e[None, :], mask=keys)
    tl.store(VP + pool + g[:, None] * BS * D + e[None, :], values, mask=keys)


def rotate_and_store(
    qkv: Tensor, turning: Turning, keys: Tensor, values: Tensor, slots: Tensor, heads: int
) -> None:  # fmt: skip
    """Normalises and rotates queries and keys of qkv [tokens, heads + 2 kv_heads, dim] in place; stores keys, values.

    `slots[i]` is the place of token i in the pools (block * block_size + offset).
    """
    tokens, _, dim = qkv.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    first, second = turning.norms or (qkv, qkv)
    _rotate_store_kernel[(tokens,)](
        qkv, first, second, turning.cos, turning.sin, turning.angles, keys, values, slots, turning.eps, qkv.stride(0),
        H=heads, HK=kv_heads, D=dim, BS=block_size, HP=triton.next_power_of_2(heads),
        HKP=triton.next_power_of_2(kv_heads), NORM=turning.norms is not None, num_warps=4,
    )  # fmt: skip


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Stores key and value [tokens, kv_heads, dim] in the pools at `slots`."""
    block_size = keys.shape[2]
    keys[slots // block_size, :, slots % block_size] = key
    values[slots // block_size, :, slots % block_size] = value


@triton.jit
def _add_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, eps, part, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
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
        r = (r.to(tl.float32) + x.to(r.dtype).to(tl.float32)).to(r.dtype)
        tl.store(RESIDUAL + n * C + c, r, mask=inside)
    x = r.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)).to(r.dtype).to(tl.float32)
    tl.store(OUT + n * C + c, (x * w).to(r.dtype), mask=inside)


def add_and_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x, or the sum of parts [parts, rows, width], to the residual in place; returns the residual's RMS norm."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    parts = 0 if x is None else len(x) if x.dim() == 3 else 1
    _add_norm_kernel[(rows,)](
        residual if x is None else x, residual, weight, out, eps, rows * width,
        C=width, CP=triton.next_power_of_2(width), PARTS=parts,
        num_warps=4 if width <= 4096 else 8, **early(residual.device),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(X, OUT, C, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    if EARLY:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(X + n * 2 * C + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + n * 2 * C + C + c, mask=inside, other=0.0)
    act = (gate / (1 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(OUT + n * C + c, (act * up.to(tl.float32)).to(up.dtype), mask=inside)


def silu_and_multiply(x: Tensor) -> Tensor:
    """silu(gate) * up of x [rows, gate and up]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(rows, triton.cdiv(width, block))](
        x, out, width, BLOCK=block, num_warps=4, **early(x.device)
    )  # fmt: skip
    return out


# Logits are summed up in stretches of this many; a program takes several.
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
    # The row's number in [0, 1), with 53 bits, on the cumulative sum: first the stretch, then the token.
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
    # Rounding may leave the number behind the stretch's end: then its last possible token.
    last = tl.max(tl.where(weights > 0, i, 0), 0)
    token = tl.where(heat == 0, tl.argmax(x, 0), tl.minimum(inner, last))
    found = tl.sum(tl.where(i == token, x, 0.0), 0)
    tl.store(TOKEN + b, (which * STRETCH + token).to(tl.int64))
    tl.store(LOG_PROB + b, (found - top - tl.log(total)).to(tl.float64))


def sample_rows(logits: Tensor, keys: Tensor, temperatures: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
    """Draws a token for each row of logits [rows, vocabulary] with the number in its key, as `sampler.draw` does.

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
