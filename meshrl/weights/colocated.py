"""The sync of a worker that trains and generates on the same devices: which way the weights go, chosen by its engines.

| rollout | way |
|---|---|
| generates with the trainer's own module | none: only the version moves on |
| embedded or hf, with a copy of its own | a plan (`connect`) |
| embedded, cut or with experts spread over ranks | a plan, for each rank its part; adapters are merged by the senders |
| embedded or hf, of a sharded trainer with LoRA | the base once, then adapters alone (`merging`), or merged by a plan |
| vLLM, SGLang | a plan for each bucket of tensors (`streamed`), of which each rank of a vLLM gets its part |
| vLLM, with LoRA | the base once in that way, then adapters alone (`adapters`), or all of it merged |
| any, of FSDP1 with adapters | a stream of whole tensors |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from meshrl.engines.base import Engine
from meshrl.engines.fsdp.engine import FSDPEngine
from meshrl.engines.fsdp.sharding import Whole
from meshrl.models.families import PLAIN_ATTENTION
from meshrl.models.key_map import matrix
from meshrl.models.loading import empty_causal_lm
from meshrl.rollout.base import Rollout
from meshrl.weights.adapters import connect_adapters
from meshrl.weights.checksum import checksum
from meshrl.weights.connect import connect, connect_stream, rank_and_world, rollout_params
from meshrl.weights.exchange import Traffic
from meshrl.weights.merging import MergingSync
from meshrl.weights.rollout_placement import RolloutLayout
from meshrl.weights.sources import has_fsdp2
from meshrl.weights.sync import SyncReport, end_refusal, refuse, sync_weights
from meshrl.weights.transport import SyncError


class PolicySync(Protocol):
    """Brings a version from the engine to the rollout; all ranks together."""

    def __call__(self, rollout: Rollout, version: int) -> SyncReport: ...

    def forget(self) -> None:
        """Says that the rollout has given its weights up."""


def policy_sync(
    engine: Engine,
    rollout: Rollout,
    *,
    bucket_megabytes: int,
    verify: bool,
    delta: bool,
    deadline: float,
    adapters: str = "alone",
    dtype: torch.dtype = torch.float32,
) -> PolicySync:
    """The way that fits an engine and the rollout of its own process.

    `adapters`: of a sharded model with LoRA, send the base once and then adapters `alone`, or always all weights
    `merged`. What lies whole in the same process is merged there. `dtype`: of the weights of an engine without a module
    of ours.
    """
    hf_model: Any = getattr(rollout, "hf_model", None)
    if getattr(rollout, "shares_weights", False):
        return Shared(engine)
    if not takes_plans(engine):
        return Stream(engine, verify)

    options: dict[str, Any] = {"bucket_megabytes": bucket_megabytes, "verify": verify, "deadline": deadline}

    parallel: Any = getattr(rollout, "parallel", None)

    def make() -> PolicySync:
        if hf_model is None:
            model = empty_causal_lm(engine.hf_model.config, PLAIN_ATTENTION, dtype)
            cut = None if parallel is None else RolloutLayout.of(parallel, rank_and_world()[1], "packed")
            ranks = getattr(rollout, "replica_ranks", 1)
            stream = partial(connect_stream, engine, model, layout=cut, replica_ranks=ranks, **options)
            if not takes_adapters(engine, rollout, adapters):
                return stream()

            def send_base(rollout: Rollout, version: int) -> SyncReport:
                once = stream(adapters="base")
                report = once(rollout, version)
                once.close()
                return report

            assert isinstance(engine, FSDPEngine)
            return connect_adapters(engine, send_base=send_base, master=dtype == torch.float32, **options)
        if parallel is not None:
            layout, own = RolloutLayout.of(parallel, rank_and_world()[1]), rollout_params(hf_model)
            return connect(engine, own, layout=layout, hf_config=hf_model.config, delta=delta, **options)
        if isinstance(engine, FSDPEngine) and engine.has_adapters and engine.is_sharded and adapters == "alone":
            return MergingSync(engine, hf_model, delta=delta, **options)
        return connect(engine, rollout_params(hf_model), delta=delta, **options)

    return AtFirstUse(make)


def sends_adapters(engine: Engine, adapters: str) -> bool:
    """Whether an engine's adapters can travel alone, and are to."""
    return isinstance(engine, FSDPEngine) and engine.has_adapters and takes_plans(engine) and adapters == "alone"


