"""LoRA for rollouts that take no adapters: the base model once, then the adapters alone, merged where they arrive.

Merging anew for every version needs the base as it was: each rollout keeps it in host memory. In return the trainer
sends a few megabytes a step instead of the model, and a rollout that gave its weights up has them back without anybody
sending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshrl.engines.fsdp.engine import FSDPEngine
from meshrl.rollout.base import Rollout
from meshrl.weights.adapters import adapter_exchange
from meshrl.weights.connect import all_float32, connect, lent, rollout_params
from meshrl.weights.exchange import Traffic
from meshrl.weights.sources import DOWN, UP, FSDP2Source
from meshrl.weights.sync import SyncReport


@torch.no_grad()
def merged(
    params: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    scaling: Mapping[str, float],
    *,
    is_there: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a rollout: the base's with its adapters, or as it is; itself where the rollout has that."""
    for name, param in params.items():
        layer, _, kind = name.rpartition(".")
        down, up = (f"{layer}{part}default.weight" for part in (DOWN, UP))
        if kind == "weight" and down in adapters:
            own = base[name].to(param.device)
            change = adapters[up].to(param.device).float() @ adapters[down].to(param.device).float()
            yield name, (own.float() + change * scaling[layer]).to(own.dtype)
        else:
            yield name, param if is_there else base[name]


def base_dtypes(source: FSDP2Source) -> dict[str, torch.dtype]:
    """The types in which the trainer holds its base model: copies to merge from must not round."""
    return {name: tensor.dtype for name, tensor in source.tensors().items()}


class MergingSync:
    """Brings base and adapters to the rollout of its own process; `base_sync_done`: from then on adapters alone.

    `delta`: of adapters only what changed.
    """

    def __init__(self, engine: FSDPEngine, hf_model: Any, *, delta: bool = False, **options: Any):
        self.engine, self.options = engine, options
        self.params = rollout_params(hf_model)
        master = all_float32(self.params)
        self.source, self.sync = adapter_exchange(engine, master=master, delta=delta, **options)
        self.base: dict[str, Tensor] = {}
        self._is_there = False  # whether the rollout has the weights that no adapter changes

    @property
    def base_sync_done(self) -> bool:
        return bool(self.base)

    def forget(self) -> None:
        """The rollout has given its weights up. The base waits in host memory."""
        self._is_there, self.sync.version = False, -1

    def __call__(self, rollout: Rollout, version: int) -> SyncReport:
        """All ranks together."""
        traffic, seconds = Traffic(), 0.0
        if not self.base_sync_done:
            report = self._bring_base()
            traffic, seconds = report.traffic, report.seconds
        assert self.sync.destination is not None
        with lent(self.source.tensors(), self.sync):
            report = self.sync.run(version)
        adapters = self.sync.destination.tensors
        made = merged(self.params, self.base, adapters, self.engine.adapter_scaling, is_there=self._is_there)
        rollout.update_weights(made, version)
        self._is_there = True
        traffic.add(report.traffic)
        return SyncReport(version, seconds + report.seconds, traffic, report.buffer_bytes)

    def _bring_base(self) -> SyncReport:
        dtypes = base_dtypes(FSDP2Source(self.engine, "base"))
        blank = {name: torch.empty(p.shape, dtype=dtypes.get(name, p.dtype)) for name, p in self.params.items()}
        sync = connect(self.engine, blank, adapters="base", **self.options)
        report = sync(None, 0)
        sync.close()
        self.base = blank
        return report
