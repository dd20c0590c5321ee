"""Advantage estimators that compare the samples of one prompt: GRPO, Pass@k, GDPO, RLOO, OPO, GPG, optimal baselines.

The samples of one prompt form a group. A group of one sample has no baseline, so every estimator here gives its sample
the advantage 0 and never its raw reward. `group_metrics` counts such groups. An explicit argument takes precedence over
the field of the same name in `config`, which has attributes or keys.
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


@dataclass(frozen=True)
class Groups:
    """An assignment of samples to groups, which are numbered by first appearance, with vectorised group statistics."""

    of_sample: torch.Tensor  # [batch] int64: the group number of each sample
    sizes: torch.Tensor  # [groups] int64: the number of samples in each group
    first_sample: torch.Tensor  # [groups] int64: the row of each group's first sample

    @classmethod
    def of(cls, index: np.ndarray | Sequence[Any] | torch.Tensor, batch: int, device: torch.device) -> "Groups":
        """Build the groups from `index`, which holds one hashable group id per sample."""
        check_length("index", len(index), batch)
        ids = index.tolist() if hasattr(index, "tolist") else list(index)
        numbers: defaultdict[Any, int] = defaultdict(count().__next__)  # a new id gets the next number
        of_sample = np.fromiter(map(numbers.__getitem__, ids), dtype=np.int64, count=batch)
        first = np.empty(len(numbers), dtype=np.int64)
        first[of_sample[::-1]] = np.arange(batch)[::-1]  # the last write of each group is its first sample
        sizes = np.bincount(of_sample, minlength=len(numbers))
        return cls(*(torch.from_numpy(array).to(device) for array in (of_sample, sizes, first)))

    @property
    def size_of_sample(self) -> torch.Tensor:
        return self.sizes.index_select(0, self.of_sample)

    @property
    def is_single(self) -> torch.Tensor:
        """A bool mask `[B]` of the samples that are alone in their group."""
        return self.size_of_sample == 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values `[B, ...]` over each group, and return `[groups, ...]`."""
        total = torch.zeros((len(self.sizes), *values.shape[1:]), dtype=values.dtype, device=values.device)
        return total.index_add_(0, self.of_sample, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each sample the mean of the values `[B]` over the sample's group, as `[B]`."""
        return (self.sum(values) / self.sizes).index_select(0, self.of_sample)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values `[B]` minus their group's mean, exactly 0 if all values of a group are equal."""
        offset = values - self.first(values)
        return offset - self.mean(offset)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each sample the value of the first sample in the same group, as `[B]`."""
        return values.index_select(0, self.first_sample).index_select(0, self.of_sample)

    def std(self, centered: torch.Tensor) -> torch.Tensor:
        """Return for each sample the standard deviation (n - 1) of its group, as `[B]`; 0 for a group of one sample.

        `centered` `[B]` holds values minus their group's mean.
        """
        squares = self.sum(centered.square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt().index_select(0, self.of_sample)


def group_metrics(
    scores: torch.Tensor, index: np.ndarray | Sequence[Any] | torch.Tensor, prefix: str = "groups"
) -> dict[str, float]:
    """Count all groups, the groups of one sample (advantage 0 by rule) and the larger groups with equal scores.

    The metrics also include the smallest and the largest group size.
    """
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
    """Return a bool mask `[B]` of the samples whose group has different scores.

    Groups of equal scores carry no learning signal, and DAPO's dynamic sampling leaves such groups out.
    """
    groups = Groups.of(index, len(scores), scores.device)
    return (groups.sum((scores != groups.first(scores)).long()) > 0)[groups.of_sample]


def _normalised(scores: torch.Tensor, groups: Groups, epsilon: float, by_std: bool) -> torch.Tensor:
    centered = groups.centered(scores)
    return centered / (groups.std(centered) + epsilon) if by_std else centered


def _by_std(given: bool | None, config: Any) -> bool:
    """Return whether to divide by the std: the argument, else `config.norm_adv_by_std_in_grpo`, else true."""
    if given is None:
        given = field_of(config, "norm_adv_by_std_in_grpo")
    return True if given is None else bool(given)


# GRPO divides advantages by the standard deviation of the scores of the group or of the whole batch.
STD_OVER = ("group", "batch")


def _whitened(scores: torch.Tensor, response_mask: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Whiten scores over the tokens of all groups with several samples, as `[B, T]`; a group of one sample gets 0."""
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
    """Compute GRPO advantages (arXiv:2402.03300): (score - group mean) / (group std + epsilon).

    With `norm_adv_by_std_in_grpo=False` the advantage is score - group mean, as in Dr.GRPO. With
    `norm_adv_std_over="batch"` the std is taken over all scores of the batch (arXiv:2508.08221).
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
    """Return the standard deviation (n - 1) of all scores `[B]`, or 0 for a batch of one sample."""
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
    """Compute Pass@k advantages (arXiv:2503.19595): the best sample of a group gets its lead over the second best.

    All other samples have advantage 0.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    # Sort by group, then by decreasing score: each group's first sample is the best, and its next the second best.
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
    """Compute GDPO advantages (arXiv:2601.05242) from several reward components.

    Each component is normalised in its group. The weighted sum of all components is then whitened. The components are
    `reward_components` (name -> `[B]` numbers), or the columns of `non_tensor_batch` that `config.gdpo_reward_keys`
    lists. Without both, the whole reward is the only component.
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
    """Compute RLOO advantages (arXiv:2402.14740): score minus the mean of the group's other samples.

    `epsilon` is not used.
    """
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
    """Compute REINFORCE++ advantages with a group baseline (arXiv:2501.03262).

    The advantage is score - group mean, whitened over the batch's tokens. `epsilon` is not used.
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
    """Compute OPO advantages (arXiv:2505.23585): score minus the group's mean score, weighted by response length.

    `epsilon` is not used.
    """
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
    """Compute GPG advantages (arXiv:2504.02546): alpha * (score - group mean) / f_norm.

    `alpha` defaults to the number of samples divided by the number of samples with a non-zero score. This keeps the
    size of the gradient if many scores are zero. Dropped samples, which have no response token, do not count. `epsilon`
    is not used.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, len(scores), scores.device)
    if alpha is None:
        there = response_mask.bool().any(-1)
        alpha = int(there.sum()) / max(int(torch.count_nonzero(scores[there])), 1)
    advantages = to_tokens(groups.centered(scores) * (alpha / f_norm), response_mask)
    return advantages, advantages


# Optimal token baselines: one baseline per group and step. A sample's weight is its gradient energy up to that step.


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
    """Compute optimal token baseline advantages: reward to go minus the group's baseline at the same response position.

    The baseline at a step is the weighted mean of the group's rewards to go. The weight of a sample is the sum over the
    steps so far of (1 - 2 p + `sum_pi_squared`) times the squared importance weight. `sum_pi_squared` is the sum of
    p'^2 over the vocabulary, so the first factor is the squared length of the logits' gradient. If only one sample of
    the group reaches a step, its reward to go is the baseline and its advantage is 0. With `handle_zero_tail` the
    baseline of such a step is 0 and the advantage is the reward to go. A group of one sample always has advantage 0.
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
    """Compute optimal token baseline advantages for multi-turn responses.

    Step n is the n-th token that the policy sampled, so tool output between tokens does not count. `handle_zero_tail`
    defaults to true: a step that only one sample of the group reaches has baseline 0.
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
    # The exact value is never negative, because sum_pi_squared >= p^2 for the sampled token. Clamp rounding errors.
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
    # With epsilon in every weight, a step at which all energies are 0 falls back to the plain mean.
    weights = (energy + epsilon) * reached
    count = groups.sum(reached.long())
    baselines = groups.sum(returns * weights) / groups.sum(weights).masked_fill(count == 0, 1.0)
    if handle_zero_tail:
        baselines = baselines * (count > 1)
    return baselines[groups.of_sample]


def _without_single(advantages: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
    return advantages.masked_fill(~mask | groups.is_single[:, None], 0.0)
