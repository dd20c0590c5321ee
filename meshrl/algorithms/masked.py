"""Sums, means and whitening over the set elements of a mask. What stands under a zero of the mask never matters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshrl.algorithms.checks import check_not_empty

BLOCK_ELEMENTS = 2**18  # a megabyte of float32 for each thread
# Squared deviations below this share of the squares may be those of rounding alone.
NEARLY_EQUAL = 1e-6


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of the values where `mask` is set; NaN or inf under a zero does not leak in."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of the values where `mask` is set; a row without any set element has mean 0."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance over the set elements; one element alone has variance 0."""
    count = mask.bool().sum()
    squares = masked_sum((values - masked_mean(values, mask)) ** 2, mask)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def mask_bytes(mask: torch.Tensor) -> torch.Tensor:
    """The mask as int8, 0 or 1; a bool mask is not copied. On a CPU int8 becomes float six times as fast as bool does,
    and moves through memory eight times as fast as int64."""
    return mask.bool().view(torch.int8)


def any_above(flags: torch.Tensor, others: torch.Tensor) -> bool:
    """Is any of the `mask_bytes` 1 where the other is 0? On a CPU amax() is much faster than any()."""
    return bool((flags > others).view(torch.int8).amax())


def zero_outside(values: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values where `weight`, a mask as float, is 1, and 0 elsewhere.

    On a CPU the product is ten times as fast as a selection, but it keeps NaN and inf; only then a selection is made.
    """
    product = torch.mul(values, weight, out=out)
    if math.isfinite(float(product.sum())):
        return product
    return product.copy_(values.masked_fill(weight == 0, 0.0))


def row_blocks(matrix: torch.Tensor, buffers: int = 0) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Slices of rows small enough for a CPU's cache, where a chain of operations is several times as fast; on other
    devices all rows at once. With each come float32 `buffers` of its shape, the same memory every time: new memory
    costs a CPU more than the arithmetic on it."""
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
    """The sum of the squares, row by row first: one long float32 sum would lose digits."""
    return float(torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=-1))) ** 2


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of set elements, gathered block by block without loss of precision."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: torch.Tensor, weight: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
        """Take in a block of values that are 0 where `weight`, a mask as float, is 0."""
        count = float(weight.sum())
        if count == 0:
            return
        mean = float(values.sum()) / count
        around_zero = _squared_norm(values)
        squares = around_zero - count * mean**2
        if not squares > 0.5 * around_zero:  # the difference would lose digits
            squares = _squared_norm(torch.sub(values, mean, out=scratch).mul_(weight))
            if squares <= NEARLY_EQUAL * around_zero:
                same = float(values.flatten()[weight.argmax()])
                if torch.equal(values, weight * same):  # the mean of equal values is that value, not one near it
                    mean, squares = same, 0.0
        total, step = self.count + count, mean - self.mean
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count = total

    def scale(self, eps: float) -> float:
        """The factor that brings the variance (n - 1) to 1."""
        return 1.0 / math.sqrt(self.squares / max(self.count - 1, 1) + eps)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, eps: float = 1e-8) -> torch.Tensor:
    """Scale the set elements of a matrix to variance 1 and, with `shift_mean`, mean 0. The others come back as 0."""
    check_not_empty(mask, "mask")
    kept, moments, mask = torch.empty_like(values), Moments(), mask.bool()
    for rows, _ in row_blocks(values):
        weight = mask_bytes(mask[rows]).to(values.dtype)
        moments.add(zero_outside(values[rows], weight, out=kept[rows]), weight)
    return whiten_(kept, mask, moments, shift_mean, eps)


def whiten_(
    values: torch.Tensor, mask: torch.Tensor, moments: Moments, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    """`masked_whiten` in place, of values that are 0 outside the mask already and whose moments are known."""
    scale = moments.scale(eps)
    shift = moments.mean if shift_mean else moments.mean - moments.mean / scale
    for rows, (weight,) in row_blocks(values, buffers=1):
        weight.copy_(mask_bytes(mask[rows]))
        values[rows].sub_(weight, alpha=shift).mul_(scale)
    return values
