"""Predicted against measured: `meshrl plan`'s memory and seconds beside those of our engines.

    python benchmarks/plan.py [--only TEXT ...] [--out results.json]

On a GPU every case of `CASES` runs in our FSDP engine and gives a row: peak memory and seconds of a training step,
predicted and measured. Without one, what was measured on an H200 is predicted again, and the bytes of parameters,
gradients and optimizer are compared with engines on CPU processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from train import even_lengths, make_batch, ragged_lengths, timed
from transformers import AutoConfig

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.engines.batching import split_into_micro_batches
from meshrl.telemetry.hardware import Cluster, hardware_table
from meshrl.tools.plan.models import KNOWN, Lengths, PlannedModel, find_model
from meshrl.tools.plan.roles import Budget, Role
from meshrl.tools.plan.timing import Clock, Work

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A model, its samples and how it is trained (or asked). `seen` are peak GiB and tokens/s measured before."""

    shape: str
    tokens: int
    length: int | None  # None: log-normal lengths up to 8,192
    micro_batch: int
    trains: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    seen: tuple[float, float] | None = None

    @property
    def lengths(self) -> np.ndarray:
        return ragged_lengths(self.tokens) if self.length is None else even_lengths(self.tokens, self.length)

    @property
    def label(self) -> str:
        words = [f"{self.shape}, {self.length or 'log-normal'}, {self.micro_batch} a micro-batch"]
        words += [] if self.trains else ["log-probs"]
        return ", ".join([*words, *(f"{k}={v}" for k, v in (self.engine | self.model).items())])

    def configs(self) -> tuple[EngineConfig, ModelConfig]:
        engine = EngineConfig(use_torch_compile=True)
        for key, value in self.engine.items():
            owners = (engine, engine.fsdp_config, engine.fsdp_config.mixed_precision)
            setattr(next(owner for owner in owners if hasattr(owner, key)), key, value)
        fields = {"enable_gradient_checkpointing": False} | self.model
        return engine, ModelConfig(path=f"Qwen3-{self.shape}", **fields)


EAGER, SAVING = {"use_torch_compile": False}, {"enable_gradient_checkpointing": True}
SMALL_SUMS = {"reduce_dtype": "bf16"}
ADAPTERS = SAVING | {"lora_rank": 32}
# `seen`: what these were on an H200 with torch 2.11.
CASES = [
    Case("0.6B", 65536, 2048, 16384, seen=(31.59, 97731)),
    Case("0.6B", 65536, 2048, 8192, engine=EAGER, seen=(26.98, 50502)),
    Case("0.6B", 65536, 8192, 16384, engine=EAGER, model=SAVING, seen=(13.15, 34258)),
    Case("1.7B", 65536, 2048, 8192, seen=(44.11, 46617)),
    Case("1.7B", 65536, None, 16384, engine={"keep_logits_megabytes": 6000}, seen=(55.77, 45427)),
    Case("1.7B", 65536, 2048, 16384, engine=EAGER, model=SAVING, seen=(32.26, 24963)),
    Case("1.7B", 65536, 16384, 16384, model=SAVING, seen=(32.26, 23113)),
    Case("1.7B", 65536, 2048, 8192, model=ADAPTERS, seen=(7.18, 30905)),
    Case("1.7B", 65536, 2048, 8192, engine={"optimizer_offload": True}, seen=(44.11, 25110)),
    Case("4B", 32768, 4096, 4096, engine=SMALL_SUMS | {"activation_memory_budget": 0.75}, seen=(65.06, 18052)),
    Case("4B", 32768, 4096, 8192, model=SAVING, seen=(64.65, 13860)),
    Case("4B", 32768, None, 16384, model=ADAPTERS, seen=(13.89, 17590)),
    Case("8B", 32768, 2048, 8192, model=ADAPTERS, seen=(21.57, 11056)),
    Case("8B", 32768, 4096, 4096, engine=SMALL_SUMS, model=SAVING, seen=(110.46, 8583)),
]
# What else docs/performance.md has of our engines on an H200: peak GiB and tokens/s.
MEASURED = [
    *CASES,
    Case("0.6B", 65536, 2048, 32768, trains=False, seen=(3.3, 341671)),
    Case("1.7B", 65536, 2048, 32768, trains=False, seen=(5.5, 157978)),
    Case("1.7B", 65536, None, 32768, trains=False, seen=(5.4, 123741)),
    Case("4B", 32768, 4096, 32768, trains=False, seen=(9.9, 61883)),
    Case("1.7B", 65536, 2048, 8192, engine={"strategy": "megatron"}, seen=(54.9, 31505)),
    Case("1.7B", 65536, None, 16384, engine={"strategy": "megatron"}, seen=(69.1, 27790)),
]


