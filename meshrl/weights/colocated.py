"""Weight sync and memory switch of a worker that trains and generates on the same devices.

- `policy_sync` chooses the sync (`Shared`, `Stream`, a plan, LoRA adapters) from the engine and the rollout.
- `HybridEngine` switches a rank between training and generation, with offloading.
- `Segments` sets the CUDA allocator for each phase.

| rollout | sync |
|---|---|
| generates with the trainer's own module | none: only the version changes |
| embedded or hf, with its own copy of the weights | a reshard plan (`connect`) |
| embedded, tensor-parallel or expert-parallel | a plan that brings each rank its shard; the senders merge adapters |
| embedded or hf, of a sharded trainer with LoRA | the base once, then adapters alone, or merged weights by a plan |
| vLLM, SGLang | a plan for each bucket of tensors (`session`), of which each rank of a vLLM gets its shard |
| vLLM, with LoRA | the base once by such plans, then adapters alone (`lora_sync`), or all weights merged |
| any, if the trainer is FSDP1 with adapters | a stream of whole tensors |
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.engines.fsdp.sharding import Whole
from meshrl.engines.training_engine import Engine
from meshrl.models.loading import PLAIN_ATTENTION, empty_causal_lm
from meshrl.models.names import matrix
from meshrl.rollout.base import TAGS, Rollout
from meshrl.telemetry.device_stats import Meter, PeakMemory, meter_of
from meshrl.weights.connect import connect, connect_stream, rank_and_world, rollout_params
from meshrl.weights.executor import Traffic, checksum
from meshrl.weights.lora_sync import MergingSync, connect_adapters
from meshrl.weights.placement import RolloutLayout
from meshrl.weights.session import SyncReport, end_refusal, refuse, sync_weights
from meshrl.weights.sources import has_fsdp2
from meshrl.weights.transports import SyncError


class PolicySync(Protocol):
    """A callable that syncs a version of the weights from the engine to the rollout. All ranks call it together."""

    def __call__(self, rollout: Rollout, version: int) -> SyncReport: ...

    def forget(self) -> None:
        """Record that the rollout has released its weights, so that the next sync sends all of them."""


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
    """Return the sync that fits an engine and the rollout in the same process.

    `adapters`: a sharded model with LoRA sends the base once and then adapters `alone`, or always all weights `merged`.
    An unsharded model is always merged. `dtype`: the dtype of the empty model that stands for the weights of a rollout
    without `hf_model`.
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
    """Return whether the engine's adapters can be sent without the base model, and `adapters` is `alone`."""
    return isinstance(engine, FSDPEngine) and engine.has_adapters and takes_plans(engine) and adapters == "alone"


def takes_adapters(engine: Engine, rollout: Rollout, adapters: str) -> bool:
    """Return whether adapters are sent alone to a rollout that computes with LoRA adapters itself."""
    return sends_adapters(engine, adapters) and getattr(rollout, "takes_adapters", False)


def takes_plans(engine: Engine) -> bool:
    """Return whether reshard plans can be made from the engine's weights.

    Adapters under FSDP1's flat parameters cannot be planned.
    """
    if not isinstance(engine, FSDPEngine) or not engine.has_adapters:
        return True
    return isinstance(engine.sharding, Whole) or has_fsdp2(engine.module)


class Shared:
    """A sync for a rollout that generates with the trainer's module: only the version changes."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.size = sum(p.numel() * p.element_size() for p in engine.module.parameters())

    def __call__(self, rollout: Rollout, version: int) -> SyncReport:
        started = time.perf_counter()
        sync_weights(self.engine, rollout, version)
        return SyncReport(version, time.perf_counter() - started, Traffic(copied=self.size, shared=self.size), 0)

    def forget(self) -> None:
        """Do nothing: the sync keeps no state between versions."""


class Stream:
    """A sync that streams every tensor whole, one after the other, into whatever buckets the rollout forms.

    `verify` compares the checksums of the streamed tensors with those of the rollout's parameters afterwards, if the
    rollout has an `hf_model`.
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
        """Do nothing: the sync keeps no state between versions."""


def _sum_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return checksum(tensor.detach().reshape(matrix(tuple(tensor.shape))), 0, 0, dtype)


