"""A run that infrastructure has ended begins again by itself, from its newest checkpoint, a limited number of times.

    restarts.jsonl     {"event": "failed", "kind": ..., "error": ...}
                       {"event": "resumed", "step": ..., "seconds_lost": ...}

What is lost is the time since the newest checkpoint, and that of starting again. The count is that of one command: one
that supervises the run (`meshrl train --supervise`) and the run itself count together, by this file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshrl.config.trainer import RunConfig
from meshrl.trainer.failures import kind_of

logger = logging.getLogger(__name__)

FILE = "restarts.jsonl"
# When the command that supervises this run began, in unix seconds.
SINCE = "MESHRL_SUPERVISED_SINCE"
LONGEST_WAIT = 300.0
T = TypeVar("T")


@dataclass
class Restarts:
    """The budget of one command: at most `limit` restarts, each after twice the wait of the one before."""

    folder: Path
    limit: int
    first_wait: float
    since: float = field(default_factory=lambda: float(os.environ.get(SINCE, time.time())))
    say: Callable[[str], None] = logger.warning
    # Whether an attempt has made the run's folder this run's own: the next one goes on with what is there.
    opened: bool = False

    @classmethod
    def of(cls, trainer: RunConfig) -> Restarts:
        """As the config says."""
        return cls(Path(trainer.run_dir), trainer.max_restarts, trainer.restart_wait)

    def records(self) -> list[dict[str, Any]]:
        """What this command has written down, the oldest first."""
        file = self.folder / FILE
        lines = file.read_text().splitlines() if file.exists() else []
        return [record for line in lines if line and (record := json.loads(line))["time"] >= self.since]

    @property
    def used(self) -> int:
        """How often something was started again."""
        return sum(record["event"] == "failed" for record in self.records())

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

    def resumed(self, step: int, since: float) -> float:
        """Takes note that work goes on after a step that was kept at the time `since`; the seconds lost.

        What an earlier restart has counted is not counted again.
        """
        counted = [record["time"] for record in self.records() if record["event"] == "resumed"]
        lost = max(0.0, time.time() - max(since, self.since, *counted))
        self._write({"event": "resumed", "step": step, "seconds_lost": round(lost, 3)})
        return lost

    def metrics(self) -> dict[str, float]:
        """For the run's metrics; nothing where there are no restarts to count."""
        if not self.limit:
            return {}
        lost = sum(record.get("seconds_lost", 0.0) for record in self.records())
        return {"restarts/count": float(self.used), "restarts/seconds_lost": lost}

    def _write(self, record: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / FILE, "a") as stream:
            stream.write(json.dumps({"time": time.time(), **record}) + "\n")


def surviving(attempt: Callable[[], T], restarts: Restarts) -> T:
    """Runs `attempt()` until it ends in another way than by infrastructure, or the restarts are used up."""
    while True:
        try:
            return attempt()
        except Exception as error:
            kind = kind_of(error)
            if not kind.may_be_tried_again or not restarts.failed(f"{type(error).__name__}: {error}", kind):
                if kind.may_be_tried_again and restarts.limit:
                    restarts.say(f"all {restarts.limit} restarts (trainer.max_restarts) are used up")
                raise
