"""Checks of tensor arguments: every failure names the argument and the place."""

import torch


def check_same_shape(**tensors: torch.Tensor | None) -> None:
    """Raise if the given tensors (None = absent) do not all have the first one's shape."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but {first_name} has {tuple(first.shape)}: they must agree"
            )


def check_matrix(**tensors: torch.Tensor | None) -> None:
    """Raise unless the tensors are [batch, response length] matrices of one shape."""
    check_same_shape(**tensors)
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be [batch, response_length], got shape {tuple(tensor.shape)}")


def check_finite(name: str, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Raise if `tensor` has a NaN or inf where `mask` is set (default: anywhere), and say where the first one is."""
    bad = ~torch.isfinite(tensor)
    if mask is not None:
        bad &= mask.bool()
    if bool(bad.any()):
        places = bad.nonzero()
        first = tuple(int(i) for i in places[0])
        raise ValueError(f"{name} has {len(places)} non-finite values, the first is {tensor[first].item()} at {first}")


def check_not_empty(mask: torch.Tensor, name: str = "response_mask") -> None:
    """Raise if no element of `mask` is set."""
    # The first row of a response mask is nearly always set somewhere: it spares a pass over the whole matrix.
    if not bool(mask[:1].any()) and not bool(mask.any()):
        raise ValueError(f"{name} of shape {tuple(mask.shape)} selects no token: there is nothing to compute on")


def check_length(name: str, length: int, batch: int) -> None:
    """Raise unless a per-sample argument has one entry a sample."""
    if length != batch:
        raise ValueError(f"{name} has {length} entries for a batch of {batch} samples")
