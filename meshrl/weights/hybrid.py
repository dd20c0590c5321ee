"""Trainer and rollout on the same devices, taking turns: the switch between their phases.

    train ──to_rollout(version)──> rollout ──to_train()──> train ──back_to_rollout()──> rollout ...

    to_rollout: load      the trainer's weights, if they wait in host memory
                weights   the rollout takes memory for its weights
                sync      they are streamed, bucket by bucket
                offload   what the trainer does not need meanwhile goes to host memory
                kv_cache  the rollout takes the rest
    to_train:   release   the rollout gives up its cache and, where it has its own, its weights
    back_to_rollout: as to_rollout, with the version that the rollout had; the trainer must not have moved on

Weights come before the cache and the trainer leaves in between: so the peak is both shards and two buckets, never both
shards and the cache. Each step's memory is measured, and held against a budget. While training the allocator's segments
may grow in place; from `weights` to `release` they have fixed sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from meshrl.engines.base import Engine
from meshrl.rollout.base import TAGS, Rollout
from meshrl.telemetry.memory import Meter, PeakMemory, meter_of
from meshrl.weights.colocated import PolicySync
from meshrl.weights.segments import Segments

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
