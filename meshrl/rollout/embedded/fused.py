"""The forward of plain decoder layers on a GPU, with kernels of our own between the matrix products of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.rollout.embedded.kernels import Turning, add_and_norm, rotate_and_store, silu_and_multiply
from meshrl.rollout.embedded.layers import Layer, PlainLayers, Projection
from meshrl.rollout.embedded.paged import PagedDecode, PagedPrefill


def can_fuse(plain: PlainLayers | None) -> bool:
    """Whether these layers have shapes that the kernels take."""
    return plain is not None and plain.dim & (plain.dim - 1) == 0 and plain.dim >= 16


# Products with few columns leave most of the processor idle: they are cut into parts along the sum, for so many rows.
SPLIT_ROWS, SPLIT_COLUMNS, PARTS = 256, 1024, 2


def product(projection: Projection, x: Tensor) -> Tensor:
    """x times the weights; for few rows and columns as float32 parts [parts, rows, columns] that remain to be added."""
    weight, bias = projection.weights[0], projection.biases[0]
    rows, inner = x.shape
    is_small = rows <= SPLIT_ROWS and len(weight) <= SPLIT_COLUMNS
    if not is_small or bias is not None or inner % (64 * PARTS) or x.dtype == torch.float32:
        return projection(x)
    halves = x.view(rows, PARTS, -1).transpose(0, 1), weight.view(len(weight), PARTS, -1).permute(1, 2, 0)
    return torch.bmm(*halves, out_dtype=torch.float32)


def _attend(
    plain: PlainLayers,
    index: int,
    layer: Layer,
    qkv: Tensor,
    rotations: tuple[Tensor, Tensor, Tensor],
    context: PagedPrefill | PagedDecode,
) -> Tensor:
    """Attention from qkv [tokens, heads + 2 kv_heads, dim] to [tokens, heads * dim]; keys and values are stored."""
    turning = Turning(layer.norms, *rotations, plain.eps)
    if isinstance(context, PagedDecode):
        return context.attend_raw(index, qkv[:, : plain.heads], turning, plain.scaling, layer.window).flatten(1)
    rotate_and_store(qkv, turning, *context.cache.of(index), context.slots, plain.heads)
    rotated = plain.heads + plain.kv_heads
    parts = qkv[:, : plain.heads], qkv[:, plain.heads : rotated], qkv[:, rotated:]
    q, k, v = (part.transpose(0, 1)[None] for part in parts)
    return context.attend_stored(index, q, k, v, plain.scaling, layer.window).reshape(len(qkv), -1)


def fused_hidden(
    plain: PlainLayers,
    ids: Tensor,
    positions: Tensor,
    context: PagedPrefill | PagedDecode,
    wanted: Tensor | None = None,
) -> Tensor:
    """Hidden states [tokens, hidden], only of the `wanted` tokens where given; see `PlainLayers.__call__`."""
    model = plain.hf_model.model
    residual = plain.embedded(ids)
    cos, sin, angles = plain.rotations(residual, positions)
    x: Tensor | None = None
    for index, layer in enumerate(plain.layers):
        h = add_and_norm(x, residual, layer.norm_1, plain.eps)
        qkv = layer.qkv(h).view(len(ids), -1, plain.dim)
        mixed = _attend(plain, index, layer, qkv, (cos, sin, angles), context)
        if wanted is not None and index == len(plain.layers) - 1:
            mixed, residual = mixed[wanted], residual[wanted]
        x = plain.whole(product(layer.out, mixed))
        h = add_and_norm(x, residual, layer.norm_2, plain.eps)
        if layer.gate_up is None or layer.down is None:
            x = layer.experts(h[None])[0]
        else:
            x = plain.whole(product(layer.down, silu_and_multiply(layer.gate_up(h))))
    return add_and_norm(x, residual, model.norm.weight, plain.eps)
