"""Sums, means and whitening over the set elements of a mask. What stands under a zero of the mask never matters."""

import torch

from meshrl.algorithms.checks import check_not_empty


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


def zero_outside(values: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The values where `mask` is set and 0 elsewhere; `weight` is the mask as float.

    On a CPU the product is ten times as fast as a selection, but it keeps NaN and inf; only then a selection is made.
    """
    product = values * weight
    if bool(torch.isfinite(product.sum())):
        return product
    return values.masked_fill(~mask, 0.0)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, eps: float = 1e-8) -> torch.Tensor:
    """Scale the set elements to variance 1 and, with `shift_mean`, mean 0. Masked elements come back as 0."""
    check_not_empty(mask, "mask")
    mask = mask.bool()
    weight = mask.to(values.dtype)
    count = torch.count_nonzero(mask)
    mean = zero_outside(values, mask, weight).sum() / count
    centered = zero_outside(values - mean, mask, weight)
    variance = torch.linalg.vector_norm(centered).square() / (count - 1).clamp(min=1)
    whitened = centered * torch.rsqrt(variance + eps)
    return whitened if shift_mean else whitened + mean * weight
