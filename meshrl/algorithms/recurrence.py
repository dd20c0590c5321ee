"""x_t + d * x_{t+1} + d^2 * x_{t+2} + ... for whole matrices at once, and the same over the set tokens of a mask."""

from functools import lru_cache

import torch

from meshrl.algorithms.masked import any_above, mask_bytes, zero_outside

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
