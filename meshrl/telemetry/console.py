"""Console output of a run: one line per step and, on an interactive terminal, a progress bar.

StepConsole:   the tracker that prints step lines, with columns for PPO, SFT and preference training
counting_bar:  a progress bar for counted work outside the steps
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

VALIDATION = re.compile(r"^val-core/(?P<source>.+)/acc/(?P<kind>mean|pass)@(?P<n>\d+)$")
_HEADER_EVERY = 25
_PHASE_LABELS = {"update_actor": "update", "update_critic": "critic", "old_log_prob": "old logp", "testing": "val"}


@dataclass(frozen=True)
class Column:
    """A column of the step line with a heading.

    It shows the first of the metrics `names` that was logged, formatted by `form`. `absent` is shown if none was.
    """

    heading: str
    names: tuple[str, ...]
    form: Callable[[float], str]
    width: int
    absent: str = "-"


def plain(digits: int) -> Callable[[float], str]:
    """Return a formatter with fixed digits and thousands separators.

    Very small and very large numbers are formatted in scientific notation.
    """

    def form(value: float) -> str:
        small = 0 < abs(value) < 0.5 * 10**-digits
        return f"{value:.1e}" if small or abs(value) >= 1e7 else f"{value:,.{digits}f}"

    return form


def scientific(value: float) -> str:
    """Format a number with two digits and an exponent; zero becomes a plain 0."""
    return f"{value:.1e}" if value else "0"


# A metric that exists only for the step line: the mean accuracy over the data sources.
_ACCURACY = "val-core/mean accuracy"
_TAIL_COLUMNS = (
    Column("tokens/s", ("perf/throughput",), plain(0), 10),
    Column("seconds", ("timing_s/step", "perf/time_per_step"), plain(2), 9),
)
PPO_COLUMNS = (
    Column("reward", ("critic/score/mean",), plain(3), 9),
    Column("length", ("response_length/mean",), plain(1), 9),
    Column("kl", ("actor/ppo_kl",), scientific, 9),
    Column("logp diff", ("training/rollout_log_prob_diff_mean",), scientific, 10),
    Column("entropy", ("actor/entropy", "actor/entropy_loss"), plain(3), 9),
    Column("grad norm", ("actor/grad_norm",), plain(3), 10),
    *_TAIL_COLUMNS,
    Column("val acc", (_ACCURACY,), plain(3), 9, absent=""),
)
_LOSS = Column("loss", ("train/loss",), plain(4), 9)
_HELD_OUT_LOSS = Column("val loss", ("val/loss",), plain(4), 10, absent="")
_STEP_COLUMNS = (
    Column("grad norm", ("train/grad_norm",), plain(3), 10),
    Column("lr", ("train/lr",), scientific, 9),
    *_TAIL_COLUMNS,
)
SFT_COLUMNS = (_LOSS, _HELD_OUT_LOSS, *_STEP_COLUMNS)
PREFERENCE_COLUMNS = (
    _LOSS,
    Column("accuracy", ("train/accuracy",), plain(3), 10),
    Column("margin", ("train/margin",), plain(3), 9),
    _HELD_OUT_LOSS,
    Column("val acc", ("val/accuracy",), plain(3), 9, absent=""),
    *_STEP_COLUMNS,
)


class StepConsole:
    """A tracker that prints a line for each step.

    On an interactive terminal, a bar below the lines shows steps, time, ETA and the current phase. Other consoles
    (a file, CI) get plain lines only.
    """

    def __init__(
        self,
        total_steps: int | None,
        console: Console | None = None,
        *,
        columns: Sequence[Column] = PPO_COLUMNS,
        first_step: int = 0,
    ) -> None:
        self.console = console or Console()
        self.total_steps = total_steps
        self._columns = tuple(columns)
        self._lines = 0
        self._phase = ""
        self._first_step = first_step
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._finished = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the step's line, with a header before every 25th line.

        Validation accuracies get a separate line if there are several or if the step line cannot show them.
        """
        has_line = any(name in metrics for column in self._columns for name in column.names)
        if has_line:
            if self._lines % _HEADER_EVERY == 0:
                self._print(self.header(), style="bold")
            self._lines += 1
            self._print(self.line(metrics, step))
            if bar := self._running_bar():
                bar.update(self._task, completed=step)
        accuracies = validation_accuracies(metrics)
        if len(accuracies) > 1 or (accuracies and (not has_line or self._is_narrow())):
            shown = ", ".join(f"{name} {value:.3f}" for name, value in accuracies.items())
            self._print(f"validation at step {step}: {shown}", crop=False)

    def message(self, text: str) -> None:
        """Print a line of text above the bar."""
        self._print(text, crop=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the phase in the bar while the `with` block runs."""
        before = self._phase
        self.show_phase(name)
        try:
            yield
        finally:
            self.show_phase(before)

    def show_phase(self, name: str) -> None:
        """Show the phase in the bar from now on; "" shows none."""
        self._phase = name
        if bar := self._running_bar():
            bar.update(self._task, phase=_PHASE_LABELS.get(name, name))

    def finish(self) -> None:
        """Remove the bar for good; lines can still be printed."""
        self._finished = True
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> StepConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def header(self) -> str:
        """Return the column headings, aligned with the text of `line`."""
        cells = [f"{'step':>{self._step_width()}}", *(f"{c.heading:>{c.width}}" for c in self._columns)]
        return "".join(cells) + "  where the time went"

    def line(self, metrics: Mapping[str, float], step: int) -> str:
        """Return one line of text with a step's columns and its largest time shares."""
        total = "" if self.total_steps is None else f"/{self.total_steps}"
        cells = [f"{f'{step}{total}':>{self._step_width()}}"]
        means = [value for name, value in validation_accuracies(metrics).items() if "mean@" in name]
        shown = dict(metrics) | ({_ACCURACY: sum(means) / len(means)} if means else {})
        cells += [f"{_cell(column, shown):>{column.width}}" for column in self._columns]
        return ("".join(cells) + f"  {time_shares(metrics)}").rstrip()

    def _is_narrow(self) -> bool:
        """Return whether an interactive terminal is too narrow for all columns."""
        needed = self._step_width() + sum(column.width for column in self._columns)
        return self.console.is_interactive and self.console.width < needed

    def _step_width(self) -> int:
        return 9 if self.total_steps is None else max(9, 2 * len(str(self.total_steps)) + 2)

    def _print(self, line: str, style: str = "", crop: bool = True) -> None:
        # Lines are cut to the width of a terminal only; a file gets whole lines.
        cut = crop and self.console.is_interactive
        text = Text(line, style=style)
        if cut:
            self.console.print(text, no_wrap=True, overflow="ellipsis")
        else:
            self.console.print(text, soft_wrap=True)

    def _running_bar(self) -> Progress | None:
        """Return the bar, and start it at the first call; return None without a terminal or after `finish`."""
        if self._bar is None and self.console.is_interactive and not self._finished:
            total = "/{task.total:.0f}" if self.total_steps else ""
            self._bar = Progress(
                TextColumn("{task.completed:.0f}" + total + " steps"),
                BarColumn(bar_width=None),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[phase]:<12}"),
                console=self.console,
                refresh_per_second=4,
                expand=True,
                # The estimate looks back a day instead of rich's 30 seconds, because a step may take minutes.
                speed_estimate_period=86400.0,
            )
            self._task = self._bar.add_task("", total=self.total_steps, completed=self._first_step, phase=self._phase)
            self._bar.start()
        return self._bar


