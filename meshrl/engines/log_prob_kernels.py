"""Two GPU kernels from logits to log-probs: each reads the 16-bit logits once and keeps float32 only in registers.

The gradient is written over the logits, so that there is no second `tokens × vocabulary` buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK = 4096
BACKWARD_BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _tempered(logits, inverse_temperature, limit, with_limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return logits in float32, multiplied by the inverse temperature and soft-capped if there is a limit."""
    x = logits.to(tl.float32) * inverse_temperature
    if with_limit:
        x = limit * (2.0 * tl.sigmoid(2.0 * x / limit) - 1.0)
    return x


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    logits, targets, log_sums, log_probs, entropies, vocab, inverse_temperature, limit,
    with_entropy: tl.constexpr, with_limit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Process one row per program: running maximum, sum of exponentials and, for the entropy, their mean logit."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab
    largest = -float("inf")
    total = 0.0
    weighted = 0.0  # sum of exp(x - largest) * (x - largest)
    for first in range(0, vocab, block):
        columns = first + tl.arange(0, block)
        inside = columns < vocab
        x = _tempered(tl.load(start + columns, mask=inside, other=0.0), inverse_temperature, limit, with_limit)
        x = tl.where(inside, x, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(largest == -float("inf"), 0.0, largest - new_largest)
        scale = tl.exp(shift)
        e = tl.exp(x - new_largest)
        if with_entropy:
            terms = tl.where(inside & (e > 0), e * (x - new_largest), 0.0)
            weighted = scale * (weighted + shift * total) + tl.sum(terms, 0)
        total = scale * total + tl.sum(e, 0)
        largest = new_largest
    log_sum = largest + tl.log(total)
    chosen = _tempered(tl.load(start + tl.load(targets + row)), inverse_temperature, limit, with_limit)
    tl.store(log_sums + row, log_sum)
    tl.store(log_probs + row, chosen - log_sum)
    if with_entropy:
        tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits, targets, log_sums, entropies, grad_log_probs, grad_entropies, vocab, inverse_temperature, limit,
    with_log_prob: tl.constexpr, with_entropy: tl.constexpr, with_limit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write d loss / d logit over each logit."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < vocab
    place = logits + row * vocab + columns
    x = _tempered(tl.load(place, mask=inside, other=0.0), inverse_temperature, limit, with_limit)
    log_p = x - tl.load(log_sums + row)
    p = tl.exp(log_p)
    grad = tl.zeros([block], tl.float32)
    if with_log_prob:
        hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
        grad += tl.load(grad_log_probs + row) * (hit - p)
    if with_entropy:
        grad -= tl.load(grad_entropies + row) * p * (log_p + tl.load(entropies + row))
    if with_limit:
        grad *= 1.0 - (x / limit) * (x / limit)
    tl.store(place, (grad * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def chunk_outputs(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the target's log-prob and the entropy of each row of logits.

    The entropy is an empty tensor unless `with_entropy`.
    """
    rows, vocab = logits.shape
    log_sums, log_probs = (torch.empty(rows, device=logits.device) for _ in range(2))
    entropy = torch.empty(rows if with_entropy else 0, device=logits.device)
    if rows:
        _forward[(rows,)](
            logits, targets, log_sums, log_probs, entropy, vocab, 1.0 / temperature, limit or 1.0, with_entropy,
            limit is not None, FORWARD_BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return log_sums, log_probs, entropy


def chunk_gradient(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    limit: float | None = None,
) -> Tensor:
    """Return the gradient with respect to the logits, written into the memory of the logits."""
    rows, vocab = logits.shape
    grads = [None if g is None else g.contiguous() for g in (grad_log_prob, grad_entropy)]
    if rows:
        _backward[(rows, triton.cdiv(vocab, BACKWARD_BLOCK))](
            logits, targets, log_sum, entropy, *(log_sum if g is None else g for g in grads), vocab, 1.0 / temperature,
            limit or 1.0, grads[0] is not None, grads[1] is not None, limit is not None, BACKWARD_BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return logits
