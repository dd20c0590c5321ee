"""Preference losses: for pairs of a chosen and a rejected response (DPO and others), and for single responses (KTO).

The losses take one score per response: `chosen` and `rejected` `[pairs]`, or `scores` `[responses]`.
`compute_answer_scores` computes scores from log-probs. A reward model returns its scores directly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.registry import unknown_name

# The loss of responses with a label each (KTO), the loss of a reward model, and all losses with a reference policy.
JUDGED, REWARD = "kto", "reward"
WITH_REFERENCE = ("dpo", "ipo", "hinge", JUDGED)
PREFERENCE_LOSSES = (*WITH_REFERENCE, "simpo", "orpo", REWARD)
# The losses that use the mean of a response's token log-probs, not the sum.
BY_MEAN = ("ipo", "simpo", "orpo")
SUREST = -1e-6  # the largest mean log-prob in log-odds, because the odds of probability 1 are infinite


def compute_answer_scores(name: str, log_probs: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
    """Compute one score per response, `[responses]`, for the loss `name`.

    `log_probs` and `reference` are sums of token log-probs of the policy and of the reference policy, `tokens` is the
    number of tokens. The score is the log-ratio to the reference, and for ipo this log-ratio per token. For simpo the
    score is the mean log-prob per token, and for orpo the log-odds of that mean.
    """
    if (name in WITH_REFERENCE) != (reference is not None):
        raise ValueError(f"the loss {name} {'lacks' if reference is None else 'takes no'} reference log-probs")
    scores = log_probs if reference is None else log_probs - reference
    scores = scores / tokens if name in BY_MEAN else scores
    if name != "orpo":
        return scores
    scores = scores.clamp(max=SUREST)
    return scores - torch.log(-torch.expm1(scores))  # log(p / (1 - p))


def compute_preference_loss(
    name: str,
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Compute the loss and the margin of each pair, both `[pairs]`.

    The margin is the lead of the chosen response over the rejected response, in units of reward.
    """
    if name not in PREFERENCE_LOSSES or name == JUDGED:
        raise unknown_name("loss of pairs", name, [known for known in PREFERENCE_LOSSES if known != JUDGED])
    margin = (chosen - rejected) * (1.0 if name == REWARD else beta)
    if name == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2, margin
    if name == "hinge":
        return torch.relu(1 - margin), margin
    if name == "orpo":
        return -beta * F.logsigmoid(chosen - rejected), margin
    lead = margin - simpo_gamma if name == "simpo" else margin
    return -(1 - label_smoothing) * F.logsigmoid(lead) - label_smoothing * F.logsigmoid(-lead), margin


def compute_kto_loss(
    scores: Tensor,
    good: Tensor,
    baseline: float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute the KTO loss and the margin of each response, both `[responses]`.

    `scores` are log-ratios to the reference, and `good` marks the desirable responses. `baseline` is the mean log-ratio
    of responses to other prompts, at least zero. The margin is the distance by which a response is on the right side of
    the baseline, in units of reward.
    """
    lead = beta * torch.where(good, scores - baseline, baseline - scores)
    weights = torch.where(good, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-lead), lead
