"""A pipeline's recorded order of work, replayed on a virtual clock.

Each stage does its forwards and backwards in the order in which it really did them, each as long as its work, and waits
for nothing but what the work needs: a forward for the chunk before it, a backward for the chunk behind it. So the idle
share that remains belongs to the schedule and to unequal micro-batches, not to a busy machine or a slow network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from meshrl.telemetry.timeline import COMPUTE, Span

# How long a span is on the virtual clock, from its stage and itself.
Work = Callable[[int, Span], float]


def replay(stages: Sequence[Sequence[Span]], work: Work | None = None) -> list[list[Span]]:
    """The spans of every stage on the virtual clock; `work` says how long each is (by default its own `work`)."""
    duration = work or (lambda stage, span: span.work)
    todo = [deque(span for span in spans if span.kind in COMPUTE) for spans in stages]
    chunks = 1 + max((span.chunk for spans in todo for span in spans), default=0)
    last = len(stages) * chunks - 1
    done: list[list[Span]] = [[] for _ in stages]
    ends: dict[tuple[str, int, int], float] = {}
    while any(todo):
        waiting = sum(len(spans) for spans in todo)
        for stage, spans in enumerate(todo):
            while spans:
                span = spans[0]
                place = span.chunk * len(stages) + stage
                ready = _ready(span, place, last, ends)
                if ready is None:
                    break
                start = max(ready, done[stage][-1].end if done[stage] else 0.0)
                length = duration(stage, span)
                ends[span.kind, place, span.micro_batch] = start + length
                done[stage].append(Span(span.kind, span.chunk, span.micro_batch, start, start + length, length))
                spans.popleft()
        if waiting == sum(len(spans) for spans in todo):
            stuck = {stage: spans[0] for stage, spans in enumerate(todo) if spans}
            raise ValueError(f"the recorded order cannot be run, every stage waits for another: {stuck}")
    return done


def _ready(span: Span, place: int, last: int, ends: dict[tuple[str, int, int], float]) -> float | None:
    """When what a span needs is there; None while it is not known. Chunks are numbered in the order of the layers."""
    if span.kind == "forward":
        return 0.0 if place == 0 else ends.get(("forward", place - 1, span.micro_batch))
    needed = ("forward", place) if place == last else ("backward", place + 1)
    return ends.get((*needed, span.micro_batch))


def bubble(stages: Sequence[Sequence[Span]]) -> float:
    """The share of all stages' time, from the first start to the last end, in which they did not compute."""
    spans = [span for spans in stages for span in spans if span.kind in COMPUTE]
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    return 1.0 - sum(span.end - span.start for span in spans) / (whole * len(stages))


def ideal_bubble(pp: int, vpp: int, micro_batches: int) -> float:
    """The bubble of equal micro-batches: each stage idles (p - 1) of v * m + p - 1 steps."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)