def _difference(sums: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return a message that names the first parameter whose checksum differs from the sent one, or ""."""
    if not sums:
        return ""
    found = [_sum_of(own[name], own[name].dtype) for name in sums]
    pairs = torch.stack(
        [torch.stack([sent.to(here.device), here]) for sent, here in zip(sums.values(), found, strict=True)]
    )
    wrong = [name for name, (sent, here) in zip(sums, pairs.tolist(), strict=True) if sent != here]
    return f"'{wrong[0]}' differs from what was sent" if wrong else ""


class AtFirstUse:
    """A sync that is constructed at its first call, when the engine's weights are certainly on the device."""

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
    """Merge one step's sync metrics of all ranks: sum the bytes moved, and take the maximum of times and memory."""
    names = {name: None for metrics in found for name in metrics}
    return {
        name: (sum if name.endswith("_bytes") and "buffer" not in name else max)(
            metrics[name] for metrics in found if name in metrics
        )
        for name in names
    }


# The memory switch between the phases of trainer and rollout, which take turns on the same devices.
#
#     train ──to_rollout(version)──> rollout ──to_train()──> train ──back_to_rollout()──> rollout ...
#
#     to_rollout: load      the trainer's weights return to the device, if they are offloaded
#                 weights   the rollout allocates memory for its weights
#                 sync      the weights are streamed, bucket by bucket
#                 offload   the trainer's weights and optimizer states go to host memory, as configured
#                 kv_cache  the rollout allocates its KV cache
#     to_train:   release   the rollout frees its KV cache and, if it has its own weights, the weights
#     back_to_rollout: as to_rollout, with the rollout's last version; the trainer must not have updated its weights
#
# The rollout's weights come before its KV cache, and the trainer is offloaded in between. So the peak is both shards of
# the weights and two buckets, never both shards and the cache. The memory of each step is measured and compared with a
# budget. During training the allocator's segments may grow in place. From `weights` to `release` they have fixed sizes.

TRAIN, ROLLOUT = "train", "rollout"


class HybridEngine:
    """One rank's engine and rollout, which take turns on a device. All ranks switch together.

    `sync` brings a version from the engine to the rollout. `param_offload` and `optimizer_offload` keep the trainer's
    weights and optimizer states in host memory while the rollout works. `param_offload` also keeps the weights there
    between all phases. With `free_cache_engine` the rollout releases its memory while the trainer works. A step whose
    peak memory exceeds `budget_bytes` raises an error that names the step. `expandable_segments` lets the trainer's
    CUDA allocator segments grow in place. `meet` is a barrier of the ranks whose devices the rollout's engine uses. It
    is called before the rollout takes memory and after it has released memory.
    """

    def __init__(
        self,
        engine: Engine,
        rollout: Rollout,
        sync: PolicySync,
        *,
        device: torch.device,
        free_cache_engine: bool = True,
        param_offload: bool = False,
        optimizer_offload: bool = False,
        shares_weights: bool = False,
        budget_bytes: int | None = None,
        expandable_segments: bool = False,
        meter: Meter | None = None,
        rollout_seed: int = 0,
        meet: Callable[[], None] | None = None,
    ):
        self.engine, self.rollout, self.sync, self.device = engine, rollout, sync, device
        self.frees, self.shares_weights = free_cache_engine, shares_weights
        self.param_offload, self.optimizer_offload = param_offload, optimizer_offload
        self.budget_bytes = budget_bytes
        self.meter: Meter = meter or meter_of(device)
        self._meet = meet or (lambda: None)
        self.segments = Segments() if expandable_segments and device.type == "cuda" else None
        self._grow_segments(True)
        self.phase = TRAIN
        self.version = -1
        # Whether the trainer's weights may have changed since this version. The code that trains sets it.
        self.has_trained = False
        self._kept: dict[str, float] = {}
        self._released: tuple[str, ...] = ()
        self._rollout_state = self._seeded(rollout_seed)

    def ensure(self, phase: str) -> None:
        """Switch to `phase` unless it is already active.

        The memory metrics of the switch are returned with those of the next `to_rollout`.
        """
        if self.phase != phase:
            self._kept |= self.back_to_rollout() if phase == ROLLOUT else self.to_train()

    def to_rollout(self, version: int) -> dict[str, float]:
        """Sync the trainer's weights to the rollout as `version`, switch to it, and return the metrics of each step."""
        self._expect(TRAIN)
        if version <= self.version:
            raise ValueError(f"weight sync: version {version} is not newer than the rollout's {self.version}")
        metrics = self._kept | self._bring(version)
        self._kept = {}
        return metrics

    def _bring(self, version: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with self._step("load", metrics):
            if self.param_offload:
                self.engine.to(self.device, model=True, optimizer=False)
        with self._fixed_segments():
            try:
                with self._step("weights", metrics):
                    self._give_free_memory_back()
                    self._take_back("weights")
                with self._step("sync", metrics):
                    report = self.sync(self.rollout, version)
            except BaseException:
                self._rest_trainer()
                raise
            with self._step("offload", metrics):
                self._rest_trainer()
            with self._step("kv_cache", metrics):
                self._give_free_memory_back()
                self._take_back("kv_cache")
        self.phase, self.version, self.has_trained = ROLLOUT, version, False
        return metrics | report.metrics()

    def back_to_rollout(self) -> dict[str, float]:
        """Switch back to the rollout with the version that it had before the training phase."""
        self._expect(TRAIN)
        if self.version < 0:
            raise RuntimeError("the rollout has no weights yet: sync them before generating")
        if self.shares_weights and self.has_trained:
            raise RuntimeError(
                f"the rollout shares the trainer's weights, which an update has moved on from version {self.version}: "
                "sync them before generating"
            )
        if "weights" in self._released:
            if self.has_trained:
                raise RuntimeError(
                    f"the rollout gave version {self.version} up for an update: sync the weights before generating, or "
                    "set rollout.free_cache_engine=false"
                )
            return self._bring(self.version)
        metrics: dict[str, float] = {}
        with self._fixed_segments(), self._step("kv_cache", metrics):
            self._give_free_memory_back()
            self._take_back("kv_cache")
        self.phase = ROLLOUT
        return metrics

    def to_train(self) -> dict[str, float]:
        """Switch to training: release the rollout's memory if `free_cache_engine` is set, and return the metrics."""
        self._expect(ROLLOUT)
        metrics: dict[str, float] = {}
        with self._step("release", metrics):
            if self.frees:
                self._released = ("kv_cache",) if self.shares_weights else TAGS
                self.rollout.release(self._released)
                self._meet()
            if "weights" in self._released:
                self.rollout.version = -1
                self.sync.forget()
        self._grow_segments(True)
        self.phase = TRAIN
        return metrics

    def _rest_trainer(self) -> None:
        if self.param_offload or self.optimizer_offload:
            self.engine.to("cpu", model=self.param_offload, optimizer=self.optimizer_offload)

    def close(self) -> None:
        """Restore the allocator setting that the environment asks for."""
        if self.segments is not None:
            self.segments.restore()

    def _expect(self, phase: str) -> None:
        if self.phase != phase:
            raise RuntimeError(f"the devices are in phase '{self.phase}', but the switch starts in phase '{phase}'")

    def _give_free_memory_back(self) -> None:
        """Empty torch's CUDA cache: cached blocks are not free for a rollout engine with its own allocator."""
        if self.device.type == "cuda" and not self.rollout.shares_allocator:
            torch.cuda.empty_cache()

    def _take_back(self, tag: str) -> None:
        if tag in self._released:
            self._meet()
            self.rollout.resume((tag,))
            self._released = tuple(held for held in self._released if held != tag)

    @contextmanager
    def _fixed_segments(self) -> Iterator[None]:
        """Use segments of fixed size for a switch to the rollout; restore growing segments if the switch fails."""
        self._grow_segments(False)
        try:
            yield
        except BaseException:
            self._grow_segments(True)
            raise

    def _grow_segments(self, wanted: bool) -> None:
        if self.segments is not None:
            self.segments.grow(wanted)

    @contextmanager
    def _step(self, name: str, metrics: dict[str, float]) -> Iterator[None]:
        """Measure the peak memory of the enclosed step and add it to `metrics`."""
        watch = PeakMemory(budget_bytes=self.budget_bytes, meter=self.meter)
        yield
        metrics |= watch.metrics(f"switch_{name}")

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Give the rollout its own random state, so that the number of its draws does not change training."""
        mine = self._random_state()
        self._set_random_state(self._rollout_state)
        try:
            yield
        finally:
            self._rollout_state = self._random_state()
            self._set_random_state(mine)

    def _random_state(self) -> list[torch.Tensor]:
        states = [torch.random.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else states

    def _set_random_state(self, states: list[torch.Tensor]) -> None:
        torch.random.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.device)

    def _seeded(self, seed: int) -> list[torch.Tensor]:
        mine = self._random_state()
        torch.manual_seed(seed)
        made = self._random_state()
        self._set_random_state(mine)
        return made


# Settings of torch's CUDA allocator by phase: segments grow in place during training, and not during generation.
#
# Training allocates tensors of many sizes. In segments of fixed size the gaps between them add up. Segments that grow
# in place (`expandable_segments`) have few gaps. A rollout shares memory with other processes, or puts it to sleep with
# its own allocator. Neither works with expandable segments.

GROWS = "expandable_segments"
# The variables in which users configure the allocator. The second is the older name, and it takes precedence for GPUs.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Segments:
    """The process's choice of growing or fixed allocator segments.

    All other settings of the environment (`PYTORCH_ALLOC_CONF`) stay unchanged.
    """

    def __init__(self) -> None:
        now = ",".join(os.environ.get(name, "") for name in VARIABLES)
        self.others = [setting for setting in now.split(",") if setting and not setting.startswith(GROWS)]
        self.grow_now = self.grew = f"{GROWS}:True" in now

    def grow(self, wanted: bool) -> None:
        """Let new segments grow in place, or give them fixed sizes.

        Empty the cache first, because the allocator would not use cached memory of one kind for the other.
        """
        if wanted != self.grow_now:
            torch.cuda.empty_cache()
            # The call resets every setting that it does not name, so the other settings are passed again.
            torch._C._accelerator_setAllocatorSettings(",".join([*self.others, f"{GROWS}:{wanted}"]))
            self.grow_now = wanted

    def restore(self) -> None:
        """Restore the segment kind that the environment asks for."""
        self.grow(self.grew)
