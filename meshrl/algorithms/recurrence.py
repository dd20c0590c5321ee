"""x_t + d * x_{t+1} + d^2 * x_{t+2} + ... for whole matrices at once, and the same over the set tokens of a mask."""

import torch

from meshrl.algorithms.masked import zero_outside

CHUNK = 64


def discounted_suffix_sum(values: torch.Tensor, discount: float) -> torch.Tensor:
    """y[:, t] = values[:, t] + discount * y[:, t + 1], without a loop over time.

    Time is cut into chunks; inside a chunk the sum is a product with a triangular matrix of powers, and the chunks'
    first sums obey the same recurrence with discount ** chunk, so two or three levels cover any length.
    """
    rows, length = values.shape
    if length <= CHUNK:
        return values @ _power_matrix(length, discount, values)
    chunks = -(-length // CHUNK)
    padded = torch.nn.functional.pad(values, (0, chunks * CHUNK - length))
    inside = (padded.reshape(rows * chunks, CHUNK) @ _power_matrix(CHUNK, discount, values)).reshape(
        rows, chunks, CHUNK
    )
    from_here = discounted_suffix_sum(inside[:, :, 0].contiguous(), discount**CHUNK)
    powers = _powers(torch.arange(CHUNK, 0, -1, device=values.device), discount, values)
    inside[:, :-1].addcmul_(from_here[:, 1:, None], powers)
    return inside.reshape(rows, chunks * CHUNK)[:, :length]


def _power_matrix(size: int, discount: float, like: torch.Tensor) -> torch.Tensor:
    """M[s, t] = discount ** (s - t) for s >= t, else 0."""
    steps = torch.arange(size, device=like.device)
    distance = steps[:, None] - steps[None, :]
    return _powers(distance.clamp(min=0), discount, like).masked_fill(distance < 0, 0.0)


def _powers(exponents: torch.Tensor, discount: float, like: torch.Tensor) -> torch.Tensor:
    return torch.pow(torch.tensor(discount, dtype=torch.float64, device=like.device), exponents).to(like.dtype)


class TokenCompaction:
    """Moves the set tokens of each row to its left end and back, so that time runs over them alone.

    Tool output inside a response (mask 0) is then no step of the policy: neither discounted nor bootstrapped from.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask.bool()
        self.weight = self.mask.float()
        self._source: torch.Tensor | None = None  # places of the set tokens; None: they are at the left already
        if bool((self.mask[:, 1:] > self.mask[:, :-1]).any()):
            columns = torch.arange(mask.shape[1], device=mask.device)
            at_left = columns < self.mask.sum(-1, keepdim=True)
            # Both list the same tokens in the same order, row by row.
            self._source, self._target = self.mask.view(-1).nonzero().view(-1), at_left.view(-1).nonzero().view(-1)

    def compact(self, values: torch.Tensor) -> torch.Tensor:
        """Set tokens first, zeros after."""
        if self._source is None:
            return zero_outside(values, self.mask, self.weight)
        return _move(values, self._source, self._target)

    def compact_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Like compact, but what stands on an unset token goes to the last set token before it: a reward that the
        environment gives after an action belongs to that action."""
        outside = rewards * (1.0 - self.weight)
        if not bool(outside.any()):
            return self.compact(rewards)
        has_token = self.mask.any(-1, keepdim=True)
        slot = self.mask.long().cumsum(-1) - 1
        if bool(((slot < 0) & has_token & (outside != 0)).any()):
            raise ValueError("token_level_rewards has a reward before the first token of a response (response_mask 1)")
        return torch.zeros_like(rewards).scatter_add_(1, slot.clamp(min=0), rewards * has_token)

    def spread(self, compacted: torch.Tensor) -> torch.Tensor:
        """The inverse of compact: zeros on unset tokens."""
        if self._source is None:
            return zero_outside(compacted, self.mask, self.weight)
        return _move(compacted, self._target, self._source)


def _move(values: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    moved = torch.zeros_like(values, memory_format=torch.contiguous_format)
    moved.view(-1)[target] = values.reshape(-1)[source]
    return moved
