"""A whole RL step, ours beside TRL's GRPOTrainer: same model, weights, prompts, hyper-parameters, one thread each.

    python benchmarks/e2e.py [--steps 200] [--seed 0] [--only meshrl|trl]

A step is 64 prompts × 8 answers and two optimizer steps. Each side runs in a process of its own, one after the other;
CPU-seconds are those of the process and its ended children (both sides run in one process), from the end of the
first step to the end of the last, validation left out. Needs `pip install 'meshrl[trl]'` for the other side.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PROMPTS, ANSWERS, RESPONSE = 64, 8, 7
LR, WARMUP = 3e-4, 20


def cpu_seconds() -> float:
    """CPU time of this process and its ended children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Clock:
    """Counts CPU and wall time between the end of the first step and the end of the last."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.tokens = 0

    def tick(self, tokens: int) -> None:
        self.marks.append((cpu_seconds(), time.perf_counter()))
        self.tokens += tokens if len(self.marks) > 1 else 0

    def result(self) -> dict[str, float]:
        steps = len(self.marks) - 1
        cpu, wall = (self.marks[-1][i] - self.marks[0][i] for i in (0, 1))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"cpu_per_step": cpu / steps, "tokens_per_s": self.tokens / wall, "peak_mib": peak}


def prepare(folder: Path, seed: int) -> None:
    """Makes the data and the warmed-up model that both sides start from."""
    from rich.console import Console

    from meshrl.models.tiny import make_tiny_model
    from meshrl.trainer.demo import ALPHABET, sft_run, write_data

    make_tiny_model(folder / "assets" / "model", ALPHABET, seed)
    sft_run(folder, write_data(folder / "assets", seed), seed, Console(quiet=True))


def accuracy(model_folder: Path, held_out: Path) -> float:
    """Greedy accuracy on the held-out prompts, by plain transformers: the same judge for both sides."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (cls.from_pretrained(model_folder) for cls in (AutoModelForCausalLM, AutoTokenizer))
    tasks = [json.loads(line) for line in held_out.read_text().splitlines()]
    ids = torch.tensor([tokenizer(task["prompt"])["input_ids"] for task in tasks])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=RESPONSE, do_sample=False)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = [text == "".join(sorted(task["extra_info"]["digits"])) for text, task in zip(texts, tasks, strict=True)]
    return sum(right) / len(right)


def run_meshrl(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Our trainer with the demo's recipe; validation off."""
    from rich.console import Console

    from meshrl.config.load import load_config
    from meshrl.telemetry import trackers
    from meshrl.trainer.launch import train

    clock = Clock()

    class Ticking(trackers.Tracking):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            super().log(metrics, step)
            clock.tick(int(metrics["perf/total_num_tokens"]))

    import meshrl.trainer.launch as run

    run.Tracking = Ticking  # type: ignore[misc]
    loaded = load_config(
        "demo_grpo",
        [
            f"data.train_files=[{folder / 'assets' / 'prompts.jsonl'}]",
            f"actor_rollout_ref.model.path={folder / 'sft' / 'model'}",
            f"trainer.total_training_steps={steps}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={folder / 'meshrl'}",
            "trainer.logger=[file]",
            "trainer.device=cpu",
            "trainer.save_final_model=true",
        ],
    )
    train(loaded.config, loaded.sources, Console(quiet=True))
    result = clock.result()
    return result | {"accuracy": accuracy(folder / "meshrl" / "model", folder / "assets" / "held_out.jsonl")}


def run_trl(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """TRL's GRPOTrainer with the same settings, also of the process: both run faster so."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from meshrl.parallel.mesh import prepare_device

    prepare_device("cpu", 0)
    clock = Clock()

    class Ticking(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step % 2 == 0:
                clock.tick(PROMPTS * ANSWERS * 2 * RESPONSE)

    def reward(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
        digits = [prompt.removesuffix(">") for prompt in prompts]
        return [float(text == "".join(sorted(d))) for text, d in zip(completions, digits, strict=True)]

    rows = [json.loads(line) for line in (folder / "assets" / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(folder / "sft" / "model"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Ticking()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps * 2,
            per_device_train_batch_size=PROMPTS * ANSWERS // 2,
            steps_per_generation=2,
            gradient_accumulation_steps=1,
            num_generations=ANSWERS,
            max_completion_length=RESPONSE,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            learning_rate=LR,
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"lr_end": LR / 10, "power": 1.0},
            warmup_steps=WARMUP,
            adam_beta2=0.99,
            weight_decay=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=100_000,
            seed=seed,
        ),
    )
    trainer.train()
    result = clock.result()
    trainer.model.save_pretrained(folder / "trl" / "model")
    trainer.processing_class.save_pretrained(folder / "trl" / "model")
    return result | {"accuracy": accuracy(folder / "trl" / "model", folder / "assets" / "held_out.jsonl")}


def in_own_process(side: str, folder: Path, steps: int, seed: int) -> dict[str, float] | None:
    """Runs one side in a fresh process with one thread; None if it cannot run here."""
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--folder",
        str(folder),
        "--steps",
        str(steps),
        "--seed",
        str(seed),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(f"{side} failed:\n{done.stderr[-2000:]}\n")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def show(results: dict[str, dict[str, float] | None]) -> None:
    """The table, with the ratio where both sides ran."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one RL step: 64 prompts × 8 answers, 2 optimizer steps, 0.4 M parameters, one CPU thread")
    for heading in ("", "CPU-seconds a step", "tokens/s", "peak MiB", "final accuracy"):
        table.add_column(heading, justify="right")
    for side, r in results.items():
        cells = ["–"] * 4
        if r:
            cells = [
                f"{r['cpu_per_step']:.3f}",
                f"{r['tokens_per_s']:,.0f}",
                f"{r['peak_mib']:,.0f}",
                f"{r['accuracy']:.3f}",
            ]
        table.add_row(side, *cells)
    console = Console()
    console.print(table)
    ours, theirs = results.get("meshrl"), results.get("trl")
    if ours and theirs:
        ratio = ours["cpu_per_step"] / theirs["cpu_per_step"]
        console.print(
            f"meshrl takes {ratio:.3f} of TRL's CPU time a step ({1 / ratio:.1f}x faster); target: at most 1/3"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("meshrl", "trl"))
    parser.add_argument("--side", choices=("prepare", "meshrl", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "prepare":
        prepare(args.folder, args.seed)
        sys.stdout.write("{}\n")
    elif args.side:
        side = run_meshrl if args.side == "meshrl" else run_trl
        sys.stdout.write(json.dumps(side(args.folder, args.steps, args.seed)) + "\n")
    else:
        with tempfile.TemporaryDirectory() as folder:
            in_own_process("prepare", Path(folder), args.steps, args.seed)
            sides = [args.only] if args.only else ["meshrl", "trl"]
            show({side: in_own_process(side, Path(folder), args.steps, args.seed) for side in sides})


if __name__ == "__main__":
    main()
