"""Products of 8-bit floats (e4m3): a matrix of weights has one scale, and each token gets its own on the way.

Half the bytes to read, and products that a processor makes twice as fast. What a product gives remains to be multiplied
by the scale of each token, which the next kernel does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrl.models.eight_bits import FP8, LARGEST, MULTIPLE, in_8_bits, weight_scale

ROWS = 1024  # that are rounded at once, in float32


@dataclass(frozen=True)
class Rows8:
    """Rows in 8 bits [rows, width] with their scales [rows, 1]."""

    values: Tensor
    scales: Tensor


class Fp8Projection:
    """Several linears of one input as one product of 8-bit floats; `refresh` looks at their weights again."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor]):
        rows, width = sum(map(len, weights)), weights[0].shape[1]
        if rows % MULTIPLE or width % MULTIPLE:
            raise ValueError(
                f"rollout.quantization=fp8 takes matrices whose sizes are multiples of {MULTIPLE}, and the model has "
                f"one of {rows} by {width} on a rank: leave rollout.quantization out"
            )
        self._weights, self._biases = weights, biases
        self.dtype, device = weights[0].dtype, weights[0].device
        self.values = torch.empty(rows, width, dtype=FP8, device=device)
        # Apart: products take numbers only where memory is aligned.
        self.scale, self._one = (torch.ones((), dtype=torch.float32, device=device) for _ in range(2))
        self.bias = torch.cat(biases) if biases else None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the weights as they are now to where they were before: recorded graphs go on reading there."""
        largest = torch.stack([weight.abs().amax() for weight in self._weights]).amax().float()
        self.scale.copy_(weight_scale(largest))
        for weight, values in zip(self._weights, self.values.split([len(w) for w in self._weights]), strict=True):
            for some, target in zip(weight.split(ROWS), values.split(ROWS), strict=True):
                target.copy_(some.to(torch.float32, copy=True).div_(self.scale).clamp_(-LARGEST, LARGEST))
        if self.bias is not None:
            torch.cat(self._biases, out=self.bias)

    def raw(self, x: Rows8) -> tuple[Tensor, Tensor]:
        """The product without bias, and the factors [rows, 1] that its rows remain to be multiplied by."""
        if x.values.device.type == "cpu":  # which has no such products: what they would give
            return F.linear(x.values.to(self.dtype), (self.values.float() * self.scale).to(self.dtype)), x.scales
        made = torch._scaled_mm(
            x.values, self.values.t(), self._one, self.scale, out_dtype=self.dtype, use_fast_accum=True
        )
        return made, x.scales

    def __call__(self, x: Tensor | Rows8) -> Tensor:
        product, factors = self.raw(x if isinstance(x, Rows8) else Rows8(*in_8_bits(x)))
        out = (product.float() * factors).to(self.dtype)
        return out if self.bias is None else out + self.bias

    def halves(self, x: Tensor) -> Iterable[Tensor]:
        """The products of two linears."""
        return self(x).chunk(2, -1)
