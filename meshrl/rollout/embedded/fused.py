"""The forward of plain decoder layers on a GPU, with kernels of our own between the matrix products of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrl.models.sight import Deep
from meshrl.rollout.embedded.fp8 import Rows8
from meshrl.rollout.embedded.kernels import (
    Turning,
    add_and_norm,
    rotate_and_store,
    rows_in_8_bits,
    silu_and_multiply,
)
from meshrl.rollout.embedded.layers import AnyProjection, Layer, PlainLayers, Projection
from meshrl.rollout.embedded.paged import PagedDecode, PagedPrefill


def can_fuse(plain: PlainLayers | None) -> bool:
    """Whether these layers have shapes that the kernels take."""
    return plain is not None and plain.dim & (plain.dim - 1) == 0 and plain.dim >= 16


# Products with few columns leave most of the processor idle: they are cut into parts along the sum, for so many rows.
SPLIT_ROWS, SPLIT_COLUMNS, PARTS = 256, 1024, 2


@dataclass(frozen=True)
class Product:
    """What the next kernel takes: rows [rows, columns], or float32 parts [parts, rows, columns] that it adds up.

    With `factors` it multiplies each row by its own.
    """

    values: Tensor
    factors: Tensor | None = None


def product(plain: PlainLayers, projection: AnyProjection, x: Tensor | Rows8) -> Product:
    """x times the weights."""
    if isinstance(projection, Projection):
        assert isinstance(x, Tensor)
        return Product(projection(x))
    rows = x if isinstance(x, Rows8) else rows_in_8_bits(x)
    # A bias is added, and ranks' parts are added up, when the factors are in.
    if projection.bias is None and plain.parallel is None:
        return Product(*projection.raw(rows))
    return Product(projection(rows))


def product_of_all(plain: PlainLayers, projection: AnyProjection, x: Tensor | Rows8) -> Product:
    """The same for a product that is added up over ranks; with few rows and columns it is made in parts."""
    if not isinstance(projection, Projection):
        made = product(plain, projection, x)
        return Product(plain.whole(made.values), made.factors)
    assert isinstance(x, Tensor)
    weight, bias = projection.weights[0], projection.biases[0]
    rows, inner = x.shape
    is_small = rows <= SPLIT_ROWS and len(weight) <= SPLIT_COLUMNS
    if not is_small or bias is not None or inner % (64 * PARTS) or x.dtype == torch.float32:
        return Product(plain.whole(projection(x)))
    halves = x.view(rows, PARTS, -1).transpose(0, 1), weight.view(len(weight), PARTS, -1).permute(1, 2, 0)
    return Product(plain.whole(torch.bmm(*halves, out_dtype=torch.float32)))


def _normed(plain: PlainLayers, added: Product | None, residual: Tensor, weight: Tensor, in_8_bits: bool) -> Any:
    """Adds to the residual in place; its norm, as the next product takes it."""
    values, factors = (None, None) if added is None else (added.values, added.factors)
    return add_and_norm(values, residual, weight, plain.eps, factors=factors, in_8_bits=in_8_bits)


def _attend(
    plain: PlainLayers,
    index: int,
    layer: Layer,
    made: Product,
    rotations: tuple[Tensor, Tensor, Tensor],
    context: PagedPrefill | PagedDecode,
) -> Tensor:
    """Attention from a product [tokens, heads + 2 kv_heads, dim] to [tokens, heads * dim]; stores keys and values."""
    qkv = made.values.view(len(made.values), -1, plain.dim)
    turning = Turning(layer.norms, *rotations, plain.eps, made.factors)
    if isinstance(context, PagedDecode):
        return context.attend_raw(index, qkv[:, : plain.heads], turning, plain.scaling, layer.window).flatten(1)
    rotate_and_store(qkv, turning, context.cache.of(index), context.slots, plain.heads)
    rotated = plain.heads + plain.kv_heads
    parts = qkv[:, : plain.heads], qkv[:, plain.heads : rotated], qkv[:, rotated:]
    q, k, v = (part.transpose(0, 1)[None] for part in parts)
    return context.attend_stored(index, q, k, v, plain.scaling, layer.window).reshape(len(qkv), -1)


def fused_hidden(
    plain: PlainLayers,
    residual: Tensor,
    positions: Tensor,
    context: PagedPrefill | PagedDecode,
    wanted: Tensor | None = None,
    deep: Deep | None = None,
) -> Tensor:
    """Hidden states [tokens, hidden] of embeddings, which it writes over; only of the `wanted` tokens where given.

    See `PlainLayers.__call__`.
    """
    assert deep is None or len(deep.vectors) < len(plain.layers)  # of the last layer only some tokens are left
    rotations = plain.rotations(residual, positions)
    in_8_bits = plain.in_8_bits
    added: Product | None = None
    for index, layer in enumerate(plain.layers):
        qkv = product(plain, layer.qkv, _normed(plain, added, residual, layer.norm_1, in_8_bits))
        mixed = _attend(plain, index, layer, qkv, rotations, context)
        if wanted is not None and index == len(plain.layers) - 1:
            mixed, residual = mixed[wanted], residual[wanted]
        added = product_of_all(plain, layer.out, mixed)
        if layer.gate_up is None or layer.down is None:
            added = Product(layer.experts(_normed(plain, added, residual, layer.norm_2, False)[None])[0])
        else:
            both = product(plain, layer.gate_up, _normed(plain, added, residual, layer.norm_2, in_8_bits))
            inner = silu_and_multiply(both.values, factors=both.factors, in_8_bits=in_8_bits)
            added = product_of_all(plain, layer.down, inner)
        if deep is not None:
            deep.add_to(residual, index)  # a sum with what was added just now, which the next norm completes
    return _normed(plain, added, residual, plain.decoder.norm.weight, False)
