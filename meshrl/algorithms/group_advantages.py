"""Outcome estimators that compare the samples of one prompt: GRPO and its kin.

A group of one sample has no baseline, so its advantage is 0 in all of them; `group_metrics` counts such groups.
An argument that is given goes before the field of the same name in `config`, which has attributes or keys.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from meshrl.algorithms.advantages import (
    Advantages,
    GroupIndex,
    TokenCompaction,
    discounted_suffix_sum,
    outcome_scores,
    register_adv_est,
    to_tokens,
)
from meshrl.algorithms.masking import check_finite, check_length, check_matrix, mask_bytes, masked_whiten, row_blocks
from meshrl.algorithms.policy_config import field_of
from meshrl.registry import unknown_name

# Groups of samples that share a prompt: numbering them and their sums, vectorised.
#
# A group of one sample has no baseline. Every group estimator here gives it the advantage 0 (no learning signal),
# never its raw reward; `group_metrics` counts such groups.


@dataclass(frozen=True)
class Groups:
    """For each sample the number of its group (by first appearance); for each group its size and first sample."""

    of_sample: torch.Tensor  # [batch] int64
    sizes: torch.Tensor  # [groups] int64
    first_sample: torch.Tensor  # [groups] int64

    @classmethod
    def of(cls, index: np.ndarray | Sequence[Any] | torch.Tensor, batch: int, device: torch.device) -> "Groups":
        """Number the group ids in `index`: any hashable ids, one a sample."""
        check_length("index", len(index), batch)
        ids = index.tolist() if hasattr(index, "tolist") else list(index)
        numbers: defaultdict[Any, int] = defaultdict(count().__next__)  # an id that is not in yet gets the next number
        of_sample = np.fromiter(map(numbers.__getitem__, ids), dtype=np.int64, count=batch)
        first = np.empty(len(numbers), dtype=np.int64)
        first[of_sample[::-1]] = np.arange(batch)[::-1]  # the last one written is the first sample
        sizes = np.bincount(of_sample, minlength=len(numbers))
        return cls(*(torch.from_numpy(array).to(device) for array in (of_sample, sizes, first)))

    @property
    def size_of_sample(self) -> torch.Tensor:
        return self.sizes.index_select(0, self.of_sample)

    @property
    def is_single(self) -> torch.Tensor:
        """Per sample: is it alone in its group?"""
        return self.size_of_sample == 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each group: [batch, ...] -> [groups, ...]."""
        total = torch.zeros((len(self.sizes), *values.shape[1:]), dtype=values.dtype, device=values.device)
        return total.index_add_(0, self.of_sample, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over its group, for each sample of a [batch] vector."""
        return (self.sum(values) / self.sizes).index_select(0, self.of_sample)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Each sample's value minus its group's mean; exactly 0 where all of a group are equal."""
        offset = values - self.first(values)
        return offset - self.mean(offset)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """The value of the first sample of its group, for each sample."""
        return values.index_select(0, self.first_sample).index_select(0, self.of_sample)

    def std(self, centered: torch.Tensor) -> torch.Tensor:
        """The sample standard deviation (n - 1) of its group, for each of the centered samples; 0 in a group of one."""
        squares = self.sum(centered.square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt().index_select(0, self.of_sample)


def group_metrics(
    scores: torch.Tensor, index: np.ndarray | Sequence[Any] | torch.Tensor, prefix: str = "groups"
) -> dict[str, float]:
    """Counts of the groups: all, those of one sample (advantage 0 by rule), and those whose scores are all equal."""
    groups = Groups.of(index, len(scores), scores.device)
    differs = groups.sum((scores != groups.first(scores)).long()) > 0
    single = groups.sizes == 1
    return {
        f"{prefix}/count": float(len(groups.sizes)),
        f"{prefix}/single_sample": float(single.sum()),
        f"{prefix}/equal_scores": float((~differs & ~single).sum()),
        f"{prefix}/size_min": float(groups.sizes.min()) if len(groups.sizes) else 0.0,
        f"{prefix}/size_max": float(groups.sizes.max()) if len(groups.sizes) else 0.0,
    }


def informative_samples(scores: torch.Tensor, index: np.ndarray | Sequence[Any] | torch.Tensor) -> torch.Tensor:
    """Per sample: do the scores of its group differ? Groups that do not carry no signal (DAPO's dynamic sampling)."""
    groups = Groups.of(index, len(scores), scores.device)
    return (groups.sum((scores != groups.first(scores)).long()) > 0)[groups.of_sample]


def _normalised(scores: torch.Tensor, groups: Groups, epsilon: float, by_std: bool) -> torch.Tensor:
    centered = groups.centered(scores)
    return centered / (groups.std(centered) + epsilon) if by_std else centered


def _by_std(given: bool | None, config: Any) -> bool:
    """Whether advantages are divided by the group's std: as given, else as `config` has it, else true."""
    if given is None:
        given = field_of(config, "norm_adv_by_std_in_grpo")
    return True if given is None else bool(given)


# Whose rewards the standard deviation is of that GRPO's advantages are divided by.
STD_OVER = ("group", "batch")


def _whitened(scores: torch.Tensor, response_mask: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Whiten over the tokens of the samples that have a group; a group of one stays at exactly 0."""
    mask = response_mask.bool() & ~groups.is_single[:, None]
    tokens = to_tokens(scores, response_mask)
    return masked_whiten(tokens, mask) if bool(mask.any()) else torch.zeros_like(tokens)


@register_adv_est("grpo_vectorized")
@register_adv_est("grpo")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    norm_adv_std_over: str | None = None,
) -> Advantages:
    """GRPO (arXiv:2402.03300): (score - group mean) / (group std + epsilon); without the std it is Dr.GRPO's.

    With `norm_adv_std_over="batch"` the std is that of all scores of the batch (arXiv:2508.08221).
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    by_std = _by_std(norm_adv_by_std_in_grpo, config)
    over = norm_adv_std_over or field_of(config, "norm_adv_std_over") or "group"
    if over not in STD_OVER:
        raise unknown_name("norm_adv_std_over", over, list(STD_OVER))
    if by_std and over == "batch":
        normalised = groups.centered(scores) / (_batch_std(scores) + epsilon)
    else:
        normalised = _normalised(scores, groups, epsilon, by_std)
    advantages = to_tokens(normalised, response_mask)
    return advantages, advantages


def _batch_std(scores: torch.Tensor) -> torch.Tensor:
    """The standard deviation of all scores (n - 1), 0 of a single one."""
    return scores.double().std().float() if len(scores) > 1 else torch.zeros_like(scores[0])


@register_adv_est("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
) -> Advantages:
    """Pass@k (arXiv:2503.19595): only the best of a group has an advantage, its lead over the second best."""
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    # Sorted by group, then by falling score: the first of each run is the best, the next one the second best.
    by_score = torch.argsort(scores, descending=True, stable=True)
    order = by_score[torch.argsort(groups.of_sample[by_score], stable=True)]
    starts = groups.sizes.cumsum(0) - groups.sizes
    best, second = order[starts], order[(starts + 1).clamp(max=len(order) - 1)]
    lead = torch.where(groups.sizes > 1, scores[best] - scores[second], torch.zeros_like(scores[best]))
    advantages = torch.zeros_like(scores)
    advantages[best] = lead
    if _by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (groups.std(groups.centered(scores)) + epsilon)
    tokens = to_tokens(advantages, response_mask)
    return tokens, tokens


@register_adv_est("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    reward_components: Mapping[str, Any] | None = None,
    reward_weights: Sequence[float] | None = None,
) -> Advantages:
    """GDPO (arXiv:2601.05242): each reward component is normalised in its group, then weighted, added and whitened.

    The components are `reward_components` (name -> [batch] numbers) or the keys `config.gdpo_reward_keys` of
    `non_tensor_batch`; without either, the whole reward is the only component.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    components = _reward_components(scores, config, non_tensor_batch, reward_components)
    if reward_weights is None:
        reward_weights = field_of(config, "gdpo_reward_weights") or [1.0] * len(components)
    check_length("reward_weights", len(reward_weights), len(components))
    total, by_std = torch.zeros_like(scores), _by_std(norm_adv_by_std_in_grpo, config)
    for weight, component in zip(reward_weights, components, strict=True):
        total += float(weight) * _normalised(component, groups, epsilon, by_std)
    advantages = _whitened(total, response_mask, groups)
    return advantages, advantages


def _reward_components(
    scores: torch.Tensor,
    config: Any,
    non_tensor_batch: Mapping[str, Any] | None,
    reward_components: Mapping[str, Any] | None,
) -> list[torch.Tensor]:
    keys = field_of(config, "gdpo_reward_keys")
    if reward_components is None:
        if not keys:
            return [scores]
        missing = [key for key in keys if key not in (non_tensor_batch or {})]
        if missing:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {missing}, which the reward function did not return; "
                f"it returned {sorted(non_tensor_batch or {})}"
            )
        assert non_tensor_batch is not None
        reward_components = {key: non_tensor_batch[key] for key in keys}
    components = []
    for name, values in reward_components.items():
        numbers = values.tolist() if hasattr(values, "tolist") else list(values)
        component = torch.tensor(numbers, dtype=torch.float32, device=scores.device)
        check_length(f"reward component {name!r}", len(component), len(scores))
        check_finite(f"reward component {name!r}", component)
        components.append(component)
    return components


@register_adv_est("rloo_vectorized")
@register_adv_est("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Advantages:
    """RLOO (arXiv:2402.14740): score minus the mean of the group's other samples. `epsilon` is not used."""
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    size = groups.size_of_sample
    # s - (sum - s) / (n - 1) = (s - mean) * n / (n - 1)
    advantages = to_tokens(groups.centered(scores) * size / (size - 1).clamp(min=1), response_mask)
    return advantages, advantages


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Advantages:
    """REINFORCE++ with a group baseline (arXiv:2501.03262): score - group mean, whitened over the batch's tokens.

    `epsilon` is not used.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    advantages = _whitened(groups.centered(scores), response_mask, groups)
    return advantages, advantages


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Advantages:
    """OPO (arXiv:2505.23585): score minus the group's mean weighted by response length. `epsilon` is not used."""
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    advantages, lengths = torch.empty_like(response_mask, dtype=torch.float32), torch.empty_like(scores)
    for rows, _ in row_blocks(advantages):
        torch.sum(advantages[rows].copy_(mask_bytes(response_mask[rows])), -1, out=lengths[rows])
    offset = scores - groups.first(scores)
    baseline = (groups.sum(lengths * offset) / groups.sum(lengths).clamp(min=1)).index_select(0, groups.of_sample)
    advantages.mul_((offset - baseline)[:, None])
    return advantages, advantages


@register_adv_est("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float | None = None,
    config: Any = None,
) -> Advantages:
    """GPG (arXiv:2504.02546): alpha * (score - group mean) / f_norm.

    `alpha` defaults to samples / samples with a non-zero score, which keeps the gradient's size when many are zero;
    samples without a token, which were dropped, do not count. `epsilon` is not used.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    if alpha is None:
        there = response_mask.bool().any(-1)
        alpha = int(there.sum()) / max(int(torch.count_nonzero(scores[there])), 1)
    advantages = to_tokens(groups.centered(scores) * (alpha / f_norm), response_mask)
    return advantages, advantages


# Optimal token baselines: one baseline for each step of a group, weighted by how much each path has varied so far.


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
