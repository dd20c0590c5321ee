"""How far an offline run is: a bar where someone watches, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_SECONDS = 10.0


class Progress:
    """Rows, failures and tokens a second on a console."""

    def __init__(self, total: int, done: int, console: Console):
        self.total, self.console, self.tokens = total, console, 0
        self._bar = Bar(
            TextColumn("generate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, note="")
        self._started = self._said = time.monotonic()

    def show(self, done: int, failed: int, tokens: int) -> None:
        """Brings the display up to date."""
        self.tokens, now = tokens, time.monotonic()
        note = f"{tokens / max(now - self._started, 1e-9):,.0f} tok/s"
        if failed:
            note += f", {failed} failed"
        self._bar.update(self._task, completed=done, note=note)
        if not self.console.is_terminal and (now - self._said > LINE_SECONDS or done == self.total):
            self._said = now
            self.console.print(f"generate: {done} of {self.total} rows, {note}", highlight=False)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
