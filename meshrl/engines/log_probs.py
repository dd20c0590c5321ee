"""From hidden states to log-probs and entropy, without ever holding `tokens × vocabulary` in float32.

The output projection, the soft-max and their gradients run over chunks of tokens. The forward pass keeps two numbers a
token and, up to a limit, the logits in their 16-bit type; beyond it the backward pass computes each chunk's logits
again: one matrix product more, and the memory saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.config.families import UNSCALED, LogitScaling

# How many logits a chunk holds at most. On a GPU a chunk must be large enough to keep the matrix units busy.
CHUNK_ELEMENTS = 1 << 25
CHUNK_ELEMENTS_ON_GPU = 1 << 29


def tokens_per_chunk(vocab_size: int, on_gpu: bool = False) -> int:
    """How many tokens' logits fit a chunk."""
    return max(1, (CHUNK_ELEMENTS_ON_GPU if on_gpu else CHUNK_ELEMENTS) // vocab_size)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    keep_bytes: int = 0,
    scaling: LogitScaling = UNSCALED,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [tokens] and entropies, for logits `scaled(hidden @ weight.T + bias) / temperature`.

    `scaling` is what the model's family does to the product of its head. Both results are float32 [tokens] and
    differentiable in hidden, weight and bias. Logits of a 16-bit type that take at most `keep_bytes` wait for the
    backward pass instead of being computed twice.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden must be [tokens, dim] and targets [tokens], got {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to compute log-probs, got {temperature}")
    divisor, limit = _divisor_and_limit(temperature, scaling)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, divisor, limit, with_entropy, keep_bytes)
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def linear_sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scaling: LogitScaling = UNSCALED,
) -> Tensor:
    """The sum over the vocabulary of p^2, float32 [tokens], for the logits of `linear_log_probs`."""
    divisor, limit = _divisor_and_limit(temperature, scaling)
    sums = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    step = tokens_per_chunk(weight.shape[0], hidden.is_cuda)
    for i in range(0, hidden.shape[0], step):
        logits = tempered(F.linear(hidden[i : i + step], weight, bias), divisor, limit)
        sums[i : i + step] = logits.log_softmax(-1).mul_(2).exp_().sum(-1)
    return sums


def _divisor_and_limit(temperature: float, scaling: LogitScaling) -> tuple[float, float | None]:
    """What the head's product is divided by, and the soft cap behind the division: both with the temperature."""
    return temperature / scaling.factor, None if scaling.cap is None else scaling.cap / temperature


def tempered(logits: Tensor, divisor: float, limit: float | None) -> Tensor:
    """Logits in float32, divided and then soft-capped: a new tensor."""
    logits = logits.float() / divisor
    return logits if limit is None else logits.div_(limit).tanh_().mul_(limit)


def chunk_outputs(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum, log-prob of the target, and entropy (or nothing) of each row of logits."""
    logits = tempered(logits, temperature, limit)
    log_sum = logits.logsumexp(-1)
    log_prob = logits.gather(-1, targets[:, None])[:, 0] - log_sum
    if not with_entropy:
        return log_sum, log_prob, log_sum[:0]
    # Not log-sum minus mean logit: that difference of large numbers loses digits.
    log_p = logits - log_sum[:, None]
    return log_sum, log_prob, -(log_p.exp() * log_p).sum(-1)


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
    """The gradient with respect to the logits, in their own type; a target may lie outside of a rank's own columns."""
    scaled = tempered(logits, temperature, limit)
    log_p = scaled - log_sum[:, None]
    probs = log_p.exp()
    grad = torch.zeros_like(probs)
    if grad_log_prob is not None:
        columns = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
        is_target = columns == targets[:, None].int()
        grad = (is_target.float() - probs) * grad_log_prob[:, None]
    if grad_entropy is not None:
        # d entropy / d logit = -p (log p + entropy)
        grad = grad - probs * (log_p + entropy[:, None]) * grad_entropy[:, None]
    if limit is not None:
        grad = grad * (1 - (scaled / limit).square())
    return (grad / temperature).to(logits.dtype)


def chunk_functions(on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`chunk_outputs` and `chunk_gradient`, or the GPU's kernels for them, which write the gradient over the logits."""
    if not on_gpu:
        return chunk_outputs, chunk_gradient
    from meshrl.engines import log_prob_kernels as kernels

    return kernels.chunk_outputs, kernels.chunk_gradient


def _weight_gradient(grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """The product in float32, so that chunks add up without loss."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(grad_logits.t(), hidden, out_dtype=torch.float32)
    return grad_logits.t() @ hidden


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        limit: float | None,
        with_entropy: bool,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        size = hidden.element_size()
        keeps = size == 2 and any(ctx.needs_input_grad) and n * weight.shape[0] * size <= keep_bytes
        # An attribute, not a saved tensor: activation offload must not carry it to the host.
        ctx.kept = {}
        # What is kept anyway needs no chunks.
        ctx.step = step = n if keeps and n else tokens_per_chunk(weight.shape[0], hidden.is_cuda)
        log_sums, log_probs = (hidden.new_empty(n, dtype=torch.float32) for _ in range(2))
        entropy = hidden.new_empty(n if with_entropy else 0, dtype=torch.float32)
        outputs_of, _ = chunk_functions(hidden.is_cuda)
        for i in range(0, n, step):
            part = slice(i, i + step)
            logits = F.linear(hidden[part], weight, bias)
            outputs = outputs_of(logits, targets[part], temperature, with_entropy, limit)
            log_sums[part], log_probs[part] = outputs[:2]
            if keeps:
                ctx.kept[i] = logits
            if with_entropy:
                entropy[part] = outputs[2]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        ctx.temperature, ctx.limit = temperature, limit
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropy = ctx.saved_tensors
        n, step = hidden.shape[0], ctx.step
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # A rank without tokens still owes its peers a gradient of zeros.
        grad_weight = None if n > 0 else torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        _, gradient_of = chunk_functions(hidden.is_cuda)
        for i in range(0, n, step):
            part = slice(i, i + step)
            grads = [None if g is None else g[part] for g in grad_outputs]  # None where the loss does not use it
            logits = ctx.kept.pop(i, None)
            if logits is None:
                logits = F.linear(hidden[part], weight, bias)
            grad = gradient_of(logits, targets[part], log_sums[part], entropy[part], *grads, ctx.temperature, ctx.limit)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                product = grad.t() @ hidden if step >= n else _weight_gradient(grad, hidden[part])
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *([None] * 5),
        )
