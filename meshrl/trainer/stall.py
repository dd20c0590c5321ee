"""When nothing has moved for a while: one page that says where every process is and who waits for whom."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from meshrl.controller import WorkerGroup
from meshrl.controller.flight_recorder import Collective, disagreements
from meshrl.files import write_whole
from meshrl.telemetry.run_folder import RunFolder

LOG_LINES = 20
FRAMES = 12


class StallWatch:
    """Hears of every phase that begins or ends; `seconds` after the last one it writes `stall-N.txt`, once a stall."""

    def __init__(
        self, seconds: float | None, run: RunFolder, groups: Mapping[str, WorkerGroup], say: Callable[[str], None]
    ):
        self.seconds, self.run, self.groups, self.say = seconds, run, groups, say
        self.step: Callable[[], int] = lambda: 0
        # Others than worker groups who can say what they wait for.
        self.waits: list[Callable[[], list[str]]] = []
        self._phase, self._moved_at, self._reported = "the start", time.monotonic(), False
        self._ended = threading.Event()
        self._reports = 0

    def moved(self, phase: str) -> None:
        """A phase has begun; "" for the time between phases."""
        self._phase, self._moved_at, self._reported = phase or "between phases", time.monotonic(), False

    def __enter__(self) -> StallWatch:
        if self.seconds is not None:
            threading.Thread(target=self._watch, daemon=True, name="stall-watch").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        assert self.seconds is not None
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            waited = time.monotonic() - self._moved_at
            if waited > self.seconds and not self._reported:
                self._reported = True
                self._write(waited)

    def _write(self, waited: float) -> None:
        self._reports += 1
        file = self.run.path / f"stall-{self._reports}.txt"
        page = self.page(waited)
        write_whole(file, page)
        self.say(f"nothing has moved for {waited:.0f} s: {page.splitlines()[0]}; see {file}")

    def page(self, waited: float) -> str:
        """The whole report; its first line says the most."""
        groups = self._whole_groups()
        waits = [line for ask in (*(group.waits for group in groups), *self.waits) for line in ask()]
        collectives = {group.role: group.collectives() for group in groups}
        apart = [f"'{role}': {line}" for role, by_rank in collectives.items() for line in disagreements(by_rank)]
        who = waits[0] if waits else f"the controller waits in {_own_place()}"
        log = self.run.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.run.log.exists() else []
        parts = [
            f"step {self.step()}, {self._phase}, for {waited:.1f} s: {'; '.join([who, *apart[:1]])}",
            "Who waits for whom\n" + "\n".join(f"  {line}" for line in waits or [who]),
            "Collectives, by torch's flight recorder\n" + _collective_lines(groups, collectives, apart),
            "The controller\n" + _own_stacks(),
            *(f"Workers of '{group.role}'\n{group.stacks()}" for group in groups),
            *(f"Last words of '{group.role}'\n{words}" for group in groups if (words := group.last_words())),
            "Last lines of the log\n" + "\n".join(log),
        ]
        return "\n\n".join(parts) + "\n"

    def _whole_groups(self) -> list[WorkerGroup]:
        """One for each set of processes: colocated roles are views over the same."""
        return list({id(group._backend): group for group in self.groups.values()}.values())


def _collective_lines(
    groups: Sequence[WorkerGroup], collectives: Mapping[str, Mapping[int, Sequence[Collective]]], apart: Sequence[str]
) -> str:
    lines = [f"  {line}" for line in apart]
    for group in groups:
        told = collectives[group.role]
        for rank, entries in told.items():
            lines.append(f"  rank {rank} of '{group.role}': the last is {entries[-1].number}, {entries[-1].words}")
        if group.world_size > 1 and (silent := [rank for rank in range(group.world_size) if rank not in told]):
            lines.append(f"  ranks {silent} of '{group.role}' have told nothing: stopped, or none recorded")
    return "\n".join(lines or ["  none"])


def _own_place() -> str:
    """The innermost line of the main thread, and that of ours which led there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    ours = [place for place in stack if "meshrl" in place.filename]
    last, own = stack[-1], (ours or stack)[-1]
    return f"{last.name} ({last.filename}:{last.lineno}), called by {own.name} ({own.filename}:{own.lineno})"


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident)}:\n" + "".join(traceback.format_stack(frame)[-FRAMES:]))
    return "\n".join(found)
