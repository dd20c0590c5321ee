"""DPO: `meshrl prefer` beside TRL's trainer, the same rows, model and loss in the same run.

    python benchmarks/preferences.py [--shapes 0.6B 1.7B] [--steps 6] [--out results.json]     # one GPU, bf16
    python benchmarks/preferences.py --cpu                                                     # a tiny model

Qwen3 shapes with random weights; prompts and answers of log-normal lengths, 64 pairs a step. TRL is asked for bf16
weights, with and without gradient checkpointing, in micro-batches of so many pairs (padded, as it has them). Ours has
float32 master weights and moments, packed micro-batches, compiled layers on a GPU. Tokens are those of prompts and
answers without padding; of the steps the median counts, without the first two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from train import shape_config

PAIRS, WARM = 64, 2
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_rows(path: Path, steps: int, answer: float, cap: int) -> int:
    """Pairs of random texts, a token a letter; how many tokens one step has on average."""
    rng = np.random.default_rng(0)
    total = 0
    with path.open("w") as file:
        for _ in range(PAIRS * steps):
            lengths = np.clip(rng.lognormal(np.log([answer / 2, answer, answer]) - 0.32, 0.8), 2, cap).astype(int)
            texts = ["".join(rng.choice(list(LETTERS), size)) for size in lengths]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")
            total += 2 * len(texts[0]) + len(texts[1]) + len(texts[2]) + 2
    return total // steps


def make_model(folder: Path, shape: str, dtype: torch.dtype) -> None:
    """A random model of the shape, with a tokenizer of letters."""
    from transformers import AutoModelForCausalLM

    from meshrl.models.tiny import char_tokenizer

    tokenizer = char_tokenizer(LETTERS)
    config = shape_config(shape)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(model: Path, rows: Path, out: Path, steps: int, cap: int, cpu: bool) -> list[float]:
    """Seconds of our steps."""
    from meshrl.config import PreferenceConfig, load_config
    from meshrl.trainer.launch import train_supervised

    device = "cpu" if cpu else "cuda"
    words = [
        f"model.path={model}", f"data.train_files=[{rows}]", f"data.train_batch_size={PAIRS}", "data.shuffle=false",
        f"data.max_length={2 * cap + 2}", f"data.max_token_len_per_gpu={max(4 * cap + 4, 16384)}",
        "trainer.n_gpus_per_node=1", f"trainer.device={device}", "trainer.logger=[file]",
        "trainer.save_final_model=false", f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={out}",
        "model.enable_gradient_checkpointing=false",
    ]  # fmt: skip
    if cpu:
        words.append("engine.fsdp_config.mixed_precision.param_dtype=fp32")
    else:
        words.append("engine.use_torch_compile=true")
    path = train_supervised(load_config("dpo", words, PreferenceConfig).config, console=Console(quiet=True))
    return [json.loads(line)["timing_s/step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def theirs(model: Path, rows: Path, out: Path, steps: int, micro: int, checkpointing: bool, cpu: bool) -> list[float]:
    """Seconds of TRL's steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            _wait(cpu)
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait(cpu)
            seconds.append(time.perf_counter() - self.began)

    dtype = torch.float32 if cpu else torch.bfloat16
    args = DPOConfig(
        output_dir=str(out), per_device_train_batch_size=micro, gradient_accumulation_steps=PAIRS // micro,
        max_steps=steps, learning_rate=5e-7, beta=0.1, bf16=not cpu, use_cpu=cpu, max_length=None, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    data = Dataset.from_list([json.loads(line) for line in rows.read_text().splitlines()])
    load = AutoModelForCausalLM.from_pretrained
    trainer = DPOTrainer(
        model=load(model, dtype=dtype), ref_model=load(model, dtype=dtype), args=args, train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return seconds


def _wait(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()


SIDES = ("meshrl", "TRL, checkpointing", "TRL")


def measure(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What one side takes, in a process of its own."""
    _, cap = sizes(options.cpu)
    common = folder / "model", folder / "rows.jsonl", folder / "out"
    try:
        if side == "meshrl":
            seconds = ours(*common, options.steps, cap, options.cpu)
        else:
            seconds = theirs(*common, options.steps, options.micro, "checkpointing" in side, options.cpu)
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    peak = 0.0 if options.cpu else torch.cuda.max_memory_allocated() / 2**30
    return {"seconds": statistics.median(seconds[WARM:]), "peak_gib": peak}


def sizes(cpu: bool) -> tuple[float, int]:
    """The mean of an answer's tokens, and the most."""
    return (40.0, 120) if cpu else (400.0, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6B"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro", type=int, default=8, help="pairs of TRL's micro-batches")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu:
        torch.set_num_threads(1)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if options.side:
        (options.folder / "result.json").write_text(json.dumps(measure(options.side, options.folder, options)))
        return
    results: list[dict[str, Any]] = []
    table = Table("shape", "who", "tokens/s", "seconds a step", "peak GiB", "times ours")
    for shape in ["tiny"] if options.cpu else options.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tokens = write_rows(folder / "rows.jsonl", options.steps, *sizes(options.cpu))
            make_model(folder / "model", shape, torch.float32 if options.cpu else torch.bfloat16)
            for side in SIDES:
                found = _apart(side, folder, options) | {"shape": shape, "who": side}
                if "seconds" in found:
                    found["tokens_per_s"] = tokens / found["seconds"]
                    ours_took = found["seconds"] if side == SIDES[0] else results[-SIDES.index(side)]["seconds"]
                    found["times_ours"] = found["seconds"] / ours_took
                results.append(found)
    for row in results:
        if "error" in row:
            table.add_row(row["shape"], row["who"], row["error"])
            continue
        told = {"tokens_per_s": ",.0f", "seconds": ".2f", "peak_gib": ".1f", "times_ours": ".2f"}
        table.add_row(row["shape"], row["who"], *(format(row[name], how) for name, how in told.items()))
    Console().print(table)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def _apart(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    words = ["--side", side, "--folder", str(folder), "--steps", str(options.steps), "--micro", str(options.micro)]
    subprocess.run([sys.executable, __file__, *words, *(["--cpu"] if options.cpu else [])], check=True)
    return json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    main()
