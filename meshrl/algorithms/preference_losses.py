"""Losses of a pair of answers of which one was preferred.

`chosen` and `rejected` [pairs] say how much the model likes each answer: `compute_answer_scores` makes them of
log-probs, and a reward model gives them itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.registry import unknown_name

# The losses of a policy that compare it with a reference, and that of a reward model.
WITH_REFERENCE, REWARD = ("dpo", "ipo", "hinge"), "reward"
PREFERENCE_LOSSES = (*WITH_REFERENCE, "simpo", REWARD)
# Those that look at the mean of an answer's tokens, not at their sum.
BY_MEAN = ("ipo", "simpo")


def compute_answer_scores(name: str, log_probs: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
    """How much a policy likes answers, from the sums of their log-probs, their tokens, and the reference's sums.

    The log-ratio to the reference, for ipo a token's mean of it; for simpo a token's mean log-prob.
    """
    if (name in WITH_REFERENCE) != (reference is not None):
        raise ValueError(f"the loss {name} {'lacks' if reference is None else 'takes no'} reference log-probs")
    scores = log_probs if reference is None else log_probs - reference
    return scores / tokens if name in BY_MEAN else scores


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
    if name not in PREFERENCE_LOSSES:
        raise unknown_name("preference loss", name, list(PREFERENCE_LOSSES))
    margin = (chosen - rejected) * (1.0 if name == REWARD else beta)
    if name == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2, margin
    if name == "hinge":
        return torch.relu(1 - margin), margin
    lead = margin - simpo_gamma if name == "simpo" else margin
    return -(1 - label_smoothing) * F.logsigmoid(lead) - label_smoothing * F.logsigmoid(-lead), margin
