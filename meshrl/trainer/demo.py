"""The demo: a tiny model learns to sort digits, first from a few demonstrations, then by RL from a checker alone.

Nothing is downloaded: model, tokenizer and data are made on the spot.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshrl.config.load import Loaded, load_config
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import SFTConfig
from meshrl.config.validate import ensure_runnable
from meshrl.data.row_files import write_tables
from meshrl.models.tiny import make_tiny_model
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.launch import train, train_supervised

ALPHABET = "0123456789>"
DIGITS = 6
HELD_OUT, DEMONSTRATIONS, PROMPTS = 512, 128, 12_800
ACCURACY = "val-core/sort_digits/acc/mean@1"


def main(
    out: str | Path = "outputs/demo",
    *,
    seed: int = 0,
    control: bool = False,
    algorithm: str = "grpo",
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Path:
    """Run the whole demo, with GRPO or PPO; return the RL run's folder.

    With `control` the rewards are coin tosses, from which the model must not learn.
    """
    console = console or Console()
    out = Path(out)
    console.print(f"[bold]1. Making[/] a 0.4 M parameter model, {DEMONSTRATIONS} demonstrations, {PROMPTS:,} prompts")
    make_tiny_model(out / "assets" / "model", ALPHABET, seed)
    files = write_data(out / "assets", seed)
    loaded = rl_config(out, out / "sft" / "model", files, seed, control, algorithm, overrides)
    ensure_runnable(loaded.config, check_files=False)  # report a mistake before the warm-up trains
    console.print("[bold]2. Supervised warm-up[/] on the demonstrations")
    sft_run(out, files, seed, console)
    rewards = "coin-toss rewards (control)" if control else "a checker's rewards"
    console.print(f"[bold]3. RL[/] with {algorithm.upper()}: {rewards}")
    ensure_runnable(loaded.config)
    folder = train(loaded.config, loaded.sources, console)
    show_results(folder, console)
    return folder


def write_data(folder: Path, seed: int) -> dict[str, str]:
    """Write held-out prompts, training prompts and demonstrations; return their files by name.

    The held-out prompts are the same for every seed. The training prompts and demonstrations contain none of them.
    """
    held_out = new_tasks(random.Random(12345), HELD_OUT, exclude=set())
    rng = random.Random(seed)
    demonstrations = new_tasks(rng, DEMONSTRATIONS, exclude=set(held_out))
    prompts = new_tasks(rng, PROMPTS, exclude=set(held_out))
    tables: dict[str, list[dict[str, Any]]] = {
        "held_out": [task_row(digits) for digits in held_out],
        "prompts": [task_row(digits) for digits in prompts],
        "demonstrations": [{"prompt": f"{d}>", "response": "".join(sorted(d))} for d in demonstrations],
    }
    return write_tables(folder, tables)


def new_tasks(rng: random.Random, count: int, exclude: set[str]) -> list[str]:
    """Return `count` different random digit strings that are not in `exclude`."""
    tasks: dict[str, None] = {}
    while len(tasks) < count:
        digits = "".join(rng.choices("0123456789", k=DIGITS))
        if digits not in exclude:
            tasks[digits] = None
    return list(tasks)


def task_row(digits: str) -> dict[str, Any]:
    """Return a prompt row for the trainer; the checker gets the digits, and no answer is stored."""
    return {"prompt": f"{digits}>", "data_source": "sort_digits", "extra_info": {"digits": digits}}


def sft_run(out: Path, files: dict[str, str], seed: int, console: Console) -> Path:
    """Run the supervised warm-up; return the folder of the model it wrote."""
    loaded = load_config(
        "demo_sft",
        [
            f"data.train_files=[{files['demonstrations']}]",
            f"model.path={out / 'assets' / 'model'}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out / 'sft'}",
            "trainer.logger=[file]",
        ],
        SFTConfig,
    )
    return train_supervised(loaded.config, loaded.sources, console) / "model"


def rl_config(
    out: Path,
    model: Path,
    files: dict[str, str],
    seed: int,
    control: bool,
    algorithm: str,
    overrides: Sequence[str],
) -> Loaded[PPOConfig]:
    """Load the config of the RL part, with the user's own overrides on top of the recipe."""
    return load_config(
        f"demo_{algorithm}",
        [
            f"data.train_files=[{files['prompts']}]",
            f"data.val_files=[{files['held_out']}]",
            f"actor_rollout_ref.model.path={model}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out / ('control' if control else algorithm)}",
            *(["reward.name=coin_toss"] if control else []),
            *overrides,
        ],
        PPOConfig,
    )


def show_results(folder: Path, console: Console) -> None:
    """Print a table of the held-out accuracy over the run, and the paths of its picture and report."""
    run = RunFiles(folder)
    rows = [r for r in run.read_metrics() if ACCURACY in r]
    table = Table(title="Held-out accuracy (512 prompts, greedy)")
    for heading in ("step", "accuracy", "training reward"):
        table.add_column(heading, justify="right")
    for row in rows:
        reward = f"{row['critic/score/mean']:.3f}" if "critic/score/mean" in row else "–"
        table.add_row(str(int(row["step"])), f"{row[ACCURACY]:.3f}", reward)
    console.print(table)
    if len(rows) > 1:
        console.print(f"from {rows[0][ACCURACY]:.3f} after the warm-up to [bold]{rows[-1][ACCURACY]:.3f}[/] by RL")
    console.print(f"picture: {run.curves}\nreport:  {run.report}")