def validation_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the validation accuracies among the metrics, named `source mean@n` and `source pass@k`.

    pass@1 is left out, because it equals the mean.
    """
    found = {}
    for name, value in metrics.items():
        if (match := VALIDATION.match(name)) and (match["kind"], match["n"]) != ("pass", "1"):
            found[f"{match['source']} {match['kind']}@{match['n']}"] = value
    return found


def time_shares(metrics: Mapping[str, float], top: int = 3) -> str:
    """Return a text with the `top` longest phases of a step and their percentages."""
    seconds = {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/") and name != "timing_s/step" and math.isfinite(value)
    }
    whole = metrics.get("timing_s/step", sum(seconds.values()))
    if not (whole > 0 and math.isfinite(whole)):
        return ""
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:top]
    shares = [(_PHASE_LABELS.get(name, name), round(100 * value / whole)) for name, value in largest]
    return ", ".join(f"{name} {share}%" for name, share in shares if share > 0)


def _cell(column: Column, metrics: Mapping[str, float]) -> str:
    for name in column.names:
        if name in metrics:
            value = metrics[name]
            text = column.form(value) if math.isfinite(value) else str(value)
            return text if len(text) < column.width else f"{value:.1e}"
    return column.absent


# A progress bar for counted work, on a terminal only.


@contextmanager
def counting_bar(words: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar during the `with` block; yield a function `show(done, total)` that updates the bar.

    The bar disappears at the end of the block. Without a terminal nothing is shown.
    """
    console = console or Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show
