"""Weight sync from a trainer to the rollout of the same GPU: seconds, bytes a second and memory, of every way there is.

    python benchmarks/sync_gpu.py [--shapes 1.7B 4B] [--trainers fsdp2 megatron] [--out results.json]

Qwen3 shapes with random weights in bfloat16. `stream` hands every tensor over whole, one after the other, as peers do;
`plan` is ours, with the sums of both sides and without; `parts` is ours for engines that take whole tensors, such as
vLLM, the taking included; `shared` is a rollout that generates with the trainer's own module. A rate counts bytes read
and written; its share is that of one plain copy of 4 GiB in the same run. After every way the rollout's weights are
compared with those that the trainer streams.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import meshrl.parallel.attention
from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.engines.engine_class import engine_class
from meshrl.engines.training_engine import Engine
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.tools.plan.models import KNOWN
from meshrl.weights.colocated import Shared, Stream
from meshrl.weights.connect import connect, connect_stream, rollout_params

GPU = torch.device("cuda", 0)


def seconds_of(work: Callable[[], object], repeats: int = 7) -> float:
    """The median, after two to warm up."""
    times = []
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2]


def copy_rate() -> float:
    """Bytes read and written a second by one large copy."""
    left, right = (torch.zeros(1 << 32, dtype=torch.uint8, device=GPU) for _ in range(2))
    return 2 * len(left) / seconds_of(lambda: left.copy_(right))


def build_engine(shape: str, strategy: str) -> Engine:
    """A trainer's engine of one rank with random weights."""
    folder = Path(tempfile.mkdtemp())
    AutoConfig.for_model(**KNOWN[f"Qwen3-{shape}"]).save_pretrained(folder)
    config = EngineConfig(strategy=strategy)
    model = ModelConfig(path=str(folder), random_init=True, enable_gradient_checkpointing=False)
    engine = engine_class(config)(model, config, None, device=GPU)
    engine.initialize()
    return engine


def build_rollout(shape: str, own: Any = None) -> EmbeddedRollout:
    """A rollout with weights of its own, or with those of `own`."""
    model = own
    if model is None:
        config = AutoConfig.for_model(**KNOWN[f"Qwen3-{shape}"])
        with GPU:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=meshrl.parallel.attention.ATTENTION_NAME
            )
    return EmbeddedRollout(model.eval(), pad_token_id=0, shares_weights=own is not None, num_blocks=64)


def is_same(engine: Engine, rollout: EmbeddedRollout) -> bool:
    """Whether the rollout has the trainer's weights, bit for bit."""
    own = dict(rollout.hf_model.named_parameters())
    return all(torch.equal(own[name], value.to(GPU)) for name, value in engine.per_tensor_params() if name in own)


def measured(engine: Engine, rollout: EmbeddedRollout, sync: Any) -> dict[str, Any]:
    """One way's row."""
    version = 0

    def run() -> Any:
        nonlocal version
        version += 1
        return sync(rollout, version)

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = run()
    extra = torch.cuda.max_memory_allocated() - before
    moved = report.traffic.copied - report.traffic.shared
    return {"moved": moved, "extra": extra, "seconds": seconds_of(run), "same": is_same(engine, rollout)}


def rows_of(shape: str, strategy: str) -> dict[str, dict[str, Any]]:
    engine = build_engine(shape, strategy)
    rollout = build_rollout(shape)
    ways: dict[str, Any] = {
        "stream": Stream(engine),
        "parts": connect_stream(engine, rollout.hf_model),
        "plan": connect(engine, rollout_params(rollout.hf_model)),
        "plan, no sums": connect(engine, rollout_params(rollout.hf_model), verify=False),
    }
    rows = {}
    for name, sync in ways.items():
        rollout.version = -1
        with torch.no_grad():
            for param in rollout.hf_model.parameters():
                param.zero_()
        rows[name] = measured(engine, rollout, sync)
    if strategy == "fsdp2":
        shared = build_rollout(shape, engine.hf_model)
        rows["shared"] = measured(engine, shared, Shared(engine))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.7B", "4B"])
    parser.add_argument("--trainers", nargs="+", default=["fsdp2", "megatron"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    rate = copy_rate()
    table = Table(title=f"{torch.cuda.get_device_name()}: one copy moves {rate / 1e12:.2f} TB/s")
    for heading in ("shape", "trainer", "way", "moved GB", "ms", "TB/s", "of a copy", "extra MiB", "same bits"):
        table.add_column(heading, justify="right")
    found = []
    for shape in arguments.shapes:
        for strategy in arguments.trainers:
            for way, row in rows_of(shape, strategy).items():
                speed = 2 * row["moved"] / row["seconds"]
                cells = f"{row['moved'] / 1e9:.2f}", f"{1e3 * row['seconds']:.2f}", f"{speed / 1e12:.2f}"
                table.add_row(
                    shape, strategy, way, *cells, f"{speed / rate:.0%}", f"{row['extra'] / 2**20:.1f}",
                    "yes" if row["same"] else "NO",
                )  # fmt: skip
                found.append({"shape": shape, "trainer": strategy, "way": way} | row)
            gc.collect()
            torch.cuda.empty_cache()
    Console(width=120).print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
