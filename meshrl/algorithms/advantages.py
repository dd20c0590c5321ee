"""Advantage estimators by name, and those that need no groups: GAE, REINFORCE++, ReMax, distillation.

Every estimator takes [batch, response_length] tensors and returns `(advantages, returns)` of that shape, zero where
`response_mask` is zero. A response is the tokens with mask 1; zeros inside it (tool output) are no steps of the policy.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from meshrl.algorithms.checks import check_finite, check_length, check_matrix, check_not_empty
from meshrl.algorithms.masked import Moments, mask_bytes, masked_whiten, row_blocks, whiten_
from meshrl.algorithms.policy_config import field_of
from meshrl.algorithms.recurrence import TokenCompaction, discounted_suffix_sum, has_gaps
from meshrl.registry import ADVANTAGE_ESTIMATORS

Advantages = tuple[torch.Tensor, torch.Tensor]
GroupIndex = np.ndarray | Sequence[Any] | torch.Tensor


def register_adv_est(name: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that enters an advantage estimator under a name (a string, or an enum member whose value is one)."""
    return ADVANTAGE_ESTIMATORS.register(str(getattr(name, "value", name)))


def get_adv_estimator_fn(name: Any) -> Callable[..., Advantages]:
    """The advantage estimator called `name`, or one's own by `file.py:name`."""
    return ADVANTAGE_ESTIMATORS.get(str(getattr(name, "value", name)))


def estimator_takes(name: str, argument: str) -> bool:
    """Whether an estimator names this argument: what costs a pass over the batch is computed for those alone."""
    return argument in inspect.signature(get_adv_estimator_fn(name)).parameters


def compute_advantage(
    name: str,
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex | None = None,
    values: torch.Tensor | None = None,
    gamma: float | None = None,
    lam: float | None = None,
    config: Any = None,
    **extra: Any,
) -> Advantages:
    """Run an estimator by name with those of the arguments it takes; one it needs and does not get is an error.

    `gamma` and `lam` that are not given are those of `config`, else 1. `extra` holds what only some estimators need,
    such as `reward_baselines` (remax) or `sum_pi_squared`.
    """
    function = get_adv_estimator_fn(name)
    offered = {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "index": index,
        "values": values,
        "gamma": _discount(gamma, config, "gamma"),
        "lam": _discount(lam, config, "lam"),
        "config": config,
        "norm_adv_by_std_in_grpo": field_of(config, "norm_adv_by_std_in_grpo"),
        **extra,
    }
    parameters = inspect.signature(function).parameters
    free = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {key: value for key, value in offered.items() if value is not None and (takes_any or key in parameters)}
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind not in free
        if required and parameter.name not in given:
            raise ValueError(f"advantage estimator {name!r} needs {parameter.name}, which was not given")
    found = function(**given)
    shapes = [getattr(part, "shape", None) for part in found] if isinstance(found, tuple) else None
    if shapes != [response_mask.shape] * 2:
        raise ValueError(
            f"advantage estimator {name!r} must return (advantages, returns), both of response_mask's shape "
            f"{list(response_mask.shape)}, not {type(found).__name__ if shapes is None else shapes}"
        )
    return found


def _discount(given: float | None, config: Any, name: str) -> float:
    """`gamma` or `lam` as given, else as `config` has it, else 1."""
    if given is None:
        given = field_of(config, name)
    return 1.0 if given is None else float(given)


