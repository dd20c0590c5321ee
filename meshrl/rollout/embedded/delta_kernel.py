# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803
"""A Triton kernel for decoding gated delta nets: one token per row. Each state is read and written once, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshrl.parallel.linear_attention import EPSILON, DeltaRule, States

CHANNELS_A_PROGRAM = 512
VALUES_A_PROGRAM = 32


@triton.jit
def _convolve(
    channels, weight, recent, order, out, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out = SiLU of the convolution that ends with these channels, and shift `recent` by one token."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(order + at)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < count
    now = tl.load(channels + at * count + places, mask=is_there, other=0)
    kept = recent + row * (WIDTH - 1) * count + places
    total = now.to(tl.float32) * tl.load(weight + places * WIDTH + WIDTH - 1, mask=is_there, other=0).to(tl.float32)
    for i in tl.static_range(WIDTH - 1):
        before = tl.load(kept + i * count, mask=is_there, other=0)
        total += before.to(tl.float32) * tl.load(weight + places * WIDTH + i, mask=is_there, other=0).to(tl.float32)
        if i > 0:
            tl.store(kept + (i - 1) * count, before, mask=is_there)
    tl.store(kept + (WIDTH - 2) * count, now, mask=is_there)
    tl.store(out + at * count + places, total * tl.sigmoid(total), mask=is_there)


@triton.jit
def _step(
    mixed, decay, rate, memory, order, out, key_heads, value_heads, scale, epsilon,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Apply the delta rule to a block of values of one head of one row."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(order + at)
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    key_head = head // (value_heads // key_heads)
    own = mixed + at * (2 * key_heads * KEY_DIM + value_heads * VALUE_DIM)
    query = tl.load(own + key_head * KEY_DIM + keys, mask=is_key, other=0).to(tl.float32)
    key = tl.load(own + (key_heads + key_head) * KEY_DIM + keys, mask=is_key, other=0).to(tl.float32)
    value = tl.load(own + 2 * key_heads * KEY_DIM + head * VALUE_DIM + values, mask=is_value, other=0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + epsilon) * scale
    key = key * tl.rsqrt(tl.sum(key * key, 0) + epsilon)
    fade = tl.exp(tl.load(decay + at * value_heads + head).to(tl.float32))
    share = tl.load(rate + at * value_heads + head).to(tl.float32)
    place = memory + ((row * value_heads + head) * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    is_there = is_key[:, None] & is_value[None, :]
    state = tl.load(place, mask=is_there, other=0) * fade
    change = (value - tl.sum(state * key[:, None], 0)) * share
    state += key[:, None] * change[None, :]
    tl.store(place, state, mask=is_there)
    tl.store(out + (at * value_heads + head) * VALUE_DIM + values, tl.sum(state * query[:, None], 0), mask=is_value)


def recur_rows(rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor, states: States, order: Tensor) -> Tensor:
    """Compute one token for each of the rows `order` and update their states in place; see `DeltaRule.step`."""
    channels, decay, rate = channels.contiguous(), decay.contiguous(), rate.contiguous()
    rows, count = channels.shape
    mixed = torch.empty_like(channels)
    grid = rows, triton.cdiv(count, CHANNELS_A_PROGRAM)
    _convolve[grid](
        channels, rule.conv.contiguous(), states.recent, order, mixed, count, rule.width, CHANNELS_A_PROGRAM
    )
    out = channels.new_empty(rows, rule.value_heads, rule.value_dim)
    values = min(VALUES_A_PROGRAM, triton.next_power_of_2(rule.value_dim))
    _step[rows, rule.value_heads, triton.cdiv(rule.value_dim, values)](
        mixed, decay, rate, states.memory, order, out, rule.key_heads, rule.value_heads, rule.key_dim**-0.5, EPSILON,
        rule.key_dim, rule.value_dim, triton.next_power_of_2(rule.key_dim), values,
    )  # fmt: skip
    return out
