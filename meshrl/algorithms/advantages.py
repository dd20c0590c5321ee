"""The registry of advantage estimators, and the estimators without groups: GAE, REINFORCE++, ReMax, distillation.

Every estimator takes tensors `[B, T]` (batch, response length) and returns `(advantages, returns)` of that shape.
Both are zero where `response_mask` is zero. A response consists of the tokens with mask 1. Tokens with mask 0 inside
a response are tool output and do not count as steps of the policy.

* `register_adv_est`, `get_adv_estimator_fn`, `compute_advantage`: register, find and run an estimator by its name.
* `outcome_scores`, `to_tokens`: convert between rewards of tokens and one number per sample.
* `discounted_suffix_sum`, `TokenCompaction`: discounted sums over time, and removal of tool output before them.
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
    """Return a decorator that registers an advantage estimator under `name`, a string or an enum member with one."""
    return ADVANTAGE_ESTIMATORS.register(str(getattr(name, "value", name)))


def get_adv_estimator_fn(name: Any) -> Callable[..., Advantages]:
    """Return the advantage estimator registered as `name`, or load the user's function at `file.py:name`."""
    return ADVANTAGE_ESTIMATORS.get(str(getattr(name, "value", name)))


def estimator_takes(name: str, argument: str) -> bool:
    """Return whether the signature of an estimator has this parameter.

    Callers use it to compute an expensive input, such as a forward pass over the batch, only for estimators that need
    the input.
    """
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
    """Run the estimator `name` with the arguments that its signature has, and return `(advantages, returns)` `[B, T]`.

    Raise `ValueError` if a required argument is missing. `gamma` and `lam` default to the values in `config`, else to
    1. `extra` holds inputs of some estimators only, such as `reward_baselines` (remax) or `sum_pi_squared`.
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
    """Return the discount `name` ("gamma" or "lam"): the given value, else the value in `config`, else 1."""
    if given is None:
        given = field_of(config, name)
    return 1.0 if given is None else float(given)


def outcome_scores(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of each sample's token rewards `[B, T]` as a float32 vector `[B]`.

    Raise `ValueError` for NaN, inf, different shapes or an empty mask.
    """
    check_matrix(token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_not_empty(response_mask)
    scores = token_level_rewards.detach().sum(-1, dtype=torch.float32)
    # Every NaN or inf reaches the sum of its row, so the whole matrix is searched only to report the position.
    if not math.isfinite(float(scores.sum())):
        check_finite("token_level_rewards", token_level_rewards)
        check_finite("the sum of token_level_rewards", scores)
    return scores


def to_tokens(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Repeat each sample's score `[B]` on its response tokens, as `[B, T]` with zeros outside the mask."""
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
    """Compute advantages and returns by generalised advantage estimation (arXiv:1506.02438).

    Advantages are whitened over all tokens of the batch. Returns are not whitened.
    """
    check_matrix(token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    check_not_empty(response_mask)
    mask = response_mask.bool()
    returns, advantages, moments = _gae(token_level_rewards, values, mask, gamma, lam)
    # A NaN or inf in either input reaches the moments, so the matrices are searched only to report the position.
    if not math.isfinite(moments.squares):
        check_finite("token_level_rewards", token_level_rewards)
        check_finite("values", values, mask)
        # The checks above passed, so the NaN or inf lies outside the mask. Such values are set to zero.
        returns, advantages, moments = _gae(token_level_rewards, values.masked_fill(~mask, 0.0), mask, gamma, lam)
        check_finite("returns", returns)
    return whiten_(advantages, mask, moments), returns


def _gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor, Moments]:
    """Compute the returns, the advantages before whitening and their moments in one pass over blocks of rows."""
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
    """Compute REINFORCE++ advantages (arXiv:2501.03262): discounted rewards to go, whitened over the batch's tokens."""
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
    """Compute ReMax advantages (arXiv:2310.10505): rewards to go minus the greedy response's reward.

    `reward_baselines` `[B]` holds the reward of the greedy response to each sample's prompt.
    """
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
    """Compute advantages for on-policy distillation: teacher log-prob minus old log-prob of each token.

    Each token gets credit only for its own log-ratio, without discounted later tokens. The expected advantage under
    the policy is minus the reverse KL. The policy gradient is that of the sum of per-token KLs, if the prefix of each
    token is held fixed.
    """
    check_matrix(ref_log_prob=ref_log_prob, old_log_probs=old_log_probs, response_mask=response_mask)
    check_not_empty(response_mask)
    mask = response_mask.bool()
    advantages = (ref_log_prob.float() - old_log_probs.float()).masked_fill_(~mask, 0.0)
    if not math.isfinite(float(advantages.sum())):
        check_finite("ref_log_prob", ref_log_prob, mask)
        check_finite("old_log_probs", old_log_probs, mask)
    return advantages, advantages.clone()


# Discounted suffix sums x_t + d * x_{t+1} + d^2 * x_{t+2} + ... of whole matrices, optionally over a mask's set tokens.

CHUNK = 32  # on a CPU, a matmul with a matrix of this size costs little more than reading and writing the values
CARRY_CHUNK = 256  # the recurrence over chunks has 1/32 of the values; a larger matrix saves a level of recursion


def discounted_suffix_sum(
    values: torch.Tensor, discount: float, out: torch.Tensor | None = None, chunk: int = CHUNK
) -> torch.Tensor:
    """Compute y[:, t] = values[:, t] + discount * y[:, t + 1] for `[B, T]`, without a loop over time.

    Time is cut into chunks. Inside a chunk, the sum is a matmul with a triangular matrix of powers of `discount`. The
    first sums of the chunks obey the same recurrence with discount ** chunk, so two or three levels of recursion cover
    any length. The contribution of later chunks is added as an outer product. `out` is optional contiguous memory for
    the result.
    """
    if values.dtype == torch.float32 and values.device.type == "cuda":
        # Compute in float64: if the trainer allows TF32 for matmuls, float32 advantages would have a 10-bit mantissa.
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
    following = torch.nn.functional.pad(following, (0, 1)).view(-1, 1)  # no chunk follows the last chunk of a row
    return sums.addmm_(following, matrix[-1:], alpha=discount).view(rows, length)


@lru_cache(maxsize=32)
def _powers(size: int, discount: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the matrix M[s, t] = discount ** (s - t) for s >= t, else 0.

    Powers below tiny / eps of `dtype` are 0 as well, because CPUs are very slow with such small numbers.
    """
    steps = torch.arange(size, device=device)
    distance = steps[:, None] - steps[None, :]
    powers = torch.pow(torch.tensor(discount, dtype=torch.float64, device=device), distance.clamp(min=0))
    limits = torch.finfo(dtype)
    return powers.masked_fill((distance < 0) | (powers.abs() < limits.tiny / limits.eps), 0.0).to(dtype)


def has_gaps(mask: torch.Tensor) -> bool:
    """Return whether any row of the mask `[B, T]` has a set token directly after a token that is not set."""
    flags = mask_bytes(mask)
    return flags.shape[1] > 1 and any_above(flags[:, 1:], flags[:, :-1])


class TokenCompaction:
    """A mapping that moves the set tokens of each row to its left end and back.

    Sums over time then run over the policy's tokens alone. Tool output inside a response (mask 0) is neither
    discounted over nor bootstrapped from.
    """

    def __init__(self, mask: torch.Tensor, may_have_gaps: bool = True) -> None:
        self.mask = mask.bool()
        self.flags = mask_bytes(self.mask)
        # Without gaps the set tokens of each row are at its left end already, and no value is moved.
        self.has_gaps = may_have_gaps and has_gaps(mask)
        self.at_left = self.mask
        if self.has_gaps:
            lengths = self.flags.sum(-1, dtype=torch.int32, keepdim=True)
            self.at_left = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device) < lengths

    def compact(self, values: torch.Tensor) -> torch.Tensor:
        """Move the values `[B, T]` of set tokens to the left end of each row, and fill the rest with zeros."""
        return _move(values, self.mask, self.at_left) if self.has_gaps else zero_outside(values, self.flags.float())

    def compact_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Compact rewards `[B, T]`, and move a reward on an unset token to the last set token before it.

        A reward that the environment gives after an action belongs to that action. May return `rewards` itself.
        """
        if not any_above(mask_bytes(rewards), self.flags):
            return self.compact(rewards) if self.has_gaps else rewards
        has_token = self.mask.any(-1, keepdim=True)
        slot = self.flags.cumsum(-1) - 1
        if bool(((slot < 0) & has_token & (rewards != 0)).any()):
            raise ValueError("token_level_rewards has a reward before the first token of a response (response_mask 1)")
        return torch.zeros_like(rewards).scatter_add_(1, slot.clamp(min=0), rewards * has_token)

    def spread(self, compacted: torch.Tensor) -> torch.Tensor:
        """Invert `compact`: move values back to the set tokens, with zeros on unset tokens.

        `compacted` `[B, T]` must be zero after the compacted tokens of each row.
        """
        return _move(compacted, self.at_left, self.mask) if self.has_gaps else compacted


def _move(values: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Move the values at the set positions of `source` to those of `target`, and return zeros elsewhere.

    Both masks `[B, T]` have the same number of set positions in each row.
    """
    moved = torch.zeros_like(values, memory_format=torch.contiguous_format)
    if values.device.type == "cpu":  # NumPy is five times as fast
        moved.numpy()[target.numpy()] = values.detach().numpy()[source.numpy()]
    else:
        moved[target] = values[source]
    return moved
