"""A training engine's weights as the source of a sync: the placement over its ranks, and this rank's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.engines.fsdp.sharding import Whole
from meshrl.engines.optim import MasterAdamW
from meshrl.engines.training_engine import Engine
from meshrl.models.loading import buffer_homes
from meshrl.models.names import Shape
from meshrl.weights.placement import Placement, fsdp1, fsdp2, megatron, replicas

WRAPPED = "_fsdp_wrapped_module."
BASE, DOWN, UP = ".base_layer.", ".lora_A.", ".lora_B."
ALIGNED_BYTES = 16


class Lazy(Mapping[str, Tensor]):
    """A mapping of tensors that are made at access.

    The last tensor is kept, because its pieces are read one after the other.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]):
        self._makers = makers
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._makers[name]().detach())
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class Source(ABC):
    """The placement and model type of an engine's weights, for plans. All ranks make a source together."""

    placement: Placement
    model_type: str

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's parameters as they are now, by the placement's names. All ranks call it together."""


def source_of(engine: Engine, *, adapters: str = "merged", master: bool = False) -> Source:
    """Return the source that fits an engine.

    `adapters`: for a model with LoRA, send the merged weights (`merged`), the model without adapters (`base`), or the
    adapters alone (`only`). `master`: if the engine keeps bfloat16 with exact remainders, send exact float32.
    """
    if not isinstance(engine, FSDPEngine):
        return MegatronSource(engine)
    if not isinstance(engine.sharding, Whole) and not has_fsdp2(engine.module):
        if engine.has_adapters:
            raise ValueError("plans cannot merge adapters under FSDP1's flat parameters: use strategy=fsdp2")
        return FSDP1Source(engine)
    return FSDP2Source(engine, adapters, master)


def has_fsdp2(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


class FSDP2Source(Source):
    """The weights of an FSDP2 engine, rows of every parameter, or of a plain module on one rank.

    Adapters are merged, left out, or sent alone.
    """

    def __init__(self, engine: FSDPEngine, adapters: str = "merged", master: bool = False):
        if adapters not in ("merged", "base", "only"):
            raise ValueError(f"adapters must be merged, base or only, got '{adapters}'")
        self.engine, self.adapters, self.master = engine, adapters, master
        # Cached, because walking through all modules takes longer than moving a small model. An unsharded model keeps
        # its parameters, so they are cached as well.
        self._units = [part for part in engine.module.modules() if isinstance(part, FSDPModule)]
        self._named: list[tuple[str, nn.Parameter]] | None = None
        self._unsharded: dict[str, Tensor] | None = None
        self._homes = [] if adapters == "only" else buffer_homes(engine.hf_model)
        params = dict(self._params())
        self._sent = {name: self._name(name) for name in params if self._is_sent(name)}
        shapes = {sent: tuple(params[name].shape) for name, sent in self._sent.items()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in self._buffers().items()}
        self.model_type = str(engine.hf_model.config.model_type)
        if isinstance(engine.sharding, Whole):
            self.placement = replicas(shapes, 1, self.model_type, title="one rank")
        else:
            self.placement = fsdp2(shapes, engine.shards, self.model_type)

    def _params(self) -> list[tuple[str, nn.Parameter]]:
        if self._named is not None:
            return self._named
        for part in self._units:
            # A forward pass may leave units unsharded.
            part.reshard()
        prefix = self.engine.prefix
        named = [(name.removeprefix(prefix), param) for name, param in self.engine.module.named_parameters()]
        if not self._units:
            self._named = named
        return named

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are weights; every rank has them whole."""
        return {name: owner.get_buffer(own) for name, owner, own in self._homes}

    def _own_rows(self, buffer: Tensor) -> Tensor:
        """Return the rows that this rank would hold if the buffer were sharded, as the placement expects."""
        shards, buffer = self.engine.shards, buffer if buffer.dim() else buffer[None]
        step = -(-len(buffer) // shards.size("fsdp"))
        place = 0 if isinstance(self.engine.sharding, Whole) else shards.index(self.engine.rank, "fsdp")
        return buffer[place * step : (place + 1) * step]

    def _is_sent(self, name: str) -> bool:
        is_adapter = DOWN in name or UP in name
        return is_adapter == (self.adapters == "only")

    @staticmethod
    def _name(name: str) -> str:
        return name.replace(BASE, ".")

    def tensors(self) -> Mapping[str, Tensor]:
        if self._unsharded is not None:
            return self._unsharded
        found = self._param_tensors()
        if self._named is not None and type(found) is dict and not self._homes:
            self._unsharded = found
        if not (buffers := self._buffers()):
            return found
        if type(found) is dict:
            return found | {name: self._own_rows(buffer) for name, buffer in buffers.items()}
        makers = {name: partial(found.__getitem__, name) for name in found}
        return Lazy(makers | {name: partial(self._own_rows, buffer) for name, buffer in buffers.items()})

    def _param_tensors(self) -> Mapping[str, Tensor]:
        params = dict(self._params())
        optimizer = getattr(self.engine, "optimizer", None)
        if self.master and isinstance(optimizer, MasterAdamW):
            held = {n: (lambda p=p: optimizer.master(p) if p.requires_grad else p) for n, p in params.items()}
            local: Mapping[str, Tensor] = Lazy(held)
        else:
            local = {name: _local(param) for name, param in params.items()}
        if self.engine.has_adapters and self.adapters == "merged":
            return self._merged(params, local)
        if isinstance(local, Lazy):  # exact values are made one at a time: together they would be a second model
            return Lazy({sent: partial(local.__getitem__, name) for name, sent in self._sent.items()})
        return {sent: local[name] for name, sent in self._sent.items()}

    def _merged(self, params: Mapping[str, nn.Parameter], local: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's rows of the weights plus the adapter products.

        The second matrix is sharded by rows like the weight, and the first matrix is gathered whole.
        """
        makers: dict[str, Callable[[], Tensor]] = {}
        for name, sent in self._sent.items():
            layer = name.split(BASE)[0]
            up, down = (f"{layer}{kind}default.weight" for kind in (UP, DOWN))
            if name == f"{layer}{BASE}weight" and up in params:
                whole, scaling = _whole(params[down]), self.engine.adapter_scaling[layer]
                makers[sent] = _merging(local[name], local[up], whole, scaling)
            else:
                makers[sent] = partial(local.__getitem__, name)
        return Lazy(makers)


class FSDP1Source(Source):
    """The weights of an FSDP1 engine: equal parts of the flat parameter of every unit."""

    def __init__(self, engine: FSDPEngine):
        self.engine = engine
        units: dict[str, dict[str, Shape]] = {}
        alignment = 1
        for name, flat, aligned in self._flat_params():
            names = (f"{name}{n}".removeprefix(engine.prefix).replace(BASE, ".") for n in flat._fqns)
            units[name] = dict(zip(names, map(tuple, flat._shapes), strict=True))
            alignment = max(alignment, aligned)
        self.model_type = str(engine.hf_model.config.model_type)
        self.placement = fsdp1(units, engine.shards, self.model_type, alignment=alignment)

    def _flat_params(self) -> Iterator[tuple[str, Any, int]]:
        for path, unit in self.engine.module.named_modules():
            handle: Any = getattr(unit, "_handle", None)
            if not isinstance(unit, FullyShardedDataParallel) or handle is None:
                continue
            name = f"{path}.".replace(WRAPPED, "").replace("_fsdp_wrapped_module", "").lstrip(".")
            itemsize = handle._fwd_bwd_param_dtype.itemsize
            yield name, handle.flat_param, ALIGNED_BYTES // itemsize if handle._use_orig_params else 1

    def tensors(self) -> Mapping[str, Tensor]:
        # Before its first forward pass a unit has only its shard, and no `_local_shard`.
        return {name: getattr(flat, "_local_shard", flat).detach() for name, flat, _ in self._flat_params()}


class MegatronSource(Source):
    """The weights of a Megatron engine: its model chunks, by the engine's own weight map."""

    def __init__(self, engine: Any):
        from meshrl.engines.megatron.weight_map import ModuleNames, padded_vocab_size
        from meshrl.engines.megatron.weights import module_names

        self.engine, self.model_type = engine, str(engine.hf_config.model_type)
        found: list[Any] = [None] * dist.get_world_size()
        # A rank without sparse layers cannot see the expert names of the other ranks.
        dist.all_gather_object(found, module_names(engine.model))
        experts = next((names.experts for names in found if names.experts != "sequential"), "sequential")
        names = ModuleNames(any(n.transformer_engine for n in found), experts)
        vocabulary = padded_vocab_size(
            engine.hf_config.vocab_size, engine.ranks.tp, engine.megatron.make_vocab_size_divisible_by
        )
        self.placement = megatron(
            engine.hf_config, engine.ranks, names, vocab_size=vocabulary, value_head=engine.head == "value"
        )
        self._params: dict[str, Tensor] = {}
        self._biases: list[tuple[str, Any]] = []
        for number, chunk in enumerate(engine.model):
            module = chunk
            while isinstance(inner := getattr(module, "module", None), nn.Module):
                module = inner
            self._params |= {f"{number}/{name}": param for name, param in module.named_parameters()}
            self._biases += [
                (f"{number}/{name}.expert_bias", part)
                for name, part in module.named_modules()
                if name.endswith("router") and getattr(part, "expert_bias", None) is not None
            ]

    def tensors(self) -> Mapping[str, Tensor]:
        self.engine._finish_param_gather()
        return self._params | {name: part.expert_bias.float() for name, part in self._biases}


def _local(param: Tensor) -> Tensor:
    # A sync reads without gradients, so plain tensors are not detached: hundreds of views take as long as moving a
    # small model.
    if not isinstance(param, DTensor):
        return param
    own: Any = param.detach()
    return own.to_local().contiguous()


def _whole(param: nn.Parameter) -> Tensor:
    value = param.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _merging(base: Tensor, up: Tensor, down: Tensor, scaling: float) -> Callable[[], Tensor]:
    def merged() -> Tensor:
        return (base.float() + (up.float() @ down.float()) * scaling).to(base.dtype)

    return merged
