"""Advantage estimators by name, and those that need no groups: GAE, REINFORCE++, ReMax, distillation.

Every estimator takes [batch, response_length] tensors and returns `(advantages, returns)` of that shape, zero where
`response_mask` is zero. A response is the tokens with mask 1; zeros inside it (tool output) are no steps of the policy.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from meshrl.algorithms.masking import (
    Moments,
    any_above,
    check_finite,
    check_length,
    check_matrix,
    check_not_empty,
    mask_bytes,
    masked_whiten,
    row_blocks,
    whiten_,
    zero_outside,
)
from meshrl.algorithms.policy_config import field_of
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


# x_t + d * x_{t+1} + d^2 * x_{t+2} + ... for whole matrices at once, and the same over the set tokens of a mask.

CHUNK = 32  # a product with a matrix of this size costs a CPU little more than reading and writing the values
CARRY_CHUNK = 256  # the recurrence over chunks has 1/32 of the values: a larger matrix, to spare it a level


def discounted_suffix_sum(
    values: torch.Tensor, discount: float, out: torch.Tensor | None = None, chunk: int = CHUNK
) -> torch.Tensor:
    """y[:, t] = values[:, t] + discount * y[:, t + 1], without a loop over time.

    Time is cut into chunks; inside a chunk the sum is a product with a triangular matrix of powers. The chunks' first
    sums obey the same recurrence with discount ** chunk, so two or three levels cover any length, and what follows a
    chunk is added to it as an outer product. `out` is contiguous memory for the result.
    """
    if values.dtype == torch.float32 and values.device.type == "cuda":
        # A trainer that allows TF32 for its models' products must not get advantages of ten bits.
        found = discounted_suffix_sum(values.double(), discount, chunk=chunk)
        return found.float() if out is None else out.copy_(found)
    rows, length = values.shape
    if length <= chunk:
        return torch.mm(values, _powers(length, discount, values.dtype, values.device), out=out)
    chunks = -(-length // chunk)
    if length % chunk:
        padded = torch.nn.functional.pad(values, (0, chunks * chunk - length))
        found = discounted_suffix_sum(padded, discount, chunk=chunk)[:, :length]
        return found if out is None else out.copy_(found)
    matrix = _powers(chunk, discount, values.dtype, values.device)
    sums = torch.mm(values.reshape(-1, chunk), matrix, out=None if out is None else out.view(-1, chunk))
    first = sums.view(rows, chunks, chunk)[:, 1:, 0]
    following = discounted_suffix_sum(first, discount**chunk, chunk=CARRY_CHUNK)
    following = torch.nn.functional.pad(following, (0, 1)).view(-1, 1)  # nothing follows a row's last chunk
    return sums.addmm_(following, matrix[-1:], alpha=discount).view(rows, length)


@lru_cache(maxsize=32)
def _powers(size: int, discount: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """M[s, t] = discount ** (s - t) for s >= t, else 0; and 0 for powers so small that a CPU would crawl on them."""
    steps = torch.arange(size, device=device)
    distance = steps[:, None] - steps[None, :]
    powers = torch.pow(torch.tensor(discount, dtype=torch.float64, device=device), distance.clamp(min=0))
    limits = torch.finfo(dtype)
    return powers.masked_fill((distance < 0) | (powers.abs() < limits.tiny / limits.eps), 0.0).to(dtype)


def has_gaps(mask: torch.Tensor) -> bool:
    """Is a token set that stands after one of its row that is not?"""
    flags = mask_bytes(mask)
    return flags.shape[1] > 1 and any_above(flags[:, 1:], flags[:, :-1])


class TokenCompaction:
    """Moves the set tokens of each row to its left end and back, so that time runs over them alone.

    Tool output inside a response (mask 0) is then no step of the policy: neither discounted nor bootstrapped from.
    """

    def __init__(self, mask: torch.Tensor, may_have_gaps: bool = True) -> None:
        self.mask = mask.bool()
        self.flags = mask_bytes(self.mask)
        # Without gaps the set tokens are at the left already, and nothing has to move.
        self.has_gaps = may_have_gaps and has_gaps(mask)
        self.at_left = self.mask
        if self.has_gaps:
            lengths = self.flags.sum(-1, dtype=torch.int32, keepdim=True)
            self.at_left = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device) < lengths

    def compact(self, values: torch.Tensor) -> torch.Tensor:
        """Set tokens first, zeros after."""
        return _move(values, self.mask, self.at_left) if self.has_gaps else zero_outside(values, self.flags.float())

    def compact_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Like compact, but what stands on an unset token goes to the last set token before it: a reward that the
        environment gives after an action belongs to that action. May return `rewards` itself."""
        if not any_above(mask_bytes(rewards), self.flags):
            return self.compact(rewards) if self.has_gaps else rewards
        has_token = self.mask.any(-1, keepdim=True)
        slot = self.flags.cumsum(-1) - 1
        if bool(((slot < 0) & has_token & (rewards != 0)).any()):
            raise ValueError("token_level_rewards has a reward before the first token of a response (response_mask 1)")
        return torch.zeros_like(rewards).scatter_add_(1, slot.clamp(min=0), rewards * has_token)

    def spread(self, compacted: torch.Tensor) -> torch.Tensor:
        """The inverse of compact, for values that are zero after the set tokens: zeros on unset tokens."""
        return _move(compacted, self.at_left, self.mask) if self.has_gaps else compacted


def _move(values: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The values where `source` is set, put where `target` is: two masks of as many tokens in each row."""
    moved = torch.zeros_like(values, memory_format=torch.contiguous_format)
    if values.device.type == "cpu":  # five times as fast in NumPy
        moved.numpy()[target.numpy()] = values.detach().numpy()[source.numpy()]
    else:
        moved[target] = values[source]
    return moved
