"""The global counts of a mini-batch, which every loss is normalised by."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class CovarianceStats:
    """What clip_cov, kl_cov and m2po must know of the whole mini-batch: two means, and bounds of the chosen tokens."""

    mean_advantage: float
    mean_log_prob: float
    bound: float = float("-inf")
    key_bound: int = -1


@dataclass(frozen=True)
class BatchStats:
    """Counts of one mini-batch over all data-parallel ranks and all micro-batches.

    A loss normalised by these counts and multiplied by `dp_size` has the same gradient however the mini-batch is
    split: micro-batches add up, and averaging gradients over the `dp_size` ranks undoes the factor.
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
        """The counts of this mask alone; `loss_scale_factor` defaults to its width."""
        tokens_per_sequence = response_mask.bool().sum(-1)
        counts = torch.stack([tokens_per_sequence.sum(), (tokens_per_sequence > 0).sum()]).tolist()
        width = float(response_mask.shape[-1]) or None
        return cls(dp_size, int(counts[0]), int(counts[1]), loss_scale_factor or width)

    def __add__(self, other: "BatchStats") -> "BatchStats":
        """Counts of two parts of one mini-batch together."""
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
    """`stats` with its missing counts taken from the mask, which must then be the whole mini-batch."""
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
