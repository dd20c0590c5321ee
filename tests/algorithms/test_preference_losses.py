"""Losses of pairs against their formulas in plain numbers, and how answers are scored for them."""

import math

import pytest
import torch

from meshrl.algorithms import PREFERENCE_LOSSES, compute_answer_scores, compute_kto_loss, compute_preference_loss
from meshrl.algorithms.preference_losses import WITH_REFERENCE
from meshrl.config import supervised

CHOSEN, REJECTED = [-1.5, 0.25, 2.9, 0.0], [0.5, -0.75, 2.5, 0.0]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def by_hand(name, c, r, beta, wrong, gamma):
    if name == "ipo":
        return (c - r - 1 / (2 * beta)) ** 2
    if name == "orpo":
        return -beta * log_sigmoid(c - r)
    if name == "hinge":
        return max(0.0, 1 - beta * (c - r))
    lead = {"dpo": beta * (c - r), "simpo": beta * (c - r) - gamma, "reward": c - r}[name]
    return -(1 - wrong) * log_sigmoid(lead) - wrong * log_sigmoid(-lead)


@pytest.mark.parametrize("wrong", [0.0, 0.2])
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge", "simpo", "orpo", "reward"])
def test_losses_and_their_gradients_are_the_formulas(name, beta, wrong):
    options = {"beta": beta, "label_smoothing": wrong, "simpo_gamma": 0.3}
    chosen, rejected = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (CHOSEN, REJECTED))
    losses, margin = compute_preference_loss(name, chosen, rejected, **options)
    expected = [by_hand(name, c, r, beta, wrong, 0.3) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    unit = 1.0 if name == "reward" else beta
    assert margin.tolist() == pytest.approx([unit * (c - r) for c, r in zip(CHOSEN, REJECTED, strict=True)])
    losses.sum().backward()
    step = 1e-6
    for at, (c, r) in enumerate(zip(CHOSEN, REJECTED, strict=True)):
        up, down = (by_hand(name, c + s, r, beta, wrong, 0.3) for s in (step, -step))
        assert float(chosen.grad[at]) == pytest.approx((up - down) / (2 * step), abs=1e-6)
    assert torch.equal(rejected.grad, -chosen.grad)  # only the difference counts


def test_a_wrong_pair_costs_more_and_a_far_lead_little():
    good, bad = (compute_preference_loss("dpo", torch.tensor([c]), torch.tensor([-c]))[0] for c in (300.0, -300.0))
    assert float(good) == pytest.approx(0, abs=1e-12)
    assert float(bad) == pytest.approx(60)  # not infinite


def test_scores_are_ratios_and_means_where_the_loss_has_them():
    sums, tokens, reference = torch.tensor([-6.0, -4.0]), torch.tensor([3, 2]), torch.tensor([-9.0, -3.0])
    assert compute_answer_scores("dpo", sums, tokens, reference).tolist() == [3.0, -1.0]
    assert compute_answer_scores("hinge", sums, tokens, reference).tolist() == [3.0, -1.0]
    assert compute_answer_scores("ipo", sums, tokens, reference).tolist() == [1.0, -0.5]
    assert compute_answer_scores("simpo", sums, tokens, None).tolist() == [-2.0, -2.0]
    assert compute_answer_scores("kto", sums, tokens, reference).tolist() == [3.0, -1.0]
    odds = math.exp(-2) / (1 - math.exp(-2))
    assert compute_answer_scores("orpo", sums, tokens, None).tolist() == pytest.approx([math.log(odds)] * 2)


def test_odds_of_certain_answers_are_finite():
    sums = torch.tensor([0.0, -1e-9, -200.0], dtype=torch.float64, requires_grad=True)
    odds = compute_answer_scores("orpo", sums, torch.ones(3))
    assert odds.tolist() == pytest.approx([math.log(1e6)] * 2 + [-200.0], rel=1e-4)
    odds.sum().backward()
    assert sums.grad.isfinite().all()


@pytest.mark.parametrize("baseline", [0.0, 0.8])
def test_judged_answers_lose_by_the_side_they_are_on(baseline):
    values, good = [-1.5, 0.25, 2.9, 0.25], [True, True, False, False]
    options = {"beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    scores = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    losses, lead = compute_kto_loss(scores, torch.tensor(good), baseline, **options)

    def by_the_paper(score, is_good):
        value = 1 / (1 + math.exp(-0.7 * (score - baseline if is_good else baseline - score)))
        return (1.5 if is_good else 0.5) * (1 - value)

    assert losses.tolist() == pytest.approx([by_the_paper(*each) for each in zip(values, good, strict=True)])
    assert (lead > 0).tolist() == [False, baseline < 0.25, False, baseline > 0.25]
    losses.sum().backward()
    assert (scores.grad[:2] < 0).all()  # good answers are to become more likely
    assert (scores.grad[2:] > 0).all()


def test_wrong_uses_are_told():
    sums = torch.zeros(2)
    with pytest.raises(ValueError, match="the loss dpo lacks reference log-probs"):
        compute_answer_scores("dpo", sums, sums, None)
    with pytest.raises(ValueError, match="the loss simpo takes no reference log-probs"):
        compute_answer_scores("simpo", sums, sums, sums)
    with pytest.raises(ValueError, match=r"dpp.*dpo"):
        compute_preference_loss("dpp", sums, sums)
    with pytest.raises(ValueError, match="unknown loss of pairs 'kto'"):
        compute_preference_loss("kto", sums, sums)


def test_the_config_knows_the_same_losses():
    assert supervised.PREFERENCE_LOSSES == PREFERENCE_LOSSES
    assert supervised.WITH_REFERENCE == WITH_REFERENCE
