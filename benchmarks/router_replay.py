"""Replay of routes through experts: how far trainer and rollout are apart with and without it, and what it costs.

    python benchmarks/router_replay.py            on the CPU, a tiny model
    python benchmarks/router_replay.py --gpu      a 2.5B mixture of 64 experts on one GPU

The embedded rollout generates in bfloat16 with its routes recorded, and without; the training engine computes the
log-probs of the same tokens by itself, with the rollout's routes (R3), and by itself with its own routes recorded (R2).
Random weights, the same on both sides; the mean of |difference of log-probs| over all tokens, its largest, and the
share of choices (one a token and layer) that the trainer would have made otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.data.batch import DataProto
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.engines.training_engine import Engine
from meshrl.models.moe_routing import CHANGED, ROUTED_EXPERTS
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import SamplingParams

TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 128}
LARGE = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 24, "num_experts": 64}
LARGE |= {"vocab_size": 32768}
console = Console(width=120)


def write_model(folder: Path, shape: dict[str, Any], device: str) -> None:
    """A mixture of experts with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts_per_tok=4 if shape is TINY else 8,
        intermediate_size=4 * shape["hidden_size"],
        max_position_embeddings=2048,
        initializer_range=0.06,  # with 0.02 nearly all scores would be the same
        norm_topk_prob=True,
        pad_token_id=0,
        **shape,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    console.print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f}B parameters, {shape}")
    model.save_pretrained(folder)


def generated(
    folder: Path, device: str, samples: int, prompt: int, answer: int, records: bool
) -> tuple[DataProto, float]:
    """Answers of the rollout, and tokens a second in its second round."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    rollout = EmbeddedRollout(
        model.to(device), pad_token_id=0, max_num_seqs=samples, shares_weights=True, records_routes=records,
        num_blocks=samples * -(-(prompt + answer + 1) // 32) + 8, block_size=32,
    )  # fmt: skip
    rollout.version = 0
    ids = torch.randint(2, model.config.vocab_size, (samples, prompt), generator=torch.Generator().manual_seed(1))
    prompts = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.arange(samples)}
    )
    for _ in range(2):
        started = time.perf_counter()
        made = rollout.generate_sequences(prompts, SamplingParams(max_tokens=answer))
        seconds = time.perf_counter() - started
    return made, samples * answer / seconds


def make_engine(folder: Path, device: str) -> Engine:
    """The training engine in mixed precision."""
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=False)
    engine = FSDPEngine(model, EngineConfig(), OptimConfig(), device=torch.device(device), replays_routes=True)
    engine.initialize()
    return engine


def log_probs(
    engine: Engine, made: DataProto, budget: int, routes: Any = None, records: bool = False
) -> tuple[Any, float]:
    """What the engine says of the answers, and seconds of the second pass."""
    columns = {} if routes is None else {ROUTED_EXPERTS: routes}
    meta = {"use_dynamic_bsz": True, "max_token_len": budget, "record_routes": records}
    batch = DataProto(made.batch.select("input_ids", "attention_mask", "response_mask"), columns, meta)
    for _ in range(2):
        started = time.perf_counter()
        output = engine.forward_backward_batch(batch, None, forward_only=True)
        seconds = time.perf_counter() - started
    return output, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    is_gpu = parser.parse_args().gpu
    device = "cuda" if is_gpu else "cpu"
    torch.backends.mkldnn.enabled = False  # it slows small matrices down
    samples, prompt, answer, budget = (256, 128, 256, 16384) if is_gpu else (8, 16, 24, 512)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, LARGE if is_gpu else TINY, device)
        _, plain_speed = generated(folder, device, samples, prompt, answer, records=False)
        made, speed = generated(folder, device, samples, prompt, answer, records=True)
        engine = make_engine(folder, device)
        routes = made.non_tensor_batch[ROUTED_EXPERTS]
        ways = {"by itself": {}, "the rollout's routes (R3)": {"routes": routes}}
        table = Table(title=f"{samples} samples, {prompt} + {answer} tokens, on {device}")
        for name in ("log-probs", "mean |difference|", "largest", "choices changed", "seconds"):
            table.add_column(name, justify="left" if name == "log-probs" else "right")
        for name, more in ways.items():
            output, seconds = log_probs(engine, made, budget, **more)
            difference = (output.tensors["log_probs"] - made.batch["rollout_log_probs"]).abs()
            changed = f"{output.metrics[CHANGED]:.2%}" if CHANGED in output.metrics else "-"
            table.add_row(name, f"{difference.mean():.5f}", f"{difference.max():.3f}", changed, f"{seconds:.3f}")
        recorded, seconds = log_probs(engine, made, budget, records=True)
        table.add_row("by itself, recorded (R2)", "", "", "", f"{seconds:.3f}")
        console.print(table)
        size = sum(array.nbytes for array in routes) / made.batch["attention_mask"].sum().item()
        console.print(
            f"generation: {speed:,.0f} tokens/s with routes, {plain_speed:,.0f} without "
            f"({speed / plain_speed:.2f}x); routes take {size:.0f} bytes a token"
        )
        assert recorded.routes is not None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
