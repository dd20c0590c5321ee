"""Turns of training and generating on one GPU: seconds and memory, with segments that grow in place and without.

    python benchmarks/phases_gpu.py [--shape 1.7B] [--rounds 6] [--cpu]

Each round syncs the weights to an embedded rollout with a copy of its own, answers 64 prompts of unequal lengths, takes
the memory back and trains a batch of unequal lengths, other ones every round. `reserved` is what the process held of
the GPU at most while training, `allocated` what of it tensors had: the rest is gaps. Every setting runs in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from train import make_batch, shape_config
from transformers import AutoModelForCausalLM

import meshrl.parallel.attention
from meshrl.algorithms import BatchStats, agg_loss
from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.engines.engine_class import engine_class
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import Request, SamplingParams
from meshrl.telemetry.device_stats import PeakMemory
from meshrl.weights.colocated import HybridEngine, policy_sync

SETTINGS = {"fixed": False, "growing while training": True}


class Turns:
    """Engine, rollout and the switch between them."""

    def __init__(self, shape: str, device: torch.device, grow: bool):
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.config, self.device = shape_config(shape), device
        folder = Path(tempfile.mkdtemp())
        self.config.save_pretrained(folder)
        engine_config = EngineConfig(use_torch_compile=False)
        if device.type == "cpu":
            engine_config.fsdp_config.mixed_precision.param_dtype = "fp32"
        model = ModelConfig(path=str(folder), random_init=True, enable_gradient_checkpointing=False)
        self.engine: Any = engine_class(engine_config)(model, engine_config, OptimConfig(), device=device)
        self.engine.initialize()
        with device:
            hf_model = AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16, attn_implementation=meshrl.parallel.attention.ATTENTION_NAME
            )
        self.rollout = EmbeddedRollout(hf_model.eval(), pad_token_id=0, max_model_len=2048, memory_share=0.5)
        options = {"bucket_megabytes": 512, "verify": True, "delta": False, "deadline": 60.0}
        sync = policy_sync(self.engine, self.rollout, **options)
        self.phases = HybridEngine(self.engine, self.rollout, sync, device=device, expandable_segments=grow)

    def answer(self, number: int, longest: int) -> None:
        rng = np.random.default_rng(number)
        requests = []
        for name, length in enumerate(rng.integers(longest // 8, longest, 64)):
            prompt = rng.integers(0, self.config.vocab_size, length).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(longest // 8, longest)))
            requests.append(Request(str(name), tuple(prompt), params, seed=name))
        self.rollout.complete(requests)

    def train(self, number: int, tokens: int) -> None:
        rng = np.random.default_rng(100 + number)
        lengths = np.clip(rng.lognormal(np.log(tokens / 24), 1.0, 64), 16, tokens).astype(np.int64)
        lengths = lengths[: int(np.searchsorted(lengths.cumsum(), 4 * tokens)) + 1]
        data = make_batch(lengths, self.config.vocab_size)
        data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": tokens}
        stats = BatchStats(1, int(data.batch["response_mask"].sum()), len(lengths))

        def loss_function(output: dict[str, torch.Tensor], micro_batch: Any) -> Any:
            loss = agg_loss(-output["log_probs"], micro_batch.batch["response_mask"], "token-mean", stats=stats)
            return loss, {"loss": loss.detach()}

        self.engine.optimizer_zero_grad()
        self.engine.forward_backward_batch(data, loss_function)
        self.engine.optimizer_step()
        self.engine.optimizer_zero_grad()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def measured(shape: str, rounds: int, device: torch.device, grow: bool) -> list[dict[str, float]]:
    """A row of every round."""
    turns = Turns(shape, device, grow)
    found = []
    longest, tokens = (1024, 16384) if device.type == "cuda" else (16, 256)
    for number in range(rounds):
        row = {"to_rollout": seconds_of(lambda number=number: turns.phases.to_rollout(number), device)}
        row["generate"] = seconds_of(lambda number=number: turns.answer(number, longest), device)
        row["to_train"] = seconds_of(turns.phases.to_train, device)
        watch = PeakMemory(device)
        row["train"] = seconds_of(lambda number=number: turns.train(number, tokens), device)
        row |= {name.rpartition("/")[2]: value for name, value in watch.metrics("train").items()}
        found.append(row)
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.7B")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cpu", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--only", choices=SETTINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.cpu else "cuda:0")
    shape = "tiny" if arguments.cpu else arguments.shape
    if arguments.only:
        print(json.dumps(measured(shape, arguments.rounds, device, SETTINGS[arguments.only])))
        return
    table = Table(title=f"{shape}, {arguments.rounds} rounds (seconds: median after the first two; GiB: most)")
    columns = ["to_rollout", "generate", "to_train", "train"]
    columns += ["max_rss_gib"] if arguments.cpu else ["max_allocated_gib", "max_reserved_gib"]
    for heading in ("segments", *columns):
        table.add_column(heading, justify="right")
    for name in SETTINGS:
        command = [sys.executable, *sys.argv, "--only", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows = json.loads(done.stdout.splitlines()[-1])
        rows = rows[min(2, len(rows) - 1) :]
        cells = [
            f"{max(row[column] for row in rows):.2f}"
            if column.endswith("gib")
            else f"{sorted(row[column] for row in rows)[len(rows) // 2]:.3f}"
            for column in columns
        ]
        table.add_row(name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
