"""MoE routes: the experts that tokens are routed to, recorded in one pass and replayed in another.

Rollout and trainer compute the same scores except for the last digits. If two experts are close, the two may choose
differently, and the same weights then give other log-probs. A replayed choice is the recorded one. The weight of each
chosen expert still comes from the scores of the replaying pass, so routers learn as usual.

The routes of a sample are an array `[tokens, layers with experts, experts per token]`. A token without a route holds
`unknown` and is routed as usual. Such tokens are padding and the last token of a response, which was never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshrl.data.packing import PackedRow

# The column of a batch that holds routes; vLLM, SGLang and verl use the same name.
ROUTED_EXPERTS = "routed_experts"
# The share of replayed choices (one per token and layer) that differ from the pass's own choice.
CHANGED = "actor/routes_changed"
NAMES = ("gate", "router")  # attribute names of a router beside `experts`
TOP_K = frozenset((torch.topk, Tensor.topk))


def route_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds every expert's number and `unknown`."""
    return np.dtype(np.uint8 if num_experts < 256 else np.int16)


def tensor_dtype(num_experts: int) -> torch.dtype:
    """Return the torch dtype that corresponds to `route_dtype`."""
    return torch.uint8 if route_dtype(num_experts) == np.uint8 else torch.int16


def unknown(dtype: np.dtype[Any]) -> int:
    """Return the number that marks a token without a route."""
    return int(np.iinfo(dtype).max)


def fitted(routes: np.ndarray, length: int) -> np.ndarray:
    """Return routes of exactly `length` tokens, cut off or filled up with `unknown` at the end."""
    missing = length - len(routes)
    if missing <= 0:
        return routes[:length]
    nothing = np.full((missing, *routes.shape[1:]), unknown(routes.dtype), routes.dtype)
    return np.concatenate([routes, nothing])


def packed_routes(column: np.ndarray, row: PackedRow) -> Tensor | None:
    """Return the routes of a row's tokens `[tokens, layers, experts per token]`, on the host, from its samples' routes.

    A sample's routes may be None. If all are None, the result is None.
    """
    some = next((routes for routes in column if routes is not None), None)
    if some is None:
        return None
    documents = []
    for sample, length in zip(row.samples, row.lengths, strict=True):
        routes = column[sample]
        if routes is None:
            routes = fitted(some[:0], length)
        elif len(routes) != length:
            raise ValueError(
                f"sample {sample} has {length} tokens, but routes of {len(routes)}: {ROUTED_EXPERTS} must say of every "
                "token of a sample where it went"
            )
        documents.append(routes)
    together = torch.from_numpy(np.concatenate(documents))
    if row.attention_mask is None:
        return together
    padded = together.new_full((row.attention_mask.numel(), *together.shape[1:]), unknown(some.dtype))
    padded[row.attention_mask.flatten().bool().cpu()] = together
    return padded


def unpacked_routes(routes: Tensor, row: PackedRow) -> list[np.ndarray]:
    """Undo `packed_routes`: return one array for each sample of the row, in the batch's order."""
    if row.attention_mask is not None:
        routes = routes[row.attention_mask.flatten().bool()]
    parts = routes.cpu().split(row.lengths)
    found = dict(zip(row.samples, parts, strict=True))
    return [found[sample].numpy() for sample in range(len(parts))]


