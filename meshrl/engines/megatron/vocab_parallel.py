"""Log-probs and entropy if every rank holds a part of the vocabulary.

As in `meshrl.engines.packed_model`, logits exist for one chunk of tokens at a time, here only for the rank's own part.
A token's soft-max needs three numbers from each rank: the largest logit, and two sums relative to it. The ranks
exchange these numbers once for all tokens, after the last chunk. The backward pass computes the chunks again without
any exchange. Its gradient of the hidden states is this rank's share. The region that the hidden states came from sums
it.
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

# Below every logit, but finite: the largest logit of a rank that holds no real row of the vocabulary.
LOWEST = -1e30


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the vocabulary on this rank: `size` real rows from `first` on, which padding may follow."""

    first: int
    size: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(rank: int, rows: int, vocab_size: int, group: dist.ProcessGroup | None) -> VocabularyPart:
        """Return the part of the `rank`-th of equal parts with `rows` rows each, padding included."""
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
    """Compute log-probs of `targets` `[tokens]` and entropies, for logits `hidden @ weight.T / temperature`.

    The logits cover all ranks' rows. Both results are float32 `[tokens]` and the same on every rank of the group.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to compute log-probs, got {temperature}")
    log_probs, entropy = _VocabParallel.apply(hidden, weight, targets, part, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


def _chunk_statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return four numbers per row of logits, as `[4, rows]`.

    They are the largest logit, the sum of exponentials, the sum of exponentials times logits (both relative to the
    largest logit), and the target's logit (0 if the target is on another rank).
    """
    logits = logits.float() / temperature
    largest = logits.amax(-1)
    relative = logits - largest[:, None]
    weights = relative.exp()
    here = (targets >= 0) & (targets < logits.shape[1])
    target = logits.gather(-1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.stack([largest, weights.sum(-1), (weights * relative).sum(-1), torch.where(here, target, 0.0)])


@cache
def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile the function into one kernel over the chunk, for any number of rows."""
    return torch.compile(function, dynamic=True)


def _for_device(function: Callable[..., Tensor], tensor: Tensor) -> Callable[..., Tensor]:
    return _fused(function) if tensor.is_cuda else function


def _combine(statistics: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, log-prob and entropy of each token, from the statistics of all ranks."""
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
    # Both terms of the entropy are nonnegative, so their sum loses no digits.
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
