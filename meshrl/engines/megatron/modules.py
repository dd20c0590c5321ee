"""Modules that Megatron-Core lacks without TransformerEngine.

An RMS norm under sequence parallelism, and attention over packed documents, also with context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from meshrl.engines.megatron.zigzag import ZigZag
from meshrl.parallel.attention import PackedSequences


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's description of a packed row, with meshrl's `documents` and, under context parallelism, `zigzag`."""

    documents: PackedSequences | None = None
    zigzag: ZigZag | None = None


class RMSNorm(nn.Module):
    """A root-mean-square norm whose gradient is summed over ranks that hold different tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(nn.Module):
    """Causal attention inside each document of a packed row, as a Megatron module."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, softmax_scale: float | None = None, **others: Any
    ):
        super().__init__()
        self.layer_number, self.softmax_scale = layer_number, softmax_scale
        self.cp_group = others["pg_collection"].cp
        looks_back = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if looks_back and config.window_size else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedDocuments,
        **_: Any,
    ) -> Tensor:
        """Map queries, keys and values `[tokens, heads, dim]` to `[tokens, heads * dim]`."""
        scaling = self.softmax_scale or query.shape[-1] ** -0.5
        zigzag = packed_seq_params.zigzag
        if zigzag is None:
            assert packed_seq_params.documents is not None
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            out = packed_seq_params.documents.attend(self.layer_number, q, k, v, scaling, self.window)[0]
        else:
            # The backward of the gather sums over all ranks the gradients of this rank's keys and values.
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[zigzag.order]
                for x in (key, value)
            )
            out = zigzag.attend(query, key, value, scaling, self.window)
        return out.reshape(len(out), -1)
