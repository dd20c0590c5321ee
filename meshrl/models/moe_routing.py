"""Routes: which experts the tokens of a mixture of experts go to, recorded in one pass and taken again in another.

Rollout and trainer compute the same scores but for their last digits, and where two experts are close they choose
differently: the same weights then give other log-probs. A replayed choice is the recorded one; how much each chosen
expert counts still comes from the scores of the pass itself, so that routers learn as ever.

The routes of a sample are an array [tokens, layers with experts, experts per token]. A token without a route (the last
of an answer, which nobody computed; padding) holds `unknown` and is routed as ever.
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

# The column of a batch that holds them, by the name that vLLM, SGLang and verl have for it.
ROUTED_EXPERTS = "routed_experts"
# The share of replayed choices, one a token and layer, that this pass would have made otherwise.
CHANGED = "actor/routes_changed"
NAMES = ("gate", "router")  # of routers beside their `experts`
TOP_K = frozenset((torch.topk, Tensor.topk))


def route_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest type that holds every expert's number and one more."""
    return np.dtype(np.uint8 if num_experts < 256 else np.int16)


def tensor_dtype(num_experts: int) -> torch.dtype:
    """`route_dtype`, of tensors."""
    return torch.uint8 if route_dtype(num_experts) == np.uint8 else torch.int16


def unknown(dtype: np.dtype[Any]) -> int:
    """What stands where a token has no route."""
    return int(np.iinfo(dtype).max)


def fitted(routes: np.ndarray, length: int) -> np.ndarray:
    """Routes of exactly so many tokens: cut off, or unknown at their end."""
    missing = length - len(routes)
    if missing <= 0:
        return routes[:length]
    nothing = np.full((missing, *routes.shape[1:]), unknown(routes.dtype), routes.dtype)
    return np.concatenate([routes, nothing])


def packed_routes(column: np.ndarray, row: PackedRow) -> Tensor | None:
    """The routes of a row's tokens [tokens, layers, experts per token], on the host, from those of its samples.

    A sample may have None; where all do, so does the row.
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
    """The way back: one array for each sample of the row, in the batch's order."""
    if row.attention_mask is not None:
        routes = routes[row.attention_mask.flatten().bool()]
    parts = routes.cpu().split(row.lengths)
    found = dict(zip(row.samples, parts, strict=True))
    return [found[sample].numpy() for sample in range(len(parts))]


def over_ranks(routes: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """What `gather` makes of routes: as bytes, for collectives know no two-byte integers."""
    return gather(routes.contiguous().view(torch.uint8)).view(routes.dtype)


def check_layers(routes: Tensor, layers: int) -> None:
    """A `ValueError` for routes through another number of layers."""
    if routes.shape[1] != layers:
        raise ValueError(f"routes through {routes.shape[1]} layers were given to a model with {layers} of experts")


class Choice:
    """How often a replayed choice was not the one that this pass would have made; sums on the device."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def note(self, own: Tensor, taken: Tensor, is_known: Tensor) -> None:
        """Compares the experts of each token as sets."""
        differs = (own.sort(-1).values != taken.sort(-1).values).any(-1, keepdim=True) & is_known
        found = torch.stack([differs.sum(), is_known.sum()]).double()
        self.sums = found if self.sums is None else self.sums + found

    def metrics(self, device: torch.device) -> dict[str, float]:
        """The share of changed choices of all ranks since the last look; every rank calls it."""
        sums = torch.zeros(2, dtype=torch.double, device=device) if self.sums is None else self.sums
        self.sums = None
        if dist.is_initialized():
            dist.all_reduce(sums)
        changed, known = sums.tolist()
        return {CHANGED: changed / known} if known else {}


def choose(scores: Tensor, own: Tensor, given: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """The values and indices of a top-k over `scores` [tokens, experts] with the `given` choice, where there is one.

    `own` is what the scores themselves choose [tokens, experts per token].
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
    """Inside a router's forward: sees the top-k over all experts, and puts a given choice in its place."""

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
    """All routers of a Hugging Face model, in the order of its layers; each chooses by a top-k, whatever its scores."""

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
            # Compiled code must not remember whether there was a route when it was compiled.
            router.forward = torch.compiler.disable(partial(self._forward, layer, router.forward))

    @property
    def num_layers(self) -> int:
        return len(self._routers)

    @contextmanager
    def routing(self, records: bool = False) -> Iterator[None]:
        """Inside, forwards take the routes of `replay` and, with `records`, leave theirs for `recorded`."""
        self._made = [None] * self.num_layers if records else None
        try:
            yield
        finally:
            self._made = self._given = None

    def replay(self, routes: Tensor | None) -> None:
        """From now on forwards (and those of recomputed layers) take `routes` [tokens, layers, experts per token].

        None: their own.
        """
        if routes is not None:
            check_layers(routes, self.num_layers)
        self._given = routes

    def recorded(self) -> Tensor:
        """The routes [tokens, layers, experts] of the last forward."""
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
    """The numbers of a model's layers that have experts."""
    layers = enumerate(hf_model.base_model.layers)
    return [number for number, layer in layers if any(hasattr(module, "experts") for module in layer.modules())]


def find_routers(hf_model: nn.Module) -> list[Any]:
    """The routers of a model's layers with experts, in their order: what stands beside `experts` by a known name."""
    blocks = [block for block in hf_model.modules() if isinstance(getattr(block, "experts", None), nn.Module)]
    named = [[getattr(block, name) for name in NAMES if hasattr(block, name)] for block in blocks]
    return [found[0] for found in named if found and getattr(found[0], "weight", None) is not None]