def over_ranks(routes: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply the collective `gather` to routes as bytes, because collectives do not support two-byte integers."""
    return gather(routes.contiguous().view(torch.uint8)).view(routes.dtype)


def check_layers(routes: Tensor, layers: int) -> None:
    """Raise a `ValueError` if routes have another number of layers than the model has layers with experts."""
    if routes.shape[1] != layers:
        raise ValueError(f"routes through {routes.shape[1]} layers were given to a model with {layers} of experts")


class Choice:
    """Counters of replayed choices that differ from the pass's own choice; the sums stay on the device."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def note(self, own: Tensor, taken: Tensor, is_known: Tensor) -> None:
        """Count the tokens whose replayed experts differ, as a set, from the router's own choice."""
        differs = (own.sort(-1).values != taken.sort(-1).values).any(-1, keepdim=True) & is_known
        found = torch.stack([differs.sum(), is_known.sum()]).double()
        self.sums = found if self.sums is None else self.sums + found

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return the share of changed choices over all ranks since the last call; collective."""
        sums = torch.zeros(2, dtype=torch.double, device=device) if self.sums is None else self.sums
        self.sums = None
        if dist.is_initialized():
            dist.all_reduce(sums)
        changed, known = sums.tolist()
        return {CHANGED: changed / known} if known else {}


def choose(scores: Tensor, own: Tensor, given: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return values and indices of a top-k over `scores` `[tokens, experts]`, with the `given` choice for known tokens.

    `own` is the choice that the scores themselves make, `[tokens, experts per token]`.
    """
    if given.shape != own.shape:
        raise ValueError(
            f"routes of {given.shape[0]} tokens to {given.shape[1]} experts each were given to a router that sees "
            f"{own.shape[0]} tokens and chooses {own.shape[1]}: they belong to another batch or model"
        )
    is_known = given[:, :1] != torch.iinfo(given.dtype).max
    taken = torch.where(is_known, given.long(), own)
    choice.note(own, taken, is_known)
    return scores.gather(-1, taken), taken


class _Choosing(TorchFunctionMode):
    """A torch function mode around a router's forward that replaces the top-k over all experts by a given choice."""

    def __init__(self, num_experts: int, given: Tensor | None, choice: Choice):
        super().__init__()
        self.num_experts, self.given, self.choice = num_experts, given, choice
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in TOP_K or out.indices.dim() != 2 or args[0].shape[-1] != self.num_experts:
            return out
        indices = out.indices
        if self.given is not None:
            values, indices = choose(args[0], indices, self.given, self.choice)
            out = torch.return_types.topk((values, indices))
        self.chosen = indices
        return out


class Routers:
    """All routers of a Hugging Face model, in layer order; each chooses experts by a top-k, whatever its scores."""

    def __init__(self, hf_model: nn.Module):
        self._routers = find_routers(hf_model)
        if not self._routers:
            raise ValueError(
                f"{type(hf_model).__name__} has no routers that are known: there are no routes to replay. "
                "Set actor.router_replay.mode to disabled"
            )
        self.num_experts = int(self._routers[0].weight.shape[0])
        self.choice = Choice()
        self._given: Tensor | None = None
        self._made: list[Tensor | None] | None = None
        for layer, router in enumerate(self._routers):
            # Compiled code must not specialise on whether there was a route when it was compiled.
            router.forward = torch.compiler.disable(partial(self._forward, layer, router.forward))

    @property
    def num_layers(self) -> int:
        return len(self._routers)

    @contextmanager
    def routing(self, records: bool = False) -> Iterator[None]:
        """Replay and record routes for the duration of the context.

        Forwards take the routes of `replay` and, with `records`, store their own routes for `recorded`.
        """
        self._made = [None] * self.num_layers if records else None
        try:
            yield
        finally:
            self._made = self._given = None

    def replay(self, routes: Tensor | None) -> None:
        """Set the routes `[tokens, layers, experts per token]` for the following forwards, also of recomputed layers.

        With None, routers choose for themselves.
        """
        if routes is not None:
            check_layers(routes, self.num_layers)
        self._given = routes

    def recorded(self) -> Tensor:
        """Return the routes `[tokens, layers, experts]` of the last forward."""
        assert self._made is not None
        made = [layer for layer in self._made if layer is not None]
        if len(made) != self.num_layers:
            raise RuntimeError(f"{self.num_layers - len(made)} of {self.num_layers} routers have not run")
        return torch.stack(made, 1).to(tensor_dtype(self.num_experts))

    def _forward(self, layer: int, plain: Any, *args: Any, **kwargs: Any) -> Any:
        if self._given is None and self._made is None:
            return plain(*args, **kwargs)
        given = None if self._given is None else self._given[:, layer]
        with _Choosing(self.num_experts, given, self.choice) as choosing:
            out = plain(*args, **kwargs)
        if choosing.chosen is None:
            raise ValueError(
                f"{type(self._routers[layer]).__name__} does not choose by a top-k over its {self.num_experts} "
                "experts: its routes cannot be replayed. Set actor.router_replay.mode to disabled"
            )
        if self._made is not None:
            self._made[layer] = choosing.chosen.detach()
        return out


def layers_with_experts(hf_model: Any) -> list[int]:
    """Return the numbers of a model's layers that have experts."""
    layers = enumerate(hf_model.base_model.layers)
    return [number for number, layer in layers if any(hasattr(module, "experts") for module in layer.modules())]


def find_routers(hf_model: nn.Module) -> list[Any]:
    """Return the routers of a model's layers with experts, in layer order.

    A router is the attribute `gate` or `router` of a module that also has `experts`.
    """
    blocks = [block for block in hf_model.modules() if isinstance(getattr(block, "experts", None), nn.Module)]
    named = [[getattr(block, name) for name in NAMES if hasattr(block, name)] for block in blocks]
    return [found[0] for found in named if found and getattr(found[0], "weight", None) is not None]
