"""The critic's loss."""

import torch

from meshrl.algorithms.aggregation import Count, agg_loss, token_mean_metric
from meshrl.algorithms.checks import check_matrix
from meshrl.algorithms.stats import BatchStats, resolve_stats


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    stats: BatchStats | None = None,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: Count | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error, the larger of that of `vpreds` and of `vpreds` clipped to `values` ± `cliprange_value`.

    Returns the loss (as every loss here: the share of the global one times dp_size) and the additive share of the
    fraction of tokens where the clipped error was the larger.
    """
    check_matrix(vpreds=vpreds, returns=returns, values=values, response_mask=response_mask)
    clipped_predictions = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain = (vpreds - returns).square()
    clipped = (clipped_predictions - returns).square()
    if stats is None and batch_num_tokens is not None:
        stats = BatchStats(dp_size, int(batch_num_tokens), _whole(global_batch_size), _real(loss_scale_factor))
    loss = agg_loss(
        torch.maximum(plain, clipped),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
        stats=stats,
    )
    clip_fraction = token_mean_metric((clipped > plain).float(), response_mask, resolve_stats(stats, response_mask))
    return 0.5 * loss, clip_fraction


def _whole(count: Count | None) -> int | None:
    return None if count is None else int(count)


def _real(count: Count | None) -> float | None:
    return None if count is None else float(count)
