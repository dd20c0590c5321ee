"""Megatron-Core's data parallelism and optimizer around the model's chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from meshrl.config.engine import MegatronConfig
from meshrl.config.optim import OptimConfig


def with_gradients(chunks: Sequence[nn.Module], config: TransformerConfig, megatron: MegatronConfig) -> list[Any]:
    """The chunks with float32 gradient buffers, summed over data-parallel and context-parallel ranks."""
    if megatron.expert_tensor_parallel_size not in (None, megatron.tensor_model_parallel_size):
        # Experts are then copied over other ranks than the rest; Megatron-Core marks them with ep > 1 alone.
        for name, param in (pair for chunk in chunks for pair in chunk.named_parameters()):
            if ".experts." in name:
                param.allreduce = False  # type: ignore[attr-defined]
    sharded = megatron.use_distributed_optimizer
    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        overlap_param_gather=megatron.overlap_param_gather,
        use_distributed_optimizer=sharded,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(config, how, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]


def build_optimizer(model: Sequence[Any], optim: OptimConfig, megatron: MegatronConfig, grad_clip: float) -> Any:
    """AdamW over all parameters alike, as in the other engines: norms and biases decay too."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=0.0,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=grad_clip,
        bf16=model[0].config.bf16,
        params_dtype=model[0].config.params_dtype,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_param_gather=megatron.overlap_param_gather,
    )
    return get_megatron_optimizer(config, list(model), config_overrides={})


def clip_and_step(optimizer: ChainedOptimizer, grad_clip: float) -> float:
    """Clips and applies the gradient unless it is not finite; returns its norm before clipping."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    with torch.no_grad():
        for part in optimizer.chained_optimizers:
            if not getattr(part, "is_stub_optimizer", False) and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, max_norm=grad_clip, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def ensure_states(optimizer: ChainedOptimizer) -> None:
    """Gives torch's AdamW the states it would make at its first step: checkpoints need somewhere to read into."""
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if not isinstance(inner, torch.optim.AdamW):
            continue  # fused kinds have their own way
        for group in inner.param_groups:
            for param in group["params"]:
                if not inner.state[param]:
                    inner.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
