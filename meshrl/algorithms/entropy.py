"""Entropy of the policy, as a measure and as a loss."""

import torch

from meshrl.algorithms.aggregation import agg_loss
from meshrl.algorithms.stats import BatchStats


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of the categorical distributions over the last dim: logsumexp - sum p * logit, in float32 at least."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    # Logits of -inf (masked tokens) have probability 0 and must not become NaN in the product.
    finite = logits.masked_fill(torch.isneginf(logits), 0.0)
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * finite).sum(-1)


def compute_entropy_loss(
    logits: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    stats: BatchStats | None = None,
) -> torch.Tensor:
    """Aggregated entropy of `logits` [batch, response_length, vocabulary]; subtracted from a loss it makes explore."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, stats=stats)
