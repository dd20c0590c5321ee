"""Counts and times in Prometheus' text format."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# What a rollout's stats count up; all else goes up and down.
COUNTERS = {
    "generated_tokens",
    "finished",
    "steps",
    "seconds",
    "prompt_tokens",
    "cached_prompt_tokens",
    "preemptions",
    "relabelled_tokens",
}


class Histogram:
    """How many observations fell below each bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one observation."""
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, text: str) -> list[str]:
        """The histogram in the text format."""
        lines, total = _head(name, text, "histogram"), 0
        for bound, count in zip((*map(repr, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum!r}", f"{name}_count {total}"]


class Metrics:
    """What the server counts itself; what the rollout counts is added when asked for."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.completion_tokens = self.clients_gone = self.updates = 0
        self.first_token, self.request = Histogram(), Histogram()

    def text(self, running: int, waiting: int, stats: Mapping[str, float]) -> str:
        """Everything, one metric a line."""
        name = "meshrl_http_responses_total"
        lines = _head(name, "Responses by route and status.", "counter")
        for (route, status), count in sorted(self.responses.items()):
            lines.append(f'{name}{{route="{route}",status="{status}"}} {count}')
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts served.", self.prompt_tokens),
            ("completion_tokens", "Tokens of answers sent.", self.completion_tokens),
            ("clients_gone", "Requests whose client went away.", self.clients_gone),
            ("weight_updates", "Weight updates taken.", self.updates),
        ):
            lines += _single(f"meshrl_{name}_total", text, "counter", value)
        lines += _single("meshrl_requests_running", "Requests being answered.", "gauge", running)
        lines += _single("meshrl_requests_waiting", "Requests in the queue.", "gauge", waiting)
        lines += self.first_token.lines("meshrl_first_token_seconds", "From request to first token.")
        lines += self.request.lines("meshrl_request_seconds", "From request to last token.")
        for name, number in sorted(stats.items()):
            counts = name in COUNTERS
            full = f"meshrl_rollout_{name}{'_total' if counts else ''}"
            text = f"The rollout's {name.replace('_', ' ')}."
            lines += _single(full, text, "counter" if counts else "gauge", number)
        return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _single(name: str, text: str, kind: str, value: float) -> list[str]:
    return [*_head(name, text, kind), f"{name} {value!r}"]
