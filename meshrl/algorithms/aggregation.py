"""From a matrix of token losses to one number, normalised by the global counts."""

import torch

from meshrl.algorithms.checks import check_matrix
from meshrl.algorithms.masked import masked_sum
from meshrl.algorithms.stats import BatchStats, resolve_stats
from meshrl.registry import unknown_name

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
    """This micro-batch's share of the global loss, times `dp_size`. Counts come from `stats` or one by one.

    Counts that are not given are those of `loss_mask`, which must then be the whole mini-batch (`dp_size` 1).
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
    """This micro-batch's additive share of the mean of `values` over all response tokens of the mini-batch."""
    assert stats.num_tokens is not None
    return masked_sum(values.detach().float(), response_mask) / max(stats.num_tokens, 1)


def _count(name: str, given: Count | None, counted: torch.Tensor, dp_size: int) -> Count:
    """The given global count, or the local one where that is the global one; never zero."""
    if given is None:
        if dp_size > 1:
            raise ValueError(f"dp_size is {dp_size}: {name} must be given, counted over all data-parallel ranks")
        given = int(counted.sum())
    if not isinstance(given, torch.Tensor) and given <= 0:
        raise ValueError(f"{name} is {given}: the mini-batch has no response token, the mask is empty everywhere")
    return given
