"""Losses of a pair of answers of which one was preferred.

`chosen` and `rejected` [pairs] say how much the model likes each answer: `answer_scores` makes them of log-probs, and a
reward model gives them itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.config.preferences import PREFERENCE_LOSSES, REWARD, WITH_REFERENCE, PreferenceLossConfig
from meshrl.registry import unknown_name

# Losses that look at the mean of an answer's tokens, not at their sum.
BY_MEAN = ("ipo", "simpo")


def answer_scores(config: PreferenceLossConfig, log_probs: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """How much a policy likes answers, from the sums of their log-probs, their tokens, and the reference's sums.

    The log-ratio to the reference, for ipo a token's mean of it; for simpo a token's mean log-prob.
    """
    if (config.name in WITH_REFERENCE) != (reference is not None):
        raise ValueError(f"loss.name={config.name} {'lacks' if reference is None else 'takes no'} reference log-probs")
    scores = log_probs if reference is None else log_probs - reference
    return scores / tokens if config.name in BY_MEAN else scores


def margins(config: PreferenceLossConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    """By how much the chosen answer leads, in the unit of rewards: beta times the log-ratios, or a reward model's."""
    return (chosen - rejected) * (1.0 if config.name == REWARD else config.beta)


def preference_losses(config: PreferenceLossConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    """The loss of each pair."""
    lead = margins(config, chosen, rejected)
    if config.name == "ipo":
        return (chosen - rejected - 1 / (2 * config.beta)) ** 2
    if config.name == "hinge":
        return torch.relu(1 - lead)
    if config.name not in PREFERENCE_LOSSES:
        raise unknown_name("loss.name", config.name, list(PREFERENCE_LOSSES))
    if config.name == "simpo":
        lead = lead - config.simpo_gamma
    wrong = config.label_smoothing
    return -(1 - wrong) * F.logsigmoid(lead) - wrong * F.logsigmoid(-lead)
