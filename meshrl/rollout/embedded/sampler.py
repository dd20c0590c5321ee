"""From logits to tokens: one uniform number a row, drawn from its own seed, picks the token on the cumulative sum.

A sample's tokens depend on its seed and its position alone, never on its neighbours in the batch or on the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.rollout.base import SamplingParams

# SplitMix64, whose products wrap around in int64 as they do in uint64.
GOLDEN, MIX_1, MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def uniform(seeds: Tensor, step: Tensor | int) -> Tensor:
    """A float64 in [0, 1) for each seed and step, from a hash."""
    x = seeds + (torch.as_tensor(step, device=seeds.device) + 1) * GOLDEN
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(logits: Tensor, params: SamplingParams, seeds: Tensor, step: Tensor | int) -> tuple[Tensor, Tensor]:
    """Tokens [rows] and their log-probs at the sampling temperature, from logits [rows, vocabulary]."""
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / params.temperature if params.temperature != 1.0 else logits
    log_probs = logits.log_softmax(-1)
    if params.temperature != 0:
        cut = keep_likeliest(log_probs, params)
        cumulative = cut.exp().cumsum(-1, dtype=torch.float64)
        point = uniform(seeds, step)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def keep_likeliest(log_probs: Tensor, params: SamplingParams) -> Tensor:
    """Sets to -inf what top-k and top-p leave out (top-p counts within what top-k left); ties at the border stay."""
    if params.top_k > 0 and params.top_k < log_probs.shape[-1]:
        border = log_probs.topk(params.top_k).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < border, -torch.inf)
    if params.top_p < 1:
        ordered = log_probs.softmax(-1).sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        # The last kept token is the one that reaches top_p.
        kept = (before < params.top_p).sum(-1, keepdim=True).clamp_(min=1)
        border = ordered.gather(-1, kept - 1)
        log_probs = log_probs.masked_fill(log_probs.softmax(-1) < border, -torch.inf)
    return log_probs
