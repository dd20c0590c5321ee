"""Pipeline parallelism as plain numbers: where layers lie, and how large the bubble is.

- `PipelineSplit`, `layer_offsets`, `parse_layout`: which layers lie on which pipeline stage.
- `replay`, `bubble`, `ideal_bubble`: a recorded schedule on a virtual clock, and its idle share.

Neither a process group nor Megatron is needed. A stage holds `vpp` chunks of the model. Layers run through chunk 0 of
every stage, then chunk 1 of every stage, and so on. A chunk's first layer is the number of layers before it in that
order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshrl.telemetry.pipeline_timeline import COMPUTE, Span

# The letters of an explicit layout: embedding, decoder layer, multi-token-prediction layer, loss.
LAYER_LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


@dataclass(frozen=True)
class PipelineSplit:
    """The division of layers among stages, which is even by default. The fields are Megatron's, under shorter names.

    `first` and `last` fix the number of layers of those stages. `embedding` and `loss` count the embedding and the loss
    as one layer each. `layout` lists what each chunk holds, in the order of the chunks: `"Ett|tt|tt|tL"`, or the same
    as lists of names.
    """

    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        uneven = self.first is not None or self.last is not None
        if uneven and (self.embedding or self.loss):
            raise ValueError(
                "num_layers_in_first/last_pipeline_stage cannot go with account_for_embedding/loss_in_pipeline_split: "
                "drop one of the two"
            )
        if self.layout is not None and (uneven or self.embedding or self.loss):
            raise ValueError(
                "pipeline_model_parallel_layout already says where every layer is: drop the other settings"
            )
        for name, layers in (("first", self.first), ("last", self.last)):
            if layers is not None and layers < 1:
                raise ValueError(f"num_layers_in_{name}_pipeline_stage must be at least 1, got {layers}")


def layer_offsets(num_layers: int, pp: int, vpp: int = 1, split: PipelineSplit | None = None) -> list[list[range]]:
    """Return the global layers (from 0) of every chunk, as `[stage][chunk]`."""
    split = split or PipelineSplit()
    if num_layers < 1 or pp < 1 or vpp < 1:
        raise ValueError(f"layers ({num_layers}), stages ({pp}) and chunks ({vpp}) must all be at least 1")
    if pp == 1 and vpp > 1:
        raise ValueError(f"virtual_pipeline_model_parallel_size ({vpp}) needs pipeline_model_parallel_size > 1, not 1")
    counts = _layout_counts(split.layout, num_layers, pp, vpp) if split.layout else _counts(num_layers, pp, vpp, split)
    stages: list[list[range]] = [[] for _ in range(pp)]
    start = 0
    for chunk in range(vpp):
        for stage in range(pp):
            stages[stage].append(range(start, start + counts[stage][chunk]))
            start += counts[stage][chunk]
    assert start == num_layers, (start, num_layers)
    return stages


def _counts(num_layers: int, pp: int, vpp: int, split: PipelineSplit) -> list[list[int]]:
    """Return the number of layers of each chunk, as `[stage][chunk]`."""
    fixed = {stage: n for stage, n in ((0, split.first), (pp - 1, split.last)) if n is not None}
    if pp == 1 and fixed:
        raise ValueError("num_layers_in_first/last_pipeline_stage needs pipeline_model_parallel_size > 1, not 1")
    if pp == len(fixed) and vpp > 1:
        raise ValueError(
            f"with {pp} stages of {vpp} chunks megatron-core takes only one of num_layers_in_first_pipeline_stage "
            f"({split.first}) and num_layers_in_last_pipeline_stage ({split.last}): the other one follows"
        )
    # The embedding and the loss take a layer's place in the first and the last chunk.
    left = num_layers - sum(fixed.values()) + split.embedding + split.loss
    free = pp - len(fixed)
    if (free and left % free) or (bool(left) != bool(free)) or left < 0:
        raise ValueError(
            f"{left} of {num_layers} layers remain for {free} of {pp} pipeline stages (embedding and loss among "
            f"them where they are accounted for): they must divide evenly, at least one each; change "
            f"num_hidden_layers, pipeline_model_parallel_size or num_layers_in_first/last_pipeline_stage"
        )
    counts: list[list[int]] = []
    for stage in range(pp):
        layers = fixed.get(stage, left // free if free else 0)
        if layers % vpp:
            raise ValueError(
                f"the {layers} layers of pipeline stage {stage} must be divisible by "
                f"virtual_pipeline_model_parallel_size ({vpp})"
            )
        counts.append([layers // vpp] * vpp)
    counts[0][0] -= split.embedding
    counts[-1][-1] -= split.loss
    if min(counts[0][0], counts[-1][-1]) < 0:
        raise ValueError(f"{num_layers} layers leave nothing for the embedding and the loss on {pp} stages")
    return counts


def _layout_counts(layout: str | Sequence[Sequence[str]], num_layers: int, pp: int, vpp: int) -> list[list[int]]:
    chunks = parse_layout(layout) if isinstance(layout, str) else [[w.strip().lower() for w in c] for c in layout]
    if len(chunks) != pp * vpp:
        raise ValueError(
            f"pipeline_model_parallel_layout lists {len(chunks)} chunks, but pipeline_model_parallel_size ({pp}) * "
            f"virtual_pipeline_model_parallel_size ({vpp}) is {pp * vpp}"
        )
    words = [word for chunk in chunks for word in chunk]
    if unknown := sorted(set(words) - set(LAYER_LETTERS.values())):
        raise ValueError(f"pipeline_model_parallel_layout has '{unknown[0]}': use {', '.join(LAYER_LETTERS.values())}")
    if words[:1] != ["embedding"] or words[-1:] != ["loss"] or words.count("embedding") + words.count("loss") != 2:
        raise ValueError(
            "pipeline_model_parallel_layout must start with the embedding and end with the loss, once each"
        )
    if words.count("decoder") != num_layers:
        raise ValueError(
            f"pipeline_model_parallel_layout lists {words.count('decoder')} decoder layers, the model has {num_layers}"
        )
    return [[chunks[chunk * pp + stage].count("decoder") for chunk in range(vpp)] for stage in range(pp)]


def parse_layout(text: str) -> list[list[str]]:
    """Parse a layout such as `Et*3|(tt|)*2,t|L` into the layers of each chunk.

    `|` separates chunks, `*n` repeats a letter or a group in parentheses, and commas are ignored.
    """
    text = text.replace(",", "")
    repeat = re.compile(r"(?:\(([^)]+)\)|([^()*]))\*(\d+)")
    while repeat.search(text):
        text = repeat.sub(lambda match: (match[1] or match[2]) * int(match[3]), text)
    if unknown := sorted(set(text) - set(LAYER_LETTERS) - {"|"}):
        raise ValueError(f"pipeline_model_parallel_layout has '{unknown[0]}': use {', '.join(LAYER_LETTERS)} and |")
    return [[LAYER_LETTERS[letter] for letter in chunk] for chunk in text.split("|")]


# A pipeline's recorded order of work, replayed on a virtual clock.
#
# Each stage does its forwards and backwards in the order in which it really did them, each as long as its work. It
# waits only for the input of that work: a forward for the chunk before it, a backward for the chunk after it. So the
# idle share that remains is due to the schedule and to unequal micro-batches, not to a busy machine or a slow network.

# (stage, span) -> the length of the span on the virtual clock.
Work = Callable[[int, Span], float]


def replay(stages: Sequence[Sequence[Span]], work: Work | None = None) -> list[list[Span]]:
    """Return the spans of every stage on the virtual clock.

    `work` returns the length of a span; by default it is the span's own `work`.
    """
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
    """Return when a span's input is ready; None while that is unknown.

    Chunks are numbered in the order of the layers.
    """
    if span.kind == "forward":
        return 0.0 if place == 0 else ends.get(("forward", place - 1, span.micro_batch))
    needed = ("forward", place) if place == last else ("backward", place + 1)
    return ends.get((*needed, span.micro_batch))


def bubble(stages: Sequence[Sequence[Span]]) -> float:
    """Return the share of all stages' time, from the first start to the last end, in which they did not compute."""
    spans = [span for spans in stages for span in spans if span.kind in COMPUTE]
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    return 1.0 - sum(span.end - span.start for span in spans) / (whole * len(stages))


def ideal_bubble(pp: int, vpp: int, micro_batches: int) -> float:
    """Return the bubble for equal micro-batches: each stage idles (p - 1) of v * m + p - 1 steps."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)