def outcome_scores(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Each sample's whole reward as a float [batch] vector; refuses NaN, inf and disagreeing shapes."""
    check_matrix(token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_not_empty(response_mask)
    scores = token_level_rewards.detach().sum(-1, dtype=torch.float32)
    # A NaN or inf anywhere reaches its row's sum, so the matrix itself is searched only to say where.
    if not math.isfinite(float(scores.sum())):
        check_finite("token_level_rewards", token_level_rewards)
        check_finite("the sum of token_level_rewards", scores)
    return scores


def to_tokens(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Each sample's number on each of its response tokens, zero elsewhere."""
    tokens = torch.empty(response_mask.shape, dtype=scores.dtype, device=scores.device)
    for rows, _ in row_blocks(tokens):
        tokens[rows].copy_(mask_bytes(response_mask[rows])).mul_(scores[rows, None])
    return tokens


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> Advantages:
    """Generalised advantage estimation (arXiv:1506.02438), whitened over the batch's tokens; returns are not."""
    check_matrix(token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    check_not_empty(response_mask)
    mask = response_mask.bool()
    returns, advantages, moments = _gae(token_level_rewards, values, mask, gamma, lam)
    # A NaN or inf in either input reaches the moments, so the matrices are searched only to say where.
    if not math.isfinite(moments.squares):
        check_finite("token_level_rewards", token_level_rewards)
        check_finite("values", values, mask)
        # Then it stands under a zero of the mask, where it does not matter.
        returns, advantages, moments = _gae(token_level_rewards, values.masked_fill(~mask, 0.0), mask, gamma, lam)
        check_finite("returns", returns)
    return whiten_(advantages, mask, moments), returns


def _gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor, Moments]:
    """Returns, advantages and the advantages' moments, in one pass over blocks of rows."""
    returns = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    advantages, moments, may_have_gaps = torch.empty_like(returns), Moments(), has_gaps(mask)
    for rows, (weight, own, targets) in row_blocks(returns, buffers=3):
        tokens, block = TokenCompaction(mask[rows], may_have_gaps), returns[rows]
        own_rewards = tokens.compact_rewards(rewards[rows].float())
        torch.mul(values[rows].float(), weight.copy_(tokens.flags), out=own)
        # The return of GAE is R_t = r_t + gamma ((1 - lam) V_{t+1} + lam R_{t+1}), and the advantage is R_t - V_t.
        steps = tokens.compact(own) if tokens.has_gaps else own
        torch.add(own_rewards[:, :-1], steps[:, 1:], alpha=gamma * (1.0 - lam), out=targets[:, :-1])
        targets[:, -1] = own_rewards[:, -1]
        discounted_suffix_sum(targets, gamma * lam, out=block)
        if tokens.has_gaps:
            block.copy_(tokens.spread(block))
        torch.sub(block, own, out=advantages[rows])
        moments.add(advantages[rows], weight, scratch=targets)
    return returns, advantages, moments


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    gamma: float | None = None,
) -> Advantages:
    """REINFORCE++ (arXiv:2501.03262): discounted rewards to go, whitened over the batch's tokens."""
    outcome_scores(token_level_rewards, response_mask)
    gamma = _discount(gamma, config, "gamma")
    tokens = TokenCompaction(response_mask)
    returns = tokens.spread(discounted_suffix_sum(tokens.compact_rewards(token_level_rewards.float()), gamma))
    return masked_whiten(returns, response_mask), returns


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
) -> Advantages:
    """ReMax (arXiv:2310.10505): rewards to go minus the reward of the greedy response to the same prompt."""
    outcome_scores(token_level_rewards, response_mask)
    check_length("reward_baselines", len(reward_baselines), len(response_mask))
    check_finite("reward_baselines", reward_baselines)
    tokens = TokenCompaction(response_mask)
    returns = tokens.spread(discounted_suffix_sum(tokens.compact_rewards(token_level_rewards.float()), 1.0))
    return returns - to_tokens(reward_baselines.float(), response_mask), returns


@register_adv_est("distillation")
@torch.no_grad()
def compute_distillation_advantage(
    ref_log_prob: torch.Tensor, old_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> Advantages:
    """On-policy distillation: how much likelier the teacher makes each token than the policy that sampled it.

    Each token answers for itself alone, without discount. The mean over the policy's samples is minus the reverse KL,
    and its policy gradient is that of the sum of the tokens' KLs with the texts before them held fixed.
    """
    check_matrix(ref_log_prob=ref_log_prob, old_log_probs=old_log_probs, response_mask=response_mask)
    check_not_empty(response_mask)
    mask = response_mask.bool()
    advantages = (ref_log_prob.float() - old_log_probs.float()).masked_fill_(~mask, 0.0)
    if not math.isfinite(float(advantages.sum())):
        check_finite("ref_log_prob", ref_log_prob, mask)
        check_finite("old_log_probs", old_log_probs, mask)
    return advantages, advantages.clone()