def takes_adapters(engine: Engine, rollout: Rollout, adapters: str) -> bool:
    """Whether they come to a rollout that computes with them as they are."""
    return sends_adapters(engine, adapters) and getattr(rollout, "takes_adapters", False)


def takes_plans(engine: Engine) -> bool:
    """Whether plans can be made of an engine's weights: not of adapters under FSDP1's flat parameters."""
    if not isinstance(engine, FSDPEngine) or not engine.has_adapters:
        return True
    return isinstance(engine.sharding, Whole) or has_fsdp2(engine.module)


class Shared:
    """The rollout generates with the trainer's module."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.size = sum(p.numel() * p.element_size() for p in engine.module.parameters())

    def __call__(self, rollout: Rollout, version: int) -> SyncReport:
        started = time.perf_counter()
        sync_weights(self.engine, rollout, version)
        return SyncReport(version, time.perf_counter() - started, Traffic(copied=self.size, shared=self.size), 0)

    def forget(self) -> None:
        """Nothing is remembered."""


class Stream:
    """Every tensor whole, one after the other, in whatever buckets the rollout makes of them.

    `verify` compares the sums of what passed with those of what the rollout's module has then, where it has one.
    """

    def __init__(self, engine: Engine, verify: bool = False):
        self.engine, self.verify = engine, verify

    def __call__(self, rollout: Rollout, version: int) -> SyncReport:
        started, traffic = time.perf_counter(), Traffic()
        end_refusal(rollout)
        hf_model: Any = getattr(rollout, "hf_model", None)
        own = rollout_params(hf_model) if self.verify and hf_model is not None else {}
        parallel: Any = getattr(rollout, "parallel", None)
        sums: dict[str, Tensor] = {}

        def watched(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                traffic.copied += tensor.numel() * tensor.element_size()
                if name in own:
                    part = tensor if parallel is None else parallel.part(name, tensor)
                    sums[name] = _sum_of(part, own[name].dtype)
                yield name, tensor

        sync_weights(self.engine, rollout, version, watched)
        if problem := _difference(sums, own):
            error = SyncError(f"weight sync: {problem} on rank {rank_and_world()[0]} (a stream of whole tensors)")
            refuse(rollout, error)
            raise error
        return SyncReport(version, time.perf_counter() - started, traffic, 0)

    def forget(self) -> None:
        """Nothing is remembered."""


def _sum_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return checksum(tensor.detach().reshape(matrix(tuple(tensor.shape))), 0, 0, dtype)


def _difference(sums: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Which parameter has other sums than what was sent, if any."""
    if not sums:
        return ""
    found = [_sum_of(own[name], own[name].dtype) for name in sums]
    pairs = torch.stack(
        [torch.stack([sent.to(here.device), here]) for sent, here in zip(sums.values(), found, strict=True)]
    )
    wrong = [name for name, (sent, here) in zip(sums, pairs.tolist(), strict=True) if sent != here]
    return f"'{wrong[0]}' differs from what was sent" if wrong else ""


class AtFirstUse:
    """A sync that is made when it first runs: only then are the engine's weights sure to be on the device."""

    def __init__(self, make: Callable[[], PolicySync]):
        self._make = make
        self._made: PolicySync | None = None

    def __call__(self, rollout: Rollout, version: int) -> SyncReport:
        if self._made is None:
            self._made = self._make()
        return self._made(rollout, version)

    def forget(self) -> None:
        if self._made is not None:
            self._made.forget()


def over_ranks(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One step's sync metrics of all ranks as one: bytes moved add up, times and memory are those of the worst rank."""
    names = {name: None for metrics in found for name in metrics}
    return {
        name: (sum if name.endswith("_bytes") and "buffer" not in name else max)(
            metrics[name] for metrics in found if name in metrics
        )
        for name in names
    }
