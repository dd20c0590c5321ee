"""The sync of a worker that trains and generates on the same devices: which way the weights go, chosen by its engines.

| rollout | way |
|---|---|
| generates with the trainer's own module | none: only the version moves on |
| embedded or hf, with a copy of its own | a plan (`connect`) |
| embedded, cut or with experts spread over ranks | a plan, for each rank its part; adapters are merged by the senders |
| embedded or hf, of a sharded trainer with LoRA | the base once, then adapters alone, or merged by a plan |
| vLLM, SGLang | a plan for each bucket of tensors (`session`), of which each rank of a vLLM gets its part |
| vLLM, with LoRA | the base once in that way, then adapters alone (`lora_sync`), or all of it merged |
| any, of FSDP1 with adapters | a stream of whole tensors |
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


# Trainer and rollout on the same devices, taking turns: the switch between their phases.
#
#     train ──to_rollout(version)──> rollout ──to_train()──> train ──back_to_rollout()──> rollout ...
#
#     to_rollout: load      the trainer's weights, if they wait in host memory
#                 weights   the rollout takes memory for its weights
#                 sync      they are streamed, bucket by bucket
#                 offload   what the trainer does not need meanwhile goes to host memory
#                 kv_cache  the rollout takes the rest
#     to_train:   release   the rollout gives up its cache and, where it has its own, its weights
#     back_to_rollout: as to_rollout, with the version that the rollout had; the trainer must not have moved on
#
# Weights come before the cache and the trainer leaves in between: so the peak is both shards and two buckets, never
# both
# shards and the cache. Each step's memory is measured, and held against a budget. While training the allocator's
# segments
# may grow in place; from `weights` to `release` they have fixed sizes.

TRAIN, ROLLOUT = "train", "rollout"


class HybridEngine:
    """One rank's engine and rollout. All ranks switch together.

    `sync` brings a version from the engine to the rollout. `param_offload` and `optimizer_offload`: what of the
    trainer waits in host memory while the rollout works (and, for `param_offload`, between all phases).
    `free_cache_engine`: the rollout gives its memory up while the trainer works. `budget_bytes`: a step whose peak is
    above it is an error that names the step. `expandable_segments`: on a GPU, those of the trainer. `meet` waits for
    the ranks whose devices the rollout's engine works on: before it takes memory there, and after it gave it back.
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
        # Whether the trainer's weights may have changed since this version; for whoever trains to say.
        self.has_trained = False
        self._kept: dict[str, float] = {}
        self._released: tuple[str, ...] = ()
        self._rollout_state = self._seeded(rollout_seed)

    def ensure(self, phase: str) -> None:
        """Switches to a phase if it is not on; the measures come with those of the next `to_rollout`."""
        if self.phase != phase:
            self._kept |= self.back_to_rollout() if phase == ROLLOUT else self.to_train()

    def to_rollout(self, version: int) -> dict[str, float]:
        """Brings the trainer's weights to the rollout as `version` and lets it work; gives each step's measures."""
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
        """Lets the rollout go on with the version it had before the trainer's turn."""
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
        """Takes the rollout's memory back for the trainer."""
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
        """Gives the allocator back as it was."""
        if self.segments is not None:
            self.segments.restore()

    def _expect(self, phase: str) -> None:
        if self.phase != phase:
            raise RuntimeError(f"the devices are in phase '{self.phase}', but the switch starts in phase '{phase}'")

    def _give_free_memory_back(self) -> None:
        """What torch holds of the trainer's activations and gradients is not free for an engine beside it."""
        if self.device.type == "cuda" and not self.rollout.shares_allocator:
            torch.cuda.empty_cache()

    def _take_back(self, tag: str) -> None:
        if tag in self._released:
            self._meet()
            self.rollout.resume((tag,))
            self._released = tuple(held for held in self._released if held != tag)

    @contextmanager
    def _fixed_segments(self) -> Iterator[None]:
        """Around what leads to the rollout's phase; where it fails, the trainer's is on."""
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
        """Measures a step."""
        watch = PeakMemory(budget_bytes=self.budget_bytes, meter=self.meter)
        yield
        metrics |= watch.metrics(f"switch_{name}")

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Around generating: the rollout's random numbers are its own; how many it draws does not change training."""
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


# Settings of torch's CUDA allocator by phase: memory that can grow in place while training, and not while generating.
#
# Training takes tensors of many sizes. In segments of fixed size the gaps between them add up; segments that grow in
# place (`expandable_segments`) have few. A rollout hands memory to other processes or puts it to sleep by an allocator
# of
# its own, and neither goes with such segments.

GROWS = "expandable_segments"
# Where users set the allocator; the second is the older name, and wins for GPUs.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Segments:
    """The process's choice. Whatever else its environment sets (`PYTORCH_ALLOC_CONF`) stays as it is."""

    def __init__(self) -> None:
        now = ",".join(os.environ.get(name, "") for name in VARIABLES)
        self.others = [setting for setting in now.split(",") if setting and not setting.startswith(GROWS)]
        self.grow_now = self.grew = f"{GROWS}:True" in now

    def grow(self, wanted: bool) -> None:
        """From now on new segments grow in place, or have fixed sizes.

        Memory that is cached but not in use goes back: the allocator would not use one kind's for the other.
        """
        if wanted != self.grow_now:
            torch.cuda.empty_cache()
            # A call drops what it does not name.
            torch._C._accelerator_setAllocatorSettings(",".join([*self.others, f"{GROWS}:{wanted}"]))
            self.grow_now = wanted

    def restore(self) -> None:
        """As the environment has it."""
        self.grow(self.grew)
