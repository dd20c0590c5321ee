"""One kernel for a packed row of documents: FlashAttention 4 where it is installed, else the one that torch has."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float,
    window: int | None,
) -> Tensor:
    """Attention of query [tokens, heads, dim], causal in each document and aligned to its last key.

    `borders` (int32 [documents + 1]) and `longest` are those of the queries and those of the keys.
    """
    dim = value.shape[-1]
    if dim < query.shape[-1]:
        # The kernels want values of the queries' size; what zeros add is cut off again.
        value = F.pad(value, (0, query.shape[-1] - dim))
    if has_flash_4(query.device) and query.shape[-1] % 8 == 0:
        from flash_attn.cute import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=borders[0],
            cu_seqlens_k=borders[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            softmax_scale=scaling,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        # Older releases share key heads among query heads without being told to.
        told = {"enable_gqa": query.shape[1] != key.shape[1]} if _takes_gqa_flag() else {}
        seen = (-1 if window is None else window - 1, 0)
        out = varlen_attn(query, key, value, *borders, *longest, scale=scaling, window_size=seen, **told)  # type: ignore[arg-type]
    if isinstance(out, tuple):  # some releases of FlashAttention 4 return the log-sums too
        out = out[0]
    return out[..., :dim]


@cache
def has_flash_4(device: torch.device) -> bool:
    """Whether FlashAttention 4 is installed (`meshrl[hopper]`) and the device is a Hopper GPU."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    # An older flash-attn owns the same parent package, so that its part is looked for.
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@cache
def _takes_gqa_flag() -> bool:
    """Whether this release's varlen attention wants to be told that key heads are shared."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters
