"""A run that infrastructure has ended begins again by itself, from its newest checkpoint, a limited number of times.

    restarts.jsonl     {"event": "failed", "kind": ..., "error": ...}
                       {"event": "resumed", "step": ..., "thrown_away": ..., "restart": ..., "seconds_lost": ...}

What is lost is the wall time of work that is done again, from when the state was kept to the failure, and that of
starting again, from the failure to when work goes on. No second is counted twice. The count is that of one command: one
that supervises the run (`meshrl train --supervise`) and the run itself count together, by this file.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshrl.config.trainer import RunConfig
from meshrl.environment import SUPERVISED_SINCE
from meshrl.telemetry.run_folder import append_line, parse_line
from meshrl.trainer.failures import kind_of

logger = logging.getLogger(__name__)

FILE = "restarts.jsonl"
LONGEST_WAIT = 300.0
T = TypeVar("T")


@dataclass
class Restarts:
    """The budget of one command: at most `limit` restarts, each after twice the wait of the one before."""

    folder: Path
    limit: int
    first_wait: float
    since: float = field(default_factory=lambda: float(os.environ.get(SUPERVISED_SINCE, time.time())))
    say: Callable[[str], None] = logger.warning
    # Whether an attempt has made the run's folder this run's own: the next one goes on with what is there.
    opened: bool = False
    # Hears the new metrics whenever something was started again.
    tell: Callable[[dict[str, float]], None] = lambda metrics: None

    @classmethod
    def of(cls, trainer: RunConfig) -> Restarts:
        """As the config says."""
        return cls(Path(trainer.run_dir), trainer.max_restarts, trainer.restart_wait)

    def records(self) -> list[dict[str, Any]]:
        """What this command has written down, the oldest first."""
        file = self.folder / FILE
        lines = file.read_bytes().splitlines() if file.exists() else []
        records = [record for line in lines if (record := parse_line(line)) is not None]  # not one that was cut off
        return [record for record in records if record.get("time", 0.0) >= self.since]

    @property
    def used(self) -> int:
        """How often something was started again."""
        return sum(record["event"] == "failed" for record in self.records())

    def is_since(self, file: Path) -> bool:
        """Whether a file was written by this command, maybe by an attempt that was killed."""
        return file.is_file() and file.stat().st_mtime >= self.since

    def failed(self, what: str, kind: str) -> bool:
        """Takes note of a failure and waits before the next start; False where there is to be none."""
        used = self.used
        if used >= self.limit:
            return False
        wait = min(self.first_wait * 2**used, LONGEST_WAIT)
        self._write({"event": "failed", "kind": kind, "error": what[:2000]})
        first_line = what.partition("\n")[0]
        self.say(f"{kind} failure: {first_line}; restart {used + 1} of {self.limit} in {wait:g} s")
        time.sleep(wait)
        return True

    def resumed(self, step: int, kept_at: float) -> float:
        """Takes note that work goes on after a step whose state was kept at a time; the seconds lost."""
        now, records = time.time(), self.records()
        spans = [(record["since"], record["time"]) for record in records if record["event"] == "resumed"]
        since, last = max(kept_at, self.since), max((end for _, end in spans), default=0.0)
        # A start that fails as well belongs to the same restart.
        failures = [record["time"] for record in records if record["event"] == "failed" and record["time"] >= last]
        failed_at = min(failures, default=now)
        thrown_away, restart = seconds_outside(since, failed_at, spans), seconds_outside(failed_at, now, spans)
        self._write(
            {
                "event": "resumed",
                "step": step,
                "since": min(since, failed_at),
                "thrown_away": round(thrown_away, 3),
                "restart": round(restart, 3),
                "seconds_lost": round(thrown_away + restart, 3),
            }
        )
        self.tell(self.metrics())
        return thrown_away + restart

    def metrics(self) -> dict[str, float]:
        """For the run's metrics; nothing where there are no restarts to count."""
        if not self.limit:
            return {}
        lost = sum(record.get("seconds_lost", 0.0) for record in self.records())
        return {"restarts/count": float(self.used), "restarts/seconds_lost": lost}

    def _write(self, record: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        append_line(self.folder / FILE, {"time": time.time(), **record})


def seconds_outside(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """How much of the time from `begin` to `end` lies in none of the spans."""
    seconds = 0.0
    for low, high in sorted(spans):
        seconds += max(0.0, min(low, end) - begin)
        begin = max(begin, high)
    return seconds + max(0.0, end - begin)


def surviving(attempt: Callable[[], T], restarts: Restarts) -> T:
    """Runs `attempt()` until it ends in another way than by infrastructure, or the restarts are used up."""
    while True:
        try:
            return attempt()
        except Exception as error:
            kind = kind_of(error)
            if not kind.may_be_tried_again or not restarts.failed(f"{type(error).__name__}: {error}", kind):
                if kind.may_be_tried_again and restarts.limit:
                    restarts.say(f"trainer.max_restarts={restarts.limit} is used up")
                raise
