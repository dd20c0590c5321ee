"""x_t + d * x_{t+1} + d^2 * x_{t+2} + ... for whole matrices at once, and the same over the set tokens of a mask."""

from functools import lru_cache

import torch

from meshrl.algorithms.masked import zero_outside

CHUNK = 32


def discounted_suffix_sum(values: torch.Tensor, discount: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """y[:, t] = values[:, t] + discount * y[:, t + 1], without a loop over time.

    Time is cut into chunks; inside a chunk the sum is a product with a triangular matrix of powers, and the chunks'
    first sums obey the same recurrence with discount ** chunk, so two or three levels cover any length. `out` is memory
    that may be used for the result, which is returned.
    """
    rows, length = values.shape
    if length <= CHUNK:
        return values @ _power_matrix(length, discount, values.dtype, values.device)
    chunks = -(-length // CHUNK)
    padded = values if length % CHUNK == 0 else torch.nn.functional.pad(values, (0, chunks * CHUNK - length))
    matrix = _power_matrix(CHUNK, discount, values.dtype, values.device)
    target = None if out is None or padded is not values else out.view(rows * chunks, CHUNK)
    inside = torch.mm(padded.reshape(rows * chunks, CHUNK), matrix, out=target).view(rows, chunks, CHUNK)
    from_here = discounted_suffix_sum(inside[:, :, 0].contiguous(), discount**CHUNK)
    # discount ** (CHUNK - t) at place t of a chunk: the first column, once more discounted, the other way round.
    powers = matrix[:, 0].flip(0) * discount
    inside[:, :-1].addcmul_(from_here[:, 1:, None], powers)
    return inside.view(rows, chunks * CHUNK)[:, :length]


@lru_cache(maxsize=32)
def _power_matrix(size: int, discount: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """M[s, t] = discount ** (s - t) for s >= t, else 0."""
    steps = torch.arange(size, device=device)
    distance = steps[:, None] - steps[None, :]
    powers = torch.pow(torch.tensor(discount, dtype=torch.float64, device=device), distance.clamp(min=0))
    return powers.masked_fill(distance < 0, 0.0).to(dtype)


class TokenCompaction:
    """Moves the set tokens of each row to its left end and back, so that time runs over them alone.

    Tool output inside a response (mask 0) is then no step of the policy: neither discounted nor bootstrapped from.
    """

    def __init__(self, mask: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
        self.weight = mask.float()
        self._scratch = torch.empty_like(self.weight) if scratch is None else scratch
        self._source: torch.Tensor | None = None  # places of the set tokens; None: they are at the left already
        steps = torch.sub(self.weight[:, 1:], self.weight[:, :-1], out=self._scratch[:, 1:])
        if steps.numel() and float(steps.amax()) > 0:
            columns = torch.arange(mask.shape[1], device=mask.device)
            at_left = columns < self.weight.sum(-1, keepdim=True)
            # Both list the same tokens in the same order, row by row.
            self._source, self._target = mask.reshape(-1).nonzero().view(-1), at_left.view(-1).nonzero().view(-1)

    def compact(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Set tokens first, zeros after. `out` is memory that may be used for it."""
        if self._source is None:
            return zero_outside(values, self.weight, out=out)
        return _move(values, self._source, self._target)

    def compact_rewards(self, rewards: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Like compact, but what stands on an unset token goes to the last set token before it: a reward that the
        environment gives after an action belongs to that action."""
        kept = torch.mul(rewards, self.weight, out=out)
        outside = torch.sub(rewards, kept, out=self._scratch)
        if not float(torch.linalg.vector_norm(outside)):
            return kept if self._source is None else self.compact(rewards)
        has_token = self.weight.any(-1, keepdim=True)
        slot = self.weight.long().cumsum(-1) - 1
        if bool(((slot < 0) & has_token & (outside != 0)).any()):
            raise ValueError("token_level_rewards has a reward before the first token of a response (response_mask 1)")
        return torch.zeros_like(rewards).scatter_add_(1, slot.clamp(min=0), rewards * has_token)

    def spread(self, compacted: torch.Tensor) -> torch.Tensor:
        """The inverse of compact, for values that are zero after the set tokens: zeros on unset tokens."""
        if self._source is None:
            return compacted
        return _move(compacted, self._target, self._source)


def _move(values: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    moved = torch.zeros_like(values, memory_format=torch.contiguous_format)
    moved.view(-1)[target] = values.reshape(-1)[source]
    return moved