def predicted(case: Case, device: str = "H200") -> tuple[float, float]:
    """Peak GiB and seconds of a step, by the planner, with the micro-batches that the engine will make."""
    engine, model = case.configs()
    role = Role("actor", find_model(model), model, engine, 1, trains=case.trains)
    lengths = case.lengths
    parts = split_into_micro_batches(
        lengths, max_token_len=case.micro_batch, micro_batch_size=None, agree=lambda count: count
    )
    rows = [part for part in parts if part is not None]
    tokens = max(int(lengths[part].sum()) for part in rows)
    budget = Budget(tokens, tokens - min(len(part) for part in rows), len(rows))
    found = role.update_parts(budget) if case.trains else role.forward_parts(budget)
    clock = Clock(Cluster(hardware_table()[device], 1, 1))
    work = Work.of(Lengths(np.ones_like(lengths), lengths - 1, "benchmark"))
    seconds = clock.compute(role, work, case.trains, budget)
    if case.trains:
        seconds += clock.optimizer(role) + clock.accumulate(role, budget.count)
    return (role.states().total + sum(found.values())) / GIB, seconds


def measured(case: Case) -> tuple[float, float]:
    """The same of our engine on this GPU."""
    step = training_step(case)
    seconds, peak = timed(step, "cuda")
    return peak, seconds


def training_step(case: Case) -> Callable[[], None]:
    """One optimizer step of our engine with random weights."""
    import torch.distributed as dist

    from meshrl.algorithms import BatchStats, agg_loss
    from meshrl.engines.engine_class import engine_class

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    engine_config, model = case.configs()
    folder = Path(tempfile.mkdtemp())
    config = AutoConfig.for_model(**KNOWN[f"Qwen3-{case.shape}"])
    config.save_pretrained(folder)
    model.path, model.random_init = str(folder), True
    device = torch.device("cuda")
    engine = engine_class(engine_config)(model, engine_config, OptimConfig() if case.trains else None, device=device)
    engine.initialize()
    lengths = case.lengths
    data = make_batch(lengths, config.vocab_size)
    stats = BatchStats(engine.gradient_ranks, int(data.batch["response_mask"].sum()), len(lengths))
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": case.micro_batch}
    rests = engine_config.fsdp_config.optimizer_offload

    def loss_function(output: dict[str, torch.Tensor], part: Any) -> Any:
        loss = agg_loss(-output["log_probs"], part.batch["response_mask"], "token-mean", stats=stats)
        return loss, {"loss": loss.detach()}

    def step() -> None:
        if not case.trains:
            engine.forward(data)
            return
        if rests:
            engine.to(device, model=False, optimizer=True)
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss_function)
        engine.optimizer_step()
        if rests:
            engine.to("cpu", model=False, optimizer=True)

    return step


