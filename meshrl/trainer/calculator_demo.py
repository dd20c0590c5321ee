"""The calculator demo: a tiny model learns by RL to use a tool for calculations that it cannot do itself.

Nothing is downloaded: model, tokenizer and data are made on the spot, as in demo.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshrl.agents.calculator_task import DEMONSTRATIONS, TOOL_SHARE, make_calculator_model, write_calculator_data
from meshrl.config.load import Loaded, load_config
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import SFTConfig
from meshrl.config.validate import ensure_runnable
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.launch import train, train_supervised

ACCURACY, TOOL_USE = "val-core/calculator/acc/mean@1", "agent/tool_use_share"


def main(
    out: str | Path = "outputs/calculator",
    *,
    seed: int = 0,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Path:
    """Make the task, warm the model up on demonstrations of which few use the tool, and train it by RL.

    Return the RL run's folder.
    """
    console = console or Console()
    out = Path(out)
    console.print(
        f"[bold]1. Making[/] a tiny model and {DEMONSTRATIONS} demonstrations, {TOOL_SHARE:.0%} with the tool"
    )
    make_calculator_model(out / "assets" / "model", seed)
    files = write_calculator_data(out / "assets", seed)
    # Report a mistake in the config before the warm-up trains.
    ensure_runnable(rl_config(out, out / "sft" / "model", files, seed, overrides).config, check_files=False)
    console.print("[bold]2. Supervised warm-up[/] on the demonstrations")
    warm = warm_up(out, files, seed, console)
    console.print("[bold]3. RL[/] with GRPO: right answers are rewarded, calls are not")
    folder = rl_run(out, warm, files, seed, overrides, console)
    show_results(folder, console)
    return folder


def warm_up(out: Path, files: dict[str, str], seed: int, console: Console, overrides: Sequence[str] = ()) -> Path:
    """Run the supervised warm-up; return the folder of the model it wrote."""
    settings = [
        f"data.train_files=[{files['demonstrations']}]",
        f"model.path={out / 'assets' / 'model'}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={out / 'sft'}",
        "trainer.logger=[file]",
        *overrides,
    ]
    loaded = load_config("calculator_sft", settings, SFTConfig)
    return train_supervised(loaded.config, loaded.sources, console) / "model"


def rl_run(
    out: Path, model: Path, files: dict[str, str], seed: int, overrides: Sequence[str], console: Console
) -> Path:
    """Run the RL part, with the user's own overrides on top of the recipe; return the run's folder."""
    loaded = rl_config(out, model, files, seed, overrides)
    ensure_runnable(loaded.config)
    return train(loaded.config, loaded.sources, console)


def rl_config(out: Path, model: Path, files: dict[str, str], seed: int, overrides: Sequence[str]) -> Loaded[PPOConfig]:
    """Load the config of the RL part, with the user's own overrides on top of the recipe."""
    settings = [
        f"data.train_files=[{files['prompts']}]",
        f"data.val_files=[{files['held_out']}]",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={out / 'grpo'}",
        *overrides,
    ]
    return load_config("calculator", settings, PPOConfig)


def show_results(folder: Path, console: Console) -> None:
    """Print held-out accuracy and the share of samples that used the tool over the run's steps."""
    table = Table(title="Products of two-digit numbers, with a calculator at hand")
    for heading in ("step", "held-out accuracy (greedy)", "samples that use the tool", "training reward"):
        table.add_column(heading, justify="right")
    for row in RunFiles(folder).read_metrics():
        step = int(row["step"])
        if ACCURACY in row or step == 1:
            shown = [f"{row[name]:.3f}" if name in row else "–" for name in (ACCURACY, TOOL_USE, "critic/score/mean")]
            table.add_row(str(step), *shown)
    console.print(table)
