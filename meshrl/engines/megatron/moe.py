"""The routers' balancing losses: how much each micro-batch weighs, and what they were.

Megatron-Core adds them to the gradient inside the routers, each micro-batch weighted by its tokens (without padding, if
it is told which they are). Divided by all tokens, that is the weighted mean over the mini-batch, whatever the layout.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.schedule import MicroBatch

TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}

# Megatron-Core 0.16 asks whether this is None, but binds the name only where TransformerEngine is installed.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def balancing_losses(config: TransformerConfig) -> list[str]:
    """The names under which Megatron-Core tracks the losses that this config asks for."""
    if config.num_moe_experts is None:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, list | tuple) else [weights] * len(kinds)
    names = [TRACKED[kind] for kind, weight in zip(kinds, weights, strict=True) if weight and kind in TRACKED]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])


class RouterPadding:
    """Tells the routers which tokens are padding; of a stand-in all but one, for a mean over nothing is no number."""

    def __init__(self, config: TransformerConfig, ranks: ParallelRanks):
        self.parts = ranks.tp if config.sequence_parallel else 1
        self.part, self.embeds = ranks.tp_rank, ranks.pp_rank == 0

    def __call__(self, part: MicroBatch) -> Tensor:
        padding = part.row.padding
        if part.rows is None:
            padding = torch.ones_like(padding).index_fill(1, torch.zeros(1, dtype=torch.long, device=padding.device), 0)
        # The first stage cuts the mask as it cuts its tokens, later ones take it as it is.
        if self.parts == 1 or self.embeds:
            return padding
        return padding.chunk(self.parts, 1)[self.part]


def auxiliary_tokens(parts: list[MicroBatch]) -> float:
    """By what the routers' sums are divided: all tokens of the mini-batch."""
    tokens = sum(1 if part.rows is None else len(part.row.row.input_ids) for part in parts)
    total = torch.tensor(float(tokens), device=parts[0].row.device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total)


def take_balancing_metrics(config: TransformerConfig, micro_batches: int, dp: int) -> dict[str, float]:
    """The mean of each balancing loss over layers with experts and micro-batches, the same on every rank."""
    tracker = get_moe_layer_wise_logging_tracker()
    frequency = config.moe_layer_freq
    layers = sum(frequency) if isinstance(frequency, list) else -(-config.num_layers // frequency)
    metrics = {}
    for name in balancing_losses(config):
        held = tracker[name]["values"] if name in tracker else None
        total = torch.zeros(1, device=torch.cuda.current_device()) if held is None else held.sum()[None].clone()
        # Ranks that share a row hold shares of its loss, stages their own layers, data-parallel ranks their own rows.
        dist.all_reduce(total, group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        metrics[f"moe/{name}"] = float(total) / (layers * micro_batches * dp)
    clear_aux_losses_tracker()
    return metrics
