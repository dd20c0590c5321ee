"""Optimal token baselines: one baseline for each step of a group, weighted by how much each path has varied so far."""

import torch

from meshrl.algorithms.advantages import Advantages, GroupIndex, outcome_scores, register_adv_est
from meshrl.algorithms.checks import check_finite, check_matrix
from meshrl.algorithms.groups import Groups
from meshrl.algorithms.recurrence import TokenCompaction, discounted_suffix_sum


@register_adv_est("optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = False,
    epsilon: float = 1e-8,
) -> Advantages:
    """Reward to go minus the group's baseline at the same position of the response.

    The baseline at a step is the mean of the group's rewards to go, weighted by W = the sum over the steps so far of
    1 - 2 p + sum of p'^2 over the vocabulary (`sum_pi_squared`), the squared length of the logits' gradient, times the
    squared importance weight. A step that only one sample of the group reaches is its own baseline and has advantage
    0; with `handle_zero_tail` its baseline is 0 and its advantage its reward to go. A group of one sample has
    advantage 0.
    """
    check_matrix(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
    )
    tokens = TokenCompaction(response_mask)
    returns = _rewards_to_go(token_level_rewards, response_mask, tokens)
    energy = _path_energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    groups = Groups.of(index, len(returns), returns.device)
    baselines = _step_baselines(returns, energy, response_mask.bool(), groups, handle_zero_tail, epsilon)
    return _without_single(returns - baselines, response_mask.bool(), groups), returns


@register_adv_est("tir_optimal_token_baseline")
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Advantages:
    """The optimal token baseline where a step is the n-th token of the policy, whatever tool output lies between.

    `handle_zero_tail` is on: a step that only one sample of the group reaches has baseline 0.
    """
    check_matrix(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
    )
    tokens = TokenCompaction(response_mask)
    returns = _rewards_to_go(token_level_rewards, response_mask, tokens)
    energy = _path_energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    groups = Groups.of(index, len(returns), returns.device)
    reached = tokens.compact(torch.ones_like(returns)) > 0
    baselines = _step_baselines(
        tokens.compact(returns), tokens.compact(energy), reached, groups, handle_zero_tail, epsilon
    )
    return _without_single(returns - tokens.spread(baselines), response_mask.bool(), groups), returns


def _rewards_to_go(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, tokens: TokenCompaction
) -> torch.Tensor:
    outcome_scores(token_level_rewards, response_mask)
    return tokens.spread(discounted_suffix_sum(tokens.compact_rewards(token_level_rewards.float()), 1.0))


def _path_energy(
    response_mask: torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
) -> torch.Tensor:
    check_finite("old_log_probs", old_log_probs, response_mask)
    check_finite("sum_pi_squared", sum_pi_squared, response_mask)
    # Never negative, as sum_pi_squared is at least the square of the token's own probability; only rounding can be.
    energy = (1.0 - 2.0 * old_log_probs.float().exp() + sum_pi_squared.float()).clamp(min=0.0)
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.float().square()
    return energy.masked_fill(~response_mask.bool(), 0.0).cumsum(-1)


def _step_baselines(
    returns: torch.Tensor,
    energy: torch.Tensor,
    reached: torch.Tensor,
    groups: Groups,
    handle_zero_tail: bool,
    epsilon: float,
) -> torch.Tensor:
    # With epsilon in every weight a step of no energy at all falls back to the plain mean.
    weights = (energy + epsilon) * reached
    count = groups.sum(reached.long())
    baselines = groups.sum(returns * weights) / groups.sum(weights).masked_fill(count == 0, 1.0)
    if handle_zero_tail:
        baselines = baselines * (count > 1)
    return baselines[groups.of_sample]


def _without_single(advantages: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
    return advantages.masked_fill(~mask | groups.is_single[:, None], 0.0)