def compare(
    cases: list[Case], measure: Callable[[Case], tuple[float, float]], out: Path | None = None
) -> list[dict[str, Any]]:
    """A row for each case, written down as it is found; running out of memory is a result too."""
    rows = []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.label}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"case": case.label}
        row["predicted_gib"], row["predicted_s"] = predicted(case)
        try:
            row["measured_gib"], row["measured_s"] = measure(case)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        rows.append(row)
        if out is not None:
            out.write_text(json.dumps(rows, indent=1))
        gc.collect()
        if torch.cuda.is_available():
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table, and the largest errors."""
    table = Table(title=title)
    for heading in ("case", "peak GiB", "measured", "error", "s a step", "measured", "error"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    errors: dict[str, list[float]] = {"gib": [], "s": []}
    for row in rows:
        cells = []
        for unit in ("gib", "s"):
            guess, real = row[f"predicted_{unit}"], row.get(f"measured_{unit}")
            if real is None:
                cells += [f"{guess:.2f}", row["failed"], ""]
                continue
            errors[unit].append(guess / real - 1)
            cells += [f"{guess:.2f}", f"{real:.2f}", f"{guess / real - 1:+.1%}"]
        table.add_row(row["case"], *cells)
    console = Console(width=170)
    console.print(table)
    for unit, word in (("gib", "memory"), ("s", "time")):
        if errors[unit]:
            worst = max(errors[unit], key=abs)
            mean = sum(map(abs, errors[unit])) / len(errors[unit])
            console.print(f"{word}: mean error {mean:.1%}, largest {worst:+.1%} of {len(errors[unit])} rows")


def cpu_bytes(rank: int, world: int, folder: str, out: str) -> None:
    """One rank of the comparison on CPU processes: states of a real engine, after a step."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from meshrl.engines.engine_class import engine_class

    dist.init_process_group("gloo", store=dist.FileStore(f"{out}.store", world), rank=rank, world_size=world)
    config, model = EngineConfig(), ModelConfig(path=folder, random_init=True, enable_gradient_checkpointing=False)
    config.fsdp_config.mixed_precision.param_dtype = "fp32"
    engine = engine_class(config)(model, config, OptimConfig(), device=torch.device("cpu"))
    engine.initialize()
    data = make_batch(np.full(4, 9), 61)
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 64}

    def loss_function(output: dict[str, torch.Tensor], part: Any) -> Any:
        loss = output["log_probs"].sum()
        return loss, {"loss": loss.detach()}

    engine.optimizer_zero_grad()
    engine.forward_backward_batch(data, loss_function)

    def memory(tensors: list[torch.Tensor]) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())

    params = list(engine.module.parameters())
    grads = memory([p.grad for p in params if p.grad is not None])
    engine.optimizer_step()
    states = [v for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"]
    Path(f"{out}-{rank}").write_text(json.dumps([memory(params), grads, memory(states)]))
    dist.barrier()
    dist.destroy_process_group()


def show_cpu_bytes() -> None:
    """Parameters, gradients and optimizer of every rank: planned and real."""
    import torch.multiprocessing as mp

    fields = {"vocab_size": 61, "hidden_size": 70, "intermediate_size": 101, "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen3", **fields, num_attention_heads=5, num_key_value_heads=5, head_dim=14)
    table = Table(title="bytes of parameters, gradients and optimizer on CPU processes, sizes that do not divide")
    for heading in ("ranks", "rank", "planned", "real", "same"):
        table.add_column(heading, justify="right")
    for world in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            mp.spawn(cpu_bytes, (world, folder, f"{folder}/out"), nprocs=world)
            engine = EngineConfig()
            engine.fsdp_config.mixed_precision.param_dtype = "fp32"
            role = Role("actor", PlannedModel(config, "benchmark"), ModelConfig(), engine, world)
            for rank, states in enumerate(role.states_of_ranks()):
                real = json.loads(Path(f"{folder}/out-{rank}").read_text())
                planned = [states.params, states.grads, states.optimizer]
                table.add_row(str(world), str(rank), str(planned), str(real), "yes" if planned == real else "NO")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label contains one of these")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON")
    args = parser.parse_args()
    if torch.cuda.is_available():
        cases = [case for case in CASES if any(text in case.label for text in args.only)]
        rows, title = compare(cases, measured, args.out), f"meshrl plan on one {torch.cuda.get_device_name()}"
    else:
        cases = [case for case in MEASURED if any(text in case.label for text in args.only)]
        title = "meshrl plan beside what was measured on an H200"
        rows = compare(cases, lambda case: (case.seen[0], case.lengths.sum() / case.seen[1]), args.out)  # type: ignore[index]
        show_cpu_bytes()
    show(rows, title)


if __name__ == "__main__":
    main()
