"""Masked statistics, loss aggregation and argument checks. Values outside a mask never influence a result.

* `masked_sum`, `masked_mean`, `masked_var`, `masked_whiten`, `Moments`: statistics of the set elements of a mask.
* `BatchStats`, `CovarianceStats`: global counts of a mini-batch, by which losses are normalised.
* `agg_loss`, `token_mean_metric`: aggregation of token losses and of metrics.
* `check_matrix`, `check_finite`, ...: checks of tensor arguments.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from meshrl.registry import unknown_name

BLOCK_ELEMENTS = 2**18  # 1 MiB of float32 per thread
# If the squared deviations are below this fraction of the sum of squares, rounding alone may cause the deviations.
NEARLY_EQUAL = 1e-6


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum the values at the set elements of `mask`. NaN or inf outside the mask has no effect."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Average the values at the set elements of `mask`. A row without a set element has mean 0."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Compute the variance of the values at the set elements of `mask`. A single set element has variance 0."""
    count = mask.bool().sum()
    squares = masked_sum((values - masked_mean(values, mask)) ** 2, mask)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def mask_bytes(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask as int8 with values 0 or 1. A bool mask is not copied.

    On a CPU, int8 is converted to float six times as fast as bool, and moves through memory eight times as fast as
    int64.
    """
    return mask.bool().view(torch.int8)


def any_above(flags: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether `flags` is 1 at any position at which `others` is 0; both come from `mask_bytes`.

    The code uses amax(), which is much faster than any() on a CPU.
    """
    return bool((flags > others).view(torch.int8).amax())


def zero_outside(values: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values where `weight`, a float mask, is 1, and 0 elsewhere.

    On a CPU a product is ten times as fast as a selection, but a product keeps NaN and inf. The selection is computed
    only if the product is not finite.
    """
    product = torch.mul(values, weight, out=out)
    if math.isfinite(float(product.sum())):
        return product
    return product.copy_(values.masked_fill(weight == 0, 0.0))


def row_blocks(matrix: torch.Tensor, buffers: int = 0) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield slices of rows, with `buffers` float32 scratch tensors of each slice's shape.

    On a CPU each slice fits the cache, so that a chain of operations is several times as fast. On other devices one
    slice covers all rows. All slices share the scratch memory, because allocation costs a CPU more than the arithmetic.
    """
    rows, columns = matrix.shape
    elements = BLOCK_ELEMENTS * torch.get_num_threads()
    step = max(elements // max(columns, 1), 1) if matrix.device.type == "cpu" else max(rows, 1)
    memory = torch.empty((buffers, min(step, rows), columns), dtype=torch.float32, device=matrix.device)
    block = list(memory)
    for start in range(0, rows, step):
        if start + step > rows > step:
            block = [buffer[: rows - start] for buffer in memory]
        yield slice(start, start + step), block


def _squared_norm(matrix: torch.Tensor) -> float:
    """Return the sum of the squares of a matrix, summed by rows first, because one long float32 sum loses digits."""
    return float(torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=-1))) ** 2


@dataclass
class Moments:
    """The count, mean and sum of squared deviations of set elements, accumulated by blocks at full precision."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: torch.Tensor, weight: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
        """Add a block of values, which must be 0 where `weight`, a float mask, is 0."""
        count = float(weight.sum())
        if count == 0:
            return
        mean = float(values.sum()) / count
        around_zero = _squared_norm(values)
        squares = around_zero - count * mean**2
        if not squares > 0.5 * around_zero:  # the difference has lost digits
            squares = _squared_norm(torch.sub(values, mean, out=scratch).mul_(weight))
            if squares <= NEARLY_EQUAL * around_zero:
                same = float(values.flatten()[weight.argmax()])
                if torch.equal(values, weight * same):  # the mean of equal values is exactly that value
                    mean, squares = same, 0.0
        total, step = self.count + count, mean - self.mean
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count = total

    def scale(self, eps: float) -> float:
        """Return the factor by which to multiply the values to get variance (n - 1) 1."""
        return 1.0 / math.sqrt(self.squares / max(self.count - 1, 1) + eps)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, eps: float = 1e-8) -> torch.Tensor:
    """Scale the set elements of a matrix `[B, T]` to variance 1 and, with `shift_mean`, shift their mean to 0.

    Elements outside the mask are 0 in the result.
    """
    check_not_empty(mask, "mask")
    kept, moments, mask = torch.empty_like(values), Moments(), mask.bool()
    for rows, _ in row_blocks(values):
        weight = mask_bytes(mask[rows]).to(values.dtype)
        moments.add(zero_outside(values[rows], weight, out=kept[rows]), weight)
    return whiten_(kept, mask, moments, shift_mean, eps)


def whiten_(
    values: torch.Tensor, mask: torch.Tensor, moments: Moments, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    """Whiten values in place, given their moments. The values must be 0 outside the mask already."""
    scale = moments.scale(eps)
    shift = moments.mean if shift_mean else moments.mean - moments.mean / scale
    for rows, (weight,) in row_blocks(values, buffers=1):
        weight.copy_(mask_bytes(mask[rows]))
        values[rows].sub_(weight, alpha=shift).mul_(scale)
    return values


# The global counts of a mini-batch, by which every loss is normalised.


@dataclass(frozen=True)
class CovarianceStats:
    """The selection of clip_cov, kl_cov or m2po over the whole mini-batch: two means, and bounds of selected tokens."""

    mean_advantage: float
    mean_log_prob: float
    bound: float = float("-inf")
    key_bound: int = -1


@dataclass(frozen=True)
class BatchStats:
    """Counts of one mini-batch over all data-parallel ranks and all micro-batches.

    A loss normalised by these counts and multiplied by `dp_size` has the same gradient for every split of the
    mini-batch. Gradients of micro-batches add up, and averaging gradients over the `dp_size` ranks cancels the factor.
    """

    dp_size: int = 1
    num_tokens: int | None = None  # response tokens with mask 1
    num_sequences: int | None = None  # samples with at least one such token
    loss_scale_factor: float | None = None  # the horizon of seq-mean-token-sum-norm
    covariance: CovarianceStats | None = None  # only for clip_cov, kl_cov and m2po

    def __post_init__(self) -> None:
        if self.dp_size < 1:
            raise ValueError(f"BatchStats.dp_size must be at least 1, got {self.dp_size}")
        for name in ("num_tokens", "num_sequences"):
            count = getattr(self, name)
            if count is not None and count < 0:
                raise ValueError(f"BatchStats.{name} must not be negative, got {count}")
        if self.loss_scale_factor is not None and self.loss_scale_factor <= 0:
            raise ValueError(f"BatchStats.loss_scale_factor must be positive, got {self.loss_scale_factor}")

    @classmethod
    def of(cls, response_mask: torch.Tensor, dp_size: int = 1, loss_scale_factor: float | None = None) -> "BatchStats":
        """Count the tokens and sequences of this mask `[B, T]`; `loss_scale_factor` defaults to the width T."""
        tokens_per_sequence = response_mask.bool().sum(-1)
        counts = torch.stack([tokens_per_sequence.sum(), (tokens_per_sequence > 0).sum()]).tolist()
        width = float(response_mask.shape[-1]) or None
        return cls(dp_size, int(counts[0]), int(counts[1]), loss_scale_factor or width)

    def __add__(self, other: "BatchStats") -> "BatchStats":
        """Return the combined counts of two parts of one mini-batch."""
        if self.num_tokens is None or other.num_tokens is None:
            raise ValueError("BatchStats without num_tokens cannot be added")
        if self.num_sequences is None or other.num_sequences is None:
            raise ValueError("BatchStats without num_sequences cannot be added")
        if self.loss_scale_factor != other.loss_scale_factor:
            raise ValueError(
                f"loss_scale_factor of the parts differs ({self.loss_scale_factor} and {other.loss_scale_factor}): "
                "give every part the same, such as the maximal response length"
            )
        return replace(
            self,
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
        )


def resolve_stats(stats: BatchStats | None, response_mask: torch.Tensor) -> BatchStats:
    """Return `stats` with missing counts taken from `response_mask`, which must then be the whole mini-batch."""
    if stats is None:
        return BatchStats.of(response_mask)
    if stats.num_tokens is not None and stats.num_sequences is not None:
        return stats
    if stats.dp_size > 1:
        raise ValueError(
            f"BatchStats with dp_size={stats.dp_size} needs num_tokens and num_sequences of the global mini-batch, "
            f"got {stats.num_tokens} and {stats.num_sequences}"
        )
    local = BatchStats.of(response_mask)
    return replace(
        stats,
        num_tokens=local.num_tokens if stats.num_tokens is None else stats.num_tokens,
        num_sequences=local.num_sequences if stats.num_sequences is None else stats.num_sequences,
    )


# Aggregation of a matrix of token losses to a scalar, normalised by the global counts.

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

Count = int | float | torch.Tensor


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: Count | None = None,
    stats: BatchStats | None = None,
) -> torch.Tensor:
    """Aggregate token losses `[B, T]` to this micro-batch's share of the global loss, times `dp_size`.

    The global counts come from `stats` or from the single arguments. Missing counts are taken from `loss_mask`, which
    must then be the whole mini-batch (`dp_size` 1).
    """
    check_matrix(loss_mat=loss_mat, loss_mask=loss_mask)
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, list(LOSS_AGG_MODES))
    if stats is not None:
        stats = resolve_stats(stats, loss_mask)
        dp_size, batch_num_tokens, global_batch_size = stats.dp_size, stats.num_tokens, stats.num_sequences
        loss_scale_factor = stats.loss_scale_factor
        if loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
            raise ValueError(
                "seq-mean-token-sum-norm needs stats.loss_scale_factor (for example the maximal response length): "
                "the width of one micro-batch is not the same for every split"
            )
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        tokens = _count("batch_num_tokens", batch_num_tokens, loss_mask.bool(), dp_size)
        return masked_sum(loss_mat, loss_mask) / tokens * dp_size

    tokens_per_sequence = loss_mask.bool().sum(-1)
    sequences = _count("global_batch_size", global_batch_size, tokens_per_sequence > 0, dp_size)
    sequence_losses = masked_sum(loss_mat, loss_mask, dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        sequence_losses = sequence_losses / tokens_per_sequence.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        sequence_losses = sequence_losses / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return sequence_losses.sum() / sequences * dp_size


def token_mean_metric(values: torch.Tensor, response_mask: torch.Tensor, stats: BatchStats) -> torch.Tensor:
    """Return this micro-batch's additive share of the mean of `values` over all response tokens of the mini-batch."""
    assert stats.num_tokens is not None
    return masked_sum(values.detach().float(), response_mask) / max(stats.num_tokens, 1)


def _count(name: str, given: Count | None, counted: torch.Tensor, dp_size: int) -> Count:
    """Return the given global count, or the local count if `dp_size` is 1. Raise `ValueError` for zero."""
    if given is None:
        if dp_size > 1:
            raise ValueError(f"dp_size is {dp_size}: {name} must be given, counted over all data-parallel ranks")
        given = int(counted.sum())
    if not isinstance(given, torch.Tensor) and given <= 0:
        raise ValueError(f"{name} is {given}: the mini-batch has no response token, the mask is empty everywhere")
    return given


# Checks of tensor arguments. Error messages contain the argument's name and the position.


def check_same_shape(**tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` if the tensors differ in shape. Tensors that are None are ignored."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but {first_name} has {tuple(first.shape)}: they must agree"
            )


def check_matrix(**tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` unless the tensors are matrices `[B, T]` of the same shape. None is ignored."""
    check_same_shape(**tensors)
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be [batch, response_length], got shape {tuple(tensor.shape)}")


def check_finite(name: str, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Raise `ValueError` with the first position if `tensor` has a NaN or inf inside `mask` (default: anywhere)."""
    bad = ~torch.isfinite(tensor)
    if mask is not None:
        bad &= mask.bool()
    if bool(bad.any()):
        places = bad.nonzero()
        first = tuple(int(i) for i in places[0])
        raise ValueError(f"{name} has {len(places)} non-finite values, the first is {tensor[first].item()} at {first}")


def check_not_empty(mask: torch.Tensor, name: str = "response_mask") -> None:
    """Raise `ValueError` if no element of `mask` is set."""
    # The first row of a response mask nearly always has a set element, which saves a pass over the whole matrix.
    if not bool(mask[:1].any()) and not bool(mask.any()):
        raise ValueError(f"{name} of shape {tuple(mask.shape)} selects no token: there is nothing to compute on")


def check_length(name: str, length: int, batch: int) -> None:
    """Raise `ValueError` unless a per-sample argument has one entry per sample."""
    if length != batch:
        raise ValueError(f"{name} has {length} entries for a batch of {batch} samples")
