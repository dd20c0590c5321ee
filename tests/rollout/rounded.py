"""What a model gives whose products are of 8-bit floats, by Transformers' own forward with other linears."""

import torch
import torch.nn.functional as F

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
MOST = 448.0


def to_grid(x, largest, whole=False):
    """x in units of which 448 make the largest, on the grid of 8-bit floats; `whole`: units are powers of two."""
    unit = largest.clamp(min=1e-10) / MOST  # some tokens are all zeros
    if whole:
        unit = 2 ** unit.log2().ceil()
    return (x / unit).to(torch.float8_e4m3fn).to(x.dtype) * unit


def round_linears(model):
    """Matrices of one input have one unit, and every token its own; the head stays as it is."""
    for layer in model.model.layers:
        found = dict(layer.named_modules())
        for names in GROUPS:
            linears = [module for path, module in found.items() if path.split(".")[-1] in names]
            assert len(linears) == len(names)
            largest = max(float(linear.weight.detach().abs().max()) for linear in linears)
            for linear in linears:
                weight = to_grid(linear.weight.detach(), torch.tensor(largest, device=linear.weight.device), True)

                def forward(x, weight=weight, linear=linear):
                    return F.linear(to_grid(x, x.abs().amax(-1, keepdim=True)), weight, linear.bias)

                linear.forward = forward
    return model
