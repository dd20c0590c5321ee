"""Packed sequences: documents laid end to end in one row, and attention that never crosses their borders."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshrl.parallel.varlen import attend_varlen

if TYPE_CHECKING:
    from meshrl.parallel.delta_rule import DeltaRule

HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass  # not frozen, see AttentionContext
class PackedSequences:
    """The lengths of the documents of one packed row, with everything attention and positions derive from them."""

    lengths: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str) -> PackedSequences:
        """Describes a row of documents with these lengths (in the order they lie in the row)."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"packed documents need at least one token each, got lengths {list(lengths)[:8]}")
        return PackedSequences(tuple(lengths), torch.device(device))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Borders of the documents, int32 [documents + 1]."""
        return self._send(self._borders.int())

    @cached_property
    def position_ids(self) -> Tensor:
        """Positions that restart in every document, int64 [1, tokens]."""
        offsets = torch.repeat_interleave(self._borders[:-1], torch.tensor(self.lengths))
        return self._send((torch.arange(self.num_tokens) - offsets)[None])

    @property
    def _borders(self) -> Tensor:
        return torch.tensor((0, *self.lengths)).cumsum(0)

    def _send(self, tensor: Tensor) -> Tensor:
        """To the device by way of pinned memory, so that the host does not wait for the device's work in hand."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def ready(self) -> PackedSequences:
        """Sends everything now instead of when it is first needed."""
        _ = self.cu_seqlens, self.position_ids
        return self

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbouring documents of equal length as (first token, documents, length): each run is a plain rectangle."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in self.lengths:
            if runs and runs[-1][2] == length:
                first, count, _ = runs[-1]
                runs[-1] = (first, count + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return runs

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Causal attention inside each document; see `AttentionContext`."""
        # A window that hides something would need a mask of length x length, and kernels that take one.
        is_masked = sliding_window is not None and self.max_length > sliding_window
        if query.is_cuda and query.dtype in HALF_TYPES and (len(self.runs) > 1 or is_masked):
            return self._attend_varlen(query, key, value, scaling, sliding_window)
        return self._attend_runs(query, key, value, scaling, sliding_window)

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """A state for each document, which begins with it; see `RecurrentContext`."""
        return rule.over(channels, decay, rate, self)[0]

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        borders, longest = (self.cu_seqlens, self.cu_seqlens), (self.max_length, self.max_length)
        return attend_varlen(q, k, v, borders, longest, scaling, window)[None]

    def _attend_runs(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """One SDPA call for each run of equal lengths: no padding, no mask, and few calls when lengths are sorted."""
        group = query.shape[1] // key.shape[1]
        outputs = []
        for first, count, length in self.runs:
            q, k, v = (
                x[0, :, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1)
                for x in (query, key, value)
            )
            mask = None
            if window is not None and length > window:
                mask = causal_window(length, window, query.device)
            with fastest_attention(query):
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=group > 1
                )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None] if len(outputs) > 1 else outputs[0][None]


def fastest_attention(query: Tensor) -> AbstractContextManager[Any]:
    """On GPUs, half types prefer cuDNN's kernels, which use Hopper's own instructions."""
    if not query.is_cuda or query.dtype not in HALF_TYPES:
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def causal_window(length: int, window: int, device: torch.device) -> Tensor:
    """True where a token may look: at itself and the `window - 1` tokens before it."""
    steps = torch.arange(length, device=device)
    distance = steps[:, None] - steps[None, :]
    return (distance >= 0) & (distance < window)
