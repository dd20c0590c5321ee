"""FP8 matmuls (e4m3): the rounding of numbers to FP8, and linear layers that compute with FP8.

- `in_8_bits`, `weights_in_8_bits`: rounding, with a scale per row.
- `Linear8`, `compute_in_8_bits`: FP8 in training.
- `Fp8Projection`: FP8 in a rollout, with one scale per weight matrix.

In training, every token and every row of a weight matrix has its own scale, computed from the current values. So no
state is kept from step to step, and a token's result does not depend on the tokens computed with it. Scales of weights
are powers of two. So a weight is rounded to the same number whatever values share its scale: in a matmul and in its
gradient's matmul, in a trainer and in a rollout, whose matrices have one scale for all rows.
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
# The smallest magnitude that a scale is computed from. It is smaller in training, because a token's gradients may be
# far smaller than its activations.
TINY, TINY_IN_TRAINING = 1e-10, 1e-30
# The GPU's FP8 matmuls take sizes that are multiples of this.
MULTIPLE = 16
# The first compute capability with FP8 matmuls.
CAPABILITY = (8, 9)


def in_8_bits(x: Tensor, least: float = TINY) -> tuple[Tensor, Tensor]:
    """Round vectors along the last dim to FP8; return the values and their scales `[..., 1]`.

    The largest element of a vector becomes `LARGEST`, unless all its elements are below `least`.
    """
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=least) / LARGEST
    return (x / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def weight_scale(largest: Tensor) -> Tensor:
    """Return the scale (float32) of weights with this largest magnitude: the smallest power of two that fits it."""
    wanted = largest.float().clamp(min=TINY) / LARGEST
    mantissa = 0x7FFFFF
    return ((wanted.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def weights_in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rows of a matrix to FP8; return the values and their scales `[rows, 1]`."""
    scales = weight_scale(weight.abs().amax(-1, keepdim=True))
    return (weight.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x `[rows, inner]` by the transpose of weight `[columns, inner]`, both rounded to FP8.

    The result `[rows, columns]` has the type of x.
    """
    (a, a_scales), (b, b_scales) = in_8_bits(x, TINY_IN_TRAINING), weights_in_8_bits(weight)
    if x.device.type == "cpu":  # a CPU has no FP8 matmul: compute what it would give
        return (F.linear(a.to(x.dtype), b.to(x.dtype)) * a_scales * b_scales.t()).to(x.dtype)
    a, b = a.contiguous(), b.contiguous()  # the rows of a transposed matrix are not contiguous
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.view(1, -1), out_dtype=x.dtype, use_fast_accum=True)


class _Product8(torch.autograd.Function):
    """A matmul in FP8, whose gradient of x is in FP8 as well.

    The gradient of the weight uses unrounded values. It is a sum over tokens, so rounded values would make it depend on
    which tokens a micro-batch has.
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
    """A linear layer that computes with FP8 matmuls; its weight keeps its type."""

    def forward(self, input: Tensor) -> Tensor:
        made = _Product8.apply(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])
        return made if self.bias is None else made + self.bias


def compute_in_8_bits(hf_model: PreTrainedModel, device: torch.device) -> None:
    """Make all linear layers in the decoder layers compute with FP8; head, embeddings and towers are not changed."""
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
        linear.__class__ = Linear8  # in place: weights and references to the module stay


def lacks_products(device: torch.device) -> str | None:
    """Return why a GPU has no FP8 matmul, or None; on a CPU the same results are computed in another type."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and found >= CAPABILITY:
        return None
    return (
        f"{torch.cuda.get_device_name(device)} (capability {found[0]}.{found[1]}) has no products of 8-bit floats, "
        f"which come with {CAPABILITY[0]}.{CAPABILITY[1]}"
    )


# FP8 matmuls (e4m3) in a rollout: a weight matrix has one scale, and each token gets its own scale at run time.
#
# This halves the bytes to read, and matmuls are twice as fast. The output must still be multiplied by the scale of each
# token, which the next kernel does.

ROWS = 1024  # rows that are rounded at once, in float32


@dataclass(frozen=True)
class Rows8:
    """Rows in FP8 `[rows, width]` with their scales `[rows, 1]`."""

    values: Tensor
    scales: Tensor


class Fp8Projection:
    """Several linear layers of one input as one FP8 matmul; `refresh` rounds their current weights again."""

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
        # Separate tensors, because the matmul takes scales only from aligned memory.
        self.scale, self._one = (torch.ones((), dtype=torch.float32, device=device) for _ in range(2))
        self.bias = torch.cat(biases) if biases else None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the current weights into the existing memory, which captured CUDA graphs continue to read."""
        largest = torch.stack([weight.abs().amax() for weight in self._weights]).amax().float()
        self.scale.copy_(weight_scale(largest))
        for weight, values in zip(self._weights, self.values.split([len(w) for w in self._weights]), strict=True):
            for some, target in zip(weight.split(ROWS), values.split(ROWS), strict=True):
                target.copy_(some.to(torch.float32, copy=True).div_(self.scale).clamp_(-LARGEST, LARGEST))
        if self.bias is not None:
            torch.cat(self._biases, out=self.bias)

    def raw(self, x: Rows8) -> tuple[Tensor, Tensor]:
        """Return the matmul without bias, and the factors `[rows, 1]` by which its rows must still be multiplied."""
        if x.values.device.type == "cpu":  # a CPU has no FP8 matmul: compute what it would give
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
        """Return the outputs of two equally wide linear layers."""
        return self(x).chunk(2, -1)
