"""Losses of a pair of answers of which one was preferred, and of answers that were judged one by one.

`chosen`, `rejected` [pairs] and `scores` [answers] say how much the model likes each answer: `compute_answer_scores`
makes them of log-probs, and a reward model gives them itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.registry import unknown_name

# The loss of answers that were judged one by one, that of a reward model, those that compare a policy with a reference.
JUDGED, REWARD = "kto", "reward"
WITH_REFERENCE = ("dpo", "ipo", "hinge", JUDGED)
PREFERENCE_LOSSES = (*WITH_REFERENCE, "simpo", "orpo", REWARD)
# Those that look at the mean of an answer's tokens, not at their sum.
BY_MEAN = ("ipo", "simpo", "orpo")
SUREST = -1e-6  # a token's mean log-prob up to which odds are told: certainty has none


def compute_answer_scores(name: str, log_probs: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
    """How much a policy likes answers, from the sums of their log-probs, their tokens, and the reference's sums.

    The log-ratio to the reference, for ipo a token's mean of it; for simpo the mean log-prob, for orpo its log-odds.
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
    """The loss of each pair, and its margin: by how much the chosen answer leads, in the unit of rewards."""
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
    """The loss of each judged answer, and by how much it is on the right side of the baseline, in the unit of rewards.

    `scores` are log-ratios to the reference; the baseline is their mean for answers to other prompts, at least zero.
    """
    lead = beta * torch.where(good, scores - baseline, baseline - scores)
    weights = torch.where(good, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-lead), lead
