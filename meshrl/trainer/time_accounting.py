"""Time accounting of every step: collects from all workers how they spent their time, and profiles chosen steps."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from meshrl.config.rl import PPOConfig
from meshrl.config.trainer import ProfilerConfig, RunConfig
from meshrl.controller import ControllerError, Future, WorkerGroup
from meshrl.telemetry.console import StepConsole
from meshrl.telemetry.device_stats import nsys_command
from meshrl.telemetry.flops import utilisation_metrics
from meshrl.telemetry.run_folder import RunFolder
from meshrl.telemetry.time_ledger import (
    OTHER,
    ClockOffset,
    Key,
    Ledger,
    Page,
    Track,
    account,
    ledger_metrics,
    seconds_by_name,
    seconds_of_a_block,
)
from meshrl.telemetry.timeline import CONTROLLER, TimelineFile

logger = logging.getLogger(__name__)

# The first measurement of a worker's clock is the best of this many.
PINGS = 3
# Seconds that a worker may take to return its ledger, which it does concurrently with its other calls.
ANSWER_SECONDS = 60.0


class Bookkeeper:
    """The collector of the time ledgers of a run's processes. `peak` is the peak FLOP/s of one device, if known."""

    def __init__(
        self, groups: Mapping[str, WorkerGroup], timeline: TimelineFile | None = None, peak: float | None = None
    ):
        self.groups, self.timeline, self.peak = dict(groups), timeline, peak
        self.ledger = Ledger(idle=OTHER)
        self.controller = Track(*CONTROLLER)
        self.tracks: dict[Key, Track] = {}
        self.clocks: dict[Key, ClockOffset] = {}
        self._restarts: dict[str, int] = {}
        self._block_seconds = seconds_of_a_block()

    @contextmanager
    def watching(self, first_step: int) -> Iterator[None]:
        """Account for the steps of a run inside this context, in the thread that takes the steps."""
        self._collect(first_step)
        try:
            with self.ledger.serving("fit", is_call=False):
                yield
        finally:
            if self.timeline is not None:
                self.timeline.close()

    def close_step(self, step: int, begin: float, end: float) -> dict[str, float]:
        """Return the time metrics of a step that lasted from `begin` to `end` on the controller's clock.

        The metrics include the overhead of the accounting itself.
        """
        self._collect(step + 1)
        accounts = account(self.controller, list(self.tracks.values()), begin, end)
        everyone = {CONTROLLER: self.controller} | self.tracks
        metrics = ledger_metrics(accounts, {key: track.device for key, track in everyone.items()}, end - begin)
        sums = {key: seconds_by_name(segments) for key, segments in accounts.items()}
        metrics |= utilisation_metrics({key: track.counts for key, track in self.tracks.items()}, sums, self.peak)
        for track in self.tracks.values():
            for name, value in track.peaks.items():
                metrics[name] = max(value, metrics.get(name, value))
        if self.timeline is not None and self.timeline.wants(step):
            spans = {key: track.spans for key, track in everyone.items()}
            doubts = {key: clock.uncertainty(end) for key, clock in self.clocks.items()}
            self.timeline.write(step, begin, end, accounts, spans, doubts)
        booking = max(track.blocks for track in everyone.values()) * self._block_seconds
        for track in everyone.values():
            track.forget(end)
        collecting = time.perf_counter() - end
        return metrics | {"ledger/collect_s": collecting, "ledger/overhead": (booking + collecting) / (end - begin)}

    def _collect(self, next_step: int) -> None:
        """Collect the ledgers of all processes; keep spans from now on if the next step is to be drawn."""
        traces = self.timeline is not None and self.timeline.wants(next_step)
        answers: dict[str, tuple[float, Future[list[Page]]]] = {}
        # Send all requests before waiting for the first result.
        for who, group in self.groups.items():
            with self._if_alive(who):
                if self._restarts.get(who) != group.restarts:
                    self._meet(who, group)
                answers[who] = time.perf_counter(), group.ask_all("take_ledger", traces)
        for who, (asked, answer) in answers.items():
            with self._if_alive(who):
                pages, answered = answer.get(ANSWER_SECONDS), time.perf_counter()
                for rank, page in enumerate(pages):
                    clock = self.clocks[who, rank]
                    clock.note(asked, page.until, answered)
                    self.tracks[who, rank].add(page, clock.shift)
        self.ledger.traces = traces
        self.controller.add(self.ledger.take(), 0.0)

    @contextmanager
    def _if_alive(self, who: str) -> Iterator[None]:
        """Log and ignore a broken or silent group: the next call of that group handles the failure."""
        try:
            yield
        except (ControllerError, TimeoutError) as error:
            logger.warning("the time of '%s' is not known: %s", who, error)

    def _meet(self, who: str, group: WorkerGroup) -> None:
        """Measure the clocks of new workers, one by one."""
        self._restarts[who] = group.restarts
        for rank in range(group.world_size):
            clock, track = ClockOffset(), Track(who, rank)
            pages: list[Page] = []
            for _ in range(PINGS):
                asked = time.perf_counter()
                pages.append(group.execute_rank(rank, "take_ledger"))
                clock.note(asked, pages[-1].until, time.perf_counter())
            for page in pages:
                track.add(page, clock.shift)
            self.clocks[who, rank], self.tracks[who, rank] = clock, track


