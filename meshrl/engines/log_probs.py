"""From hidden states to log-probs and entropy, without ever holding `tokens × vocabulary` in float32.

The output projection, the soft-max and their gradients run over chunks of tokens. The forward pass keeps only two
numbers a token; the backward pass computes each chunk's logits again: one matrix product more, and the memory saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A chunk holds at most this many float32 logits (128 MiB).
CHUNK_ELEMENTS = 1 << 25


def tokens_per_chunk(vocab_size: int) -> int:
    """How many tokens' logits fit a chunk."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [tokens] and entropies, for logits `(hidden @ weight.T + bias) / temperature`.

    Both results are float32 [tokens] and differentiable in hidden, weight and bias.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden must be [tokens, dim] and targets [tokens], got {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to compute log-probs, got {temperature}")
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        log_probs, log_sums = hidden.new_empty(n, dtype=torch.float32), hidden.new_empty(n, dtype=torch.float32)
        entropy = hidden.new_empty(n if with_entropy else 0, dtype=torch.float32)
        step = tokens_per_chunk(weight.shape[0])
        for i in range(0, n, step):
            part = slice(i, i + step)
            logits = _chunk_logits(hidden[part], weight, bias, temperature)
            log_sums[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None])[:, 0] - log_sums[part]
            if with_entropy:
                # Not log-sum minus mean logit: that difference of large numbers loses digits.
                log_p = logits.sub_(log_sums[part, None])
                entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grad_outputs  # None for an output that the loss does not use
        hidden, weight, bias, targets, log_sums, entropy = ctx.saved_tensors
        n, step = hidden.shape[0], tokens_per_chunk(weight.shape[0])
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Several chunks add up in float32; a rank without tokens still owes its peers a gradient of zeros.
        grad_weight = None if 0 < n <= step else torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for i in range(0, n, step):
            part = slice(i, i + step)
            logits = _chunk_logits(hidden[part], weight, bias, ctx.temperature)
            log_p = logits.sub_(log_sums[part, None])
            probs = log_p.exp()
            grad = torch.zeros_like(probs) if grad_log_probs is None else probs * -grad_log_probs[part, None]
            if grad_entropy is not None:
                # d entropy / d logit = -p (log p + entropy)
                grad -= probs.mul_(log_p.add_(entropy[part, None])).mul_(grad_entropy[part, None])
            if grad_log_probs is not None:
                grad.scatter_add_(1, targets[part, None], grad_log_probs[part, None])
            grad = (grad.div_(ctx.temperature) if ctx.temperature != 1.0 else grad).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                product = grad.t() @ hidden[part]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
