"""The pipeline's bubble: Megatron-Core's schedules in real processes, measured beside the formula.

    python benchmarks/pipeline.py [--pp 2 4] [--vpp 1 2] [--micro-batches 4 8 16] [--batches 200]
    python benchmarks/pipeline.py --figure docs/images/pipeline.png --trace pipeline.json

Every stage records when it runs forward and backward of which micro-batch, and the processor seconds each took. The
machine may have fewer cores than stages, so the wall clock says little: the recorded order is replayed on a virtual
clock on which every stage has a processor of its own. Three tables say how long the spans are there:

- as measured: each span's own processor seconds, the least of the repetitions; one batch of lengths;
- at each stage's own rate: FLOPs of the micro-batch times the stage's median seconds a FLOP, so that unequal stages
  count, but not what else the machine did; mean over many batches of lengths;
- at one rate: FLOPs alone, backward twice forward: what the schedule and the lengths give; mean over many batches.

Three ways to make micro-batches: `equal` (all samples of one length, the formula's case), `in order` (equal numbers of
log-normal samples as they come) and `balanced` (as the engine does with use_dynamic_bsz: even work, small ones at both
ends).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from meshrl.balance import flops_workload, order_micro_batches, plan_micro_batches
from meshrl.parallel.pipeline import bubble, ideal_bubble, replay
from meshrl.telemetry.pipeline_timeline import COMPUTE, PipelineTimeline, Span, draw_gantt, write_chrome_trace

TESTS = Path(__file__).resolve().parents[1] / "tests" / "special_distributed"
SAMPLES, MEAN_LENGTH, SIGMA, LONGEST = 64, 160, 0.8, 1024
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LAYERS, VOCABULARY = 8, 64
WAYS = ("equal", "in order", "balanced")

Case = tuple[int, str]  # micro-batches, way
Stages = list[list[Span]]
Plan = list[np.ndarray]


def draw_lengths(way: str, seed: int) -> np.ndarray:
    """Sample lengths of a batch: all the mean, or log-normal with that mean."""
    if way == "equal":
        return np.full(SAMPLES, MEAN_LENGTH)
    draws = np.random.default_rng(seed).lognormal(np.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, SAMPLES)
    return np.clip(draws.astype(np.int64), 8, LONGEST)


def make_plan(way: str, lengths: np.ndarray, count: int, workload: Any) -> Plan:
    """Which samples make each of `count` micro-batches."""
    if way != "balanced":
        return np.array_split(np.arange(len(lengths)), count)
    plan = plan_micro_batches(lengths, int(lengths.sum()), fixed_count=count, workload=workload)
    return order_micro_batches(plan, lengths, "sum_sq", small_at_both_ends=True)


def model_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPE, num_hidden_layers=LAYERS, vocab_size=VOCABULARY, tie_word_embeddings=False)


def measure_rank(folder: str, pp: int, vpp: int, cases: list[tuple[np.ndarray, Plan]]) -> list[list[Span]]:
    """In a rank: trains on each case's micro-batches once (and once before, to warm up); this stage's spans."""
    import torch

    from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
    from meshrl.engines.megatron.megatron_engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    config = EngineConfig(strategy="megatron")
    config.megatron.pipeline_model_parallel_size = pp
    config.megatron.virtual_pipeline_model_parallel_size = vpp if vpp > 1 else None
    config.megatron.dtype = "fp32"
    model = ModelConfig(path=folder, random_init=True, enable_gradient_checkpointing=False)
    engine = MegatronEngine(model, config, OptimConfig(), device=torch.device("cpu"))
    engine.initialize()
    timeline = PipelineTimeline()
    found: list[list[Span]] = []
    for number, (lengths, plan) in enumerate([cases[0], *cases]):
        timeline.clear()
        engine.optimizer_zero_grad()
        # The engine would order micro-batches itself; here each way has its own plan.
        planned = patch("meshrl.engines.megatron.megatron_engine.split_for_pipeline", lambda *_, plan=plan, **__: plan)
        with planned, timeline.attached(engine.model):
            engine.forward_backward_batch(make_batch(lengths), loss)
        if number:
            found.append(list(timeline.spans))
    leave_parallel_state()
    return found


def loss(outputs: dict[str, Any], data: Any) -> tuple[Any, dict[str, Any]]:
    total = -outputs["log_probs"].sum() / SAMPLES
    return total, {"loss": total.detach()}


def make_batch(lengths: np.ndarray) -> Any:
    import torch

    from meshrl.data.batch import DataProto

    width = int(lengths.max())
    mask = (torch.arange(width)[None] >= width - torch.from_numpy(lengths)[:, None]).long()
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    response = mask.clone()
    response.scatter_(1, mask.argmax(1, keepdim=True), 0)
    tensors = {"input_ids": ids, "attention_mask": mask, "response_mask": response}
    meta = {
        "use_dynamic_bsz": True,
        "max_token_len": int(lengths.sum()),
        "temperature": 1.0,
        "calculate_entropy": False,
    }
    return DataProto.from_dict(tensors=tensors, meta_info=meta)


def least(runs: list[Stages]) -> Stages:
    """Repetitions of one batch as one: the order of the first, of each span the least work."""
    return [
        [replace(spans[0], work=min(span.work for span in spans)) for spans in zip(*stage, strict=True)]
        for stage in zip(*runs, strict=True)
    ]


def only_compute(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.kind in COMPUTE]


def stage_rates(runs: list[tuple[Stages, np.ndarray]]) -> dict[tuple[int, int, str], float]:
    """Median seconds a FLOP of each stage's chunks, forward and backward."""
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for stages, costs in runs:
        for stage, spans in enumerate(stages):
            for span in spans:
                found[stage, span.chunk, span.kind].append(span.work / costs[span.micro_batch])
    return {key: float(np.median(values)) for key, values in found.items()}


