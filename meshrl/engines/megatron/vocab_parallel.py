"""Log-probs and entropy where every rank holds a part of the vocabulary.

As in `meshrl.engines.packed_model`, logits exist for a chunk of tokens at a time, here only those of a rank's own part.
A token's soft-max needs three numbers of each rank: its largest logit, and two sums relative to it. They are exchanged
once for all tokens, after the last chunk. The backward pass computes the chunks again and exchanges nothing: what it
gives for the hidden states is this rank's share, to be summed by the region the hidden states came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshrl.engines.packed_model import chunk_functions, tokens_per_chunk

# Below every logit, and still a number: a rank without any vocabulary of its own has this as its largest.
LOWEST = -1e30


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the vocabulary on this rank: `size` real ones from `first` on; padding may follow them."""

    first: int
    size: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(rank: int, rows: int, vocab_size: int, group: dist.ProcessGroup | None) -> VocabularyPart:
        """The part of the `rank`-th of equal parts with `rows` rows each, padding included."""
        first = rank * rows
        return VocabularyPart(first, min(max(vocab_size - first, 0), rows), group)


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    part: VocabularyPart,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [tokens] and entropies, for logits `hidden @ weight.T / temperature` over all ranks' rows.

    Both are float32 [tokens] and the same on every rank of the group.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to compute log-probs, got {temperature}")
    log_probs, entropy = _VocabParallel.apply(hidden, weight, targets, part, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


def _chunk_statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Of each row: largest logit, sum of exponentials and of exponentials times logits, both relative to it, and the
    target's logit (0 if it is not here), as [4, rows]."""
    logits = logits.float() / temperature
    largest = logits.amax(-1)
    relative = logits - largest[:, None]
    weights = relative.exp()
    here = (targets >= 0) & (targets < logits.shape[1])
    target = logits.gather(-1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.stack([largest, weights.sum(-1), (weights * relative).sum(-1), torch.where(here, target, 0.0)])


@cache
def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as one kernel over the chunk, for any number of rows."""
    return torch.compile(function, dynamic=True)


def _for_device(function: Callable[..., Tensor], tensor: Tensor) -> Callable[..., Tensor]:
    return _fused(function) if tensor.is_cuda else function


def _combine(statistics: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum, log-prob and entropy of each token, from the statistics of all ranks."""
    own_largest, total, weighted, target = statistics
    largest = own_largest.clone()
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shift = own_largest - largest
    scale = shift.exp()
    sums = torch.stack([total * scale, (weighted + shift * total) * scale, target])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, weighted, target = sums
    log_total = total.log()
    log_sum = largest + log_total
    # Two terms that are never negative: no digits are lost between them.
    return log_sum, target - log_sum, log_total - weighted / total


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        part: VocabularyPart,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens, own_targets = len(hidden), targets - part.first
        statistics = hidden.new_zeros((4, tokens), dtype=torch.float32)
        statistics[0] = LOWEST
        step = tokens_per_chunk(max(part.size, 1), hidden.is_cuda)
        for start in range(0, tokens if part.size else 0, step):
            rows = slice(start, start + step)
            logits = F.linear(hidden[rows], weight[: part.size])
            statistics[:, rows] = _for_device(_chunk_statistics, hidden)(logits, own_targets[rows], temperature)
        log_sum, log_probs, entropy = _combine(statistics, part.group)
        ctx.save_for_backward(hidden, weight, own_targets, log_sum, entropy)
        ctx.part, ctx.temperature = part, temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy if with_entropy else entropy[:0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        size, tokens = ctx.part.size, len(hidden)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        step = tokens_per_chunk(max(size, 1), hidden.is_cuda)
        _, gradient_of = chunk_functions(hidden.is_cuda)
        for start in range(0, tokens if size else 0, step):
            rows = slice(start, start + step)
            grads = [None if grad is None else grad[rows] for grad in grad_outputs]
            logits = F.linear(hidden[rows], weight[:size])
            grad = gradient_of(logits, targets[rows], log_sum[rows], entropy[rows], *grads, ctx.temperature)
            torch.mm(grad, weight[:size], out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight[:size] += grad.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None
