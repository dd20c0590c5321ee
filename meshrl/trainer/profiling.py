"""`global_profiler`: profiles of chosen steps, from chosen ranks of every group of workers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from meshrl.config.root import PPOConfig
from meshrl.config.trainer import ProfilerConfig
from meshrl.controller import WorkerGroup
from meshrl.telemetry.console import StepConsole
from meshrl.telemetry.profiler import nsys_command


class StepProfiler:
    """Hears of every step: starts the workers' profilers before one that is chosen, and ends them after it."""

    def __init__(self, config: ProfilerConfig, groups: Mapping[str, WorkerGroup], say: Callable[[str], None]):
        self.config, self.groups, self.say = config, groups, say
        self.folder = Path(config.save_path).absolute()
        self._running: int | None = None
        # Colocated roles are views over the same processes: one profile for all of them.
        self._processes = {id(group._backend): (role, group) for role, group in reversed(list(groups.items()))}

    def begin(self, step: int) -> None:
        """A step begins: the one before has ended."""
        self.end()
        if step in self.config.steps:
            self._each("start_profile", self.config.tool)
            self._running = step

    def end(self) -> None:
        """The step that is profiled has ended, if one is."""
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
    """As the config says; None without a tool. What is still profiled at the end is written, too."""
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
