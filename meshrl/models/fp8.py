"""Products of 8-bit floats (e4m3): how numbers are rounded to them, and linears that compute with them in training.

Every token and every row of a matrix of weights has its own scale, made from what is there at that moment: nothing is
kept from step to step, and a token's result does not depend on which others are computed beside it. Scales of weights
are powers of two. So a weight is rounded to the same number whatever it shares its scale with: in a product and in
that of its gradient, in a trainer and in a rollout, whose matrices have one scale for all of their rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.models.names import expert_count, of_text
from meshrl.models.vision import language_model

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# The least that a scale is made of; in training, since the gradients of a token may be far less than what it is.
TINY, TINY_IN_TRAINING = 1e-10, 1e-30
# What the processor's products take: sizes that are multiples of this.
MULTIPLE = 16
# The first processors that have such products.
CAPABILITY = (8, 9)


def in_8_bits(x: Tensor, least: float = TINY) -> tuple[Tensor, Tensor]:
    """Vectors along the last dim as 8-bit floats, and their scales [..., 1]: the largest element becomes `LARGEST`.

    Unless all of them are below the `least`.
    """
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=least) / LARGEST
    return (x / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def weight_scale(largest: Tensor) -> Tensor:
    """The scale (float32) of weights of which this is the largest: the least power of two that has room for it."""
    wanted = largest.float().clamp(min=TINY) / LARGEST
    mantissa = 0x7FFFFF
    return ((wanted.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def weights_in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a matrix as 8-bit floats, and their scales [rows, 1]."""
    scales = weight_scale(weight.abs().amax(-1, keepdim=True))
    return (weight.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inner] times weight [columns, inner], both rounded to 8 bits, in the type of x."""
    (a, a_scales), (b, b_scales) = in_8_bits(x, TINY_IN_TRAINING), weights_in_8_bits(weight)
    if x.device.type == "cpu":  # which has no such products: what they would give
        return (F.linear(a.to(x.dtype), b.to(x.dtype)) * a_scales * b_scales.t()).to(x.dtype)
    a, b = a.contiguous(), b.contiguous()  # rows of a turned matrix lie across
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.view(1, -1), out_dtype=x.dtype, use_fast_accum=True)


class _Product8(torch.autograd.Function):
    """x times the weight, and the gradient of x, from 8-bit floats; the gradient of the weight from what was given.

    That one is a sum over tokens: rounded, it would depend on which of them a micro-batch has.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), gradient = ctx.saved_tensors, gradients[0]
        of_x = product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        return of_x, None if x is None else gradient.t() @ x


class Linear8(nn.Linear):
    """A linear that computes with 8-bit floats; its weight is as it was."""

    def forward(self, input: Tensor) -> Tensor:
        made = _Product8.apply(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])
        return made if self.bias is None else made + self.bias


def compute_in_8_bits(hf_model: PreTrainedModel, device: torch.device) -> None:
    """Has all linears of the model's layers compute with 8-bit floats; head, embeddings and towers stay as they are."""
    key = "mixed_precision.product_dtype=fp8"
    if experts := expert_count(of_text(hf_model.config)):
        raise ValueError(f"{key} takes no experts, and {type(hf_model).__name__} has {experts} a layer: leave it out")
    if lacking := lacks_products(device):
        raise ValueError(f"{lacking}: leave {key} out")
    classes = set(hf_model._no_split_modules or ())
    layers = [module for module in language_model(hf_model).modules() if type(module).__name__ in classes]
    linears = [(name, m) for layer in layers for name, m in layer.named_modules() if type(m) is nn.Linear]
    if not linears:
        raise ValueError(f"{key}: {type(hf_model).__name__} has no layers with linears that it could be for")
    for name, linear in linears:
        rows, width = linear.weight.shape
        if rows % MULTIPLE or width % MULTIPLE:
            raise ValueError(
                f"{key} takes matrices whose sizes are multiples of {MULTIPLE}, and {name} of "
                f"{type(hf_model).__name__} is {rows} by {width}: leave it out"
            )
    for _, linear in linears:
        linear.__class__ = Linear8  # with its weights, and whatever else knows it


def lacks_products(device: torch.device) -> str | None:
    """What is wrong with a GPU that has no products of 8-bit floats (a CPU does with others what they would give)."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and found >= CAPABILITY:
        return None
    return (
        f"{torch.cuda.get_device_name(device)} (capability {found[0]}.{found[1]}) has no products of 8-bit floats, "
        f"which come with {CAPABILITY[0]}.{CAPABILITY[1]}"
    )


# Products of 8-bit floats (e4m3): a matrix of weights has one scale, and each token gets its own on the way.
#
# Half the bytes to read, and products that a processor makes twice as fast. What a product gives remains to be
# multiplied
# by the scale of each token, which the next kernel does.

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