@contextmanager
def bookkeeping(
    trainer: RunConfig, groups: Mapping[str, WorkerGroup], run: RunFolder, last_step: int
) -> Iterator[Bookkeeper | None]:
    """Yield the active bookkeeper of a run that resumes after `last_step`, or None if `trainer.ledger` is off."""
    if not trainer.ledger:
        yield None
        return
    timeline = TimelineFile(run.timeline, trainer.timeline_steps, last_step) if trainer.timeline else None
    books = Bookkeeper(groups, timeline, device_peak(trainer))
    with books.watching(last_step + 1):
        yield books


def device_peak(trainer: RunConfig) -> float | None:
    """Return the peak FLOP/s of one device: as configured, or by name for known GPUs of this machine."""
    if trainer.peak_tflops is not None:
        return trainer.peak_tflops * 1e12
    import torch

    from meshrl.telemetry.hardware import known_peak

    if trainer.device == "cpu" or not torch.cuda.is_available():
        return None
    return known_peak(torch.cuda.get_device_name())


# `global_profiler`: profiles of chosen steps, from chosen ranks of every worker group.


class StepProfiler:
    """The profiler of chosen steps: it starts the workers' profilers before such a step and stops them after it."""

    def __init__(self, config: ProfilerConfig, groups: Mapping[str, WorkerGroup], say: Callable[[str], None]):
        self.config, self.groups, self.say = config, groups, say
        self.folder = Path(config.save_path).absolute()
        self._running: int | None = None
        # Colocated roles are views over the same processes, so they have one profile together.
        self._processes = {id(group._backend): (role, group) for role, group in reversed(list(groups.items()))}

    def begin(self, step: int) -> None:
        """End the profile of the previous step, and start one if this step is chosen."""
        self.end()
        if step in self.config.steps:
            self._each("start_profile", self.config.tool)
            self._running = step

    def end(self) -> None:
        """Stop the profilers of the current step, if it is profiled, and report the written files."""
        if self._running is None:
            return
        written = self._each("stop_profile", str(self.folder), self._running)
        self._running = None
        for path in written:
            self.say(f"profile: {path}")

    def _each(self, method: str, *arguments: object) -> list[str]:
        found = []
        for _, group in self._processes.values():
            ranks = self.config.ranks or range(group.world_size)
            chosen = [rank for rank in ranks if rank < group.world_size]
            found += [group.execute_rank(rank, method, *arguments) for rank in chosen]
        return [path for path in found if path]


@contextmanager
def step_profiler(
    config: PPOConfig, groups: Mapping[str, WorkerGroup], screen: StepConsole
) -> Iterator[StepProfiler | None]:
    """Yield the configured profiler, or None without a tool; write a running profile at the end."""
    chosen = config.global_profiler
    if chosen.tool is None:
        yield None
        return
    if chosen.tool == "nsys":
        command = shlex.join(sys.argv)
        screen.message(f"profiler: steps {chosen.steps} are marked; record them by starting the run like this:")
        screen.message(nsys_command(chosen.save_path, command))
    profiler = StepProfiler(chosen, groups, screen.message)
    yield profiler
    profiler.end()
