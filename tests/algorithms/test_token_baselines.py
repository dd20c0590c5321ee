"""Optimal token baselines against loops over groups and steps."""

from collections import defaultdict

import numpy as np
import pytest
import torch

from meshrl.algorithms import (
    compute_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
    get_adv_estimator_fn,
)

INDEX = np.array([0, 1, 0, 0, 1, 2])


def example(gaps: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 9, 9, 5, 2, 4])
    mask = (torch.arange(9) < lengths[:, None]).long()
    if gaps:
        mask[:, 1:3] *= torch.tensor([1, 0, 0, 1, 1, 0])[:, None]
    old_log_probs = -2 * torch.rand(6, 9, generator=generator)
    least = (2 * old_log_probs).exp()
    return {
        "token_level_rewards": torch.randn(6, 9, generator=generator) * mask,
        "response_mask": mask,
        "old_log_probs": old_log_probs,
        "sum_pi_squared": least + (1 - least) * torch.rand(6, 9, generator=generator),
        "rollout_is_weights": 0.5 + torch.rand(6, 9, generator=generator),
    }


def slow(data: dict[str, torch.Tensor], by_step: bool, zero_tail: bool, weighted: bool) -> torch.Tensor:
    """`by_step`: align the group by the n-th set token; else by column."""
    mask = data["response_mask"]
    places = {row: mask[row].nonzero().view(-1).tolist() for row in range(6)}
    at: dict[tuple[int, int], dict[int, tuple[int, float, float]]] = defaultdict(dict)
    for row in range(6):
        energy = 0.0
        for step, t in enumerate(places[row]):
            weight = data["rollout_is_weights"][row, t].item() ** 2 if weighted else 1.0
            p, sum_of_squares = data["old_log_probs"][row, t].exp().item(), data["sum_pi_squared"][row, t].item()
            energy += weight * (1 - 2 * p + sum_of_squares)
            to_go = sum(data["token_level_rewards"][row, s].item() for s in places[row] if s >= t)
            at[INDEX[row], step if by_step else t][row] = (t, to_go, energy)
    out = torch.zeros(6, 9)
    for (group, _), rows in at.items():
        if (group == INDEX).sum() == 1:
            continue
        baseline = sum(g * w for _, g, w in rows.values()) / sum(w for _, _, w in rows.values())
        if len(rows) == 1 and zero_tail:
            baseline = 0.0
        for row, (t, to_go, _) in rows.items():
            out[row, t] = to_go - baseline
    return out


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_a_loop(gaps: bool, zero_tail: bool, weighted: bool) -> None:
    data = example(gaps)
    given = dict(data) if weighted else {key: value for key, value in data.items() if key != "rollout_is_weights"}
    for by_step, function in (
        (False, compute_optimal_token_baseline_advantage),
        (True, compute_multi_turn_optimal_token_baseline_advantage),
    ):
        advantages, _ = function(**given, index=INDEX, handle_zero_tail=zero_tail)
        expected = slow(data, by_step, zero_tail, weighted)
        torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-4)
        assert bool((advantages[5] == 0).all()), "a group of one has advantage 0"


@pytest.mark.parametrize("gaps", [False, True])
def test_the_tail_of_the_longest_sample_by_default(gaps: bool) -> None:
    """Only the kind for several turns gives it baseline 0, as in verl; by name and by function."""
    data = example(gaps)
    for name, by_step in (("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)):
        for found in (compute_advantage(name, **data, index=INDEX), get_adv_estimator_fn(name)(**data, index=INDEX)):
            torch.testing.assert_close(found[0], slow(data, by_step, by_step, True), rtol=1e-4, atol=1e-4)
            assert not torch.allclose(found[0], slow(data, by_step, not by_step, True), atol=1e-2)


def test_the_two_alignments_differ_only_with_gaps() -> None:
    for gaps in (False, True):
        data = example(gaps)
        by_column, _ = compute_optimal_token_baseline_advantage(**data, index=INDEX, handle_zero_tail=True)
        by_step, _ = compute_multi_turn_optimal_token_baseline_advantage(**data, index=INDEX, handle_zero_tail=True)
        assert torch.allclose(by_column, by_step) != gaps