def costs_of(lengths: np.ndarray, plan: Plan, workload: Any) -> np.ndarray:
    return np.array([float(workload(lengths[part]).sum()) for part in plan])


def mean_bubble(stages: Stages, way: str, count: int, workload: Any, rate: Any, batches: int) -> float:
    """The recorded order with spans as long as FLOPs * rate(stage, span), over many batches of lengths."""
    found = []
    for seed in range(1 if way == "equal" else batches):
        lengths = draw_lengths(way, 1000 + seed)
        costs = costs_of(lengths, make_plan(way, lengths, count, workload), workload)
        replayed = replay(stages, lambda stage, span, costs=costs: costs[span.micro_batch] * rate(stage, span))
        found.append(bubble(replayed))
    return float(np.mean(found))


def measure(
    groups: Any, folder: str, pp: int, vpp: int, cases: list[Case], workload: Any, repeats: int
) -> list[tuple[Stages, Stages]]:
    """For every case the spans of its first run, waits and all, and the least work of the repetitions."""
    import pipeline as own_module  # under this name the processes find it too

    batches = []
    for count, way in cases:
        lengths = draw_lengths(way, 0)
        batches.append((lengths, make_plan(way, lengths, count, workload)))
    ranks = groups(pp).run(own_module.measure_rank, folder, pp, vpp, batches * repeats, timeout=1800)
    found = []
    for place in range(len(cases)):
        numbers = range(place, len(ranks[0]), len(cases))
        runs = [[only_compute(rank[number]) for rank in ranks] for number in numbers]
        found.append(([rank[place] for rank in ranks], least(runs)))
    return found


def bubbles(measured: dict[Case, Stages], workload: Any, batches: int) -> dict[Case, tuple[float, float, float]]:
    """The three tables' numbers for one layout."""
    runs = []
    for (count, way), stages in measured.items():
        lengths = draw_lengths(way, 0)
        runs.append((stages, costs_of(lengths, make_plan(way, lengths, count, workload), workload)))
    rates = stage_rates(runs)

    def own_rate(stage: int, span: Span) -> float:
        return rates[stage, span.chunk, span.kind]

    def one_rate(stage: int, span: Span) -> float:
        return 2.0 if span.kind == "backward" else 1.0

    found = {}
    for (count, way), stages in measured.items():
        own, one = (mean_bubble(stages, way, count, workload, rate, batches) for rate in (own_rate, one_rate))
        found[count, way] = (bubble(replay(stages)), own, one)
    return found


def run(arguments: argparse.Namespace, console: Console) -> None:
    sys.path.insert(0, str(TESTS))
    import megatron_cpu
    from process_group import ProcessGroups

    config = model_config()
    workload = flops_workload(config)
    tables = [new_table(title) for title in ("as measured", "at each stage's own rate", "at one rate")]
    cases = list(itertools.product(arguments.micro_batches, WAYS))
    recorded: dict[tuple[int, int, int, str], Stages] = {}
    groups = ProcessGroups(megatron_cpu.install)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for pp, vpp in itertools.product(arguments.pp, arguments.vpp):
            runs = measure(groups, folder, pp, vpp, cases, workload, arguments.repeats)
            recorded |= {(pp, vpp, *case): first for case, (first, _) in zip(cases, runs, strict=True)}
            measured = {case: stages for case, (_, stages) in zip(cases, runs, strict=True)}
            found = bubbles(measured, workload, arguments.batches)
            for number, table in enumerate(tables):
                for count in arguments.micro_batches:
                    shown = [ideal_bubble(pp, vpp, count), *[found[count, way][number] for way in WAYS]]
                    table.add_row(str(pp), str(vpp), str(count), *[f"{share:.1%}" for share in shown])
    groups.close()
    for table in tables:
        console.print(table)
    save_pictures(arguments, recorded)


def new_table(title: str) -> Table:
    table = Table(title=f"bubble, {title}")
    for column in ("pp", "vpp", "m", "formula", *WAYS):
        table.add_column(column, justify="right")
    return table


def save_pictures(arguments: argparse.Namespace, recorded: dict[tuple[int, int, int, str], Stages]) -> None:
    counts = sorted(arguments.micro_batches)
    pp, vpp, count = max(arguments.pp), max(arguments.vpp), counts[len(counts) // 2]
    if arguments.trace:
        write_chrome_trace(recorded[pp, vpp, count, "balanced"], arguments.trace)
    if arguments.figure:
        panels = {}
        for chunks, way in ((min(arguments.vpp), "in order"), (vpp, "in order"), (vpp, "balanced")):
            replayed = replay(recorded[pp, chunks, count, way])
            panels[f"pp {pp}, vpp {chunks}, {count} micro-batches {way}: bubble {bubble(replayed):.0%}"] = replayed
        draw_gantt(panels, arguments.figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--vpp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3, help="times each batch is measured")
    parser.add_argument("--batches", type=int, default=200, help="batches of lengths for the model")
    parser.add_argument("--figure", type=Path, help="draw three timelines into this PNG")
    parser.add_argument("--trace", type=Path, help="write the balanced timeline as a Chrome trace")
    run(parser.parse_args(), Console(width=140))


if __name__ == "__main__":
    main()
