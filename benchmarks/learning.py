"""Does RL learn the demo task? Five seeds, and a control whose rewards are coin tosses.

python benchmarks/learning.py [--algorithm grpo|ppo] [--seeds 0 1 2 3 4] [--steps 200]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.demo import ACCURACY, main


def run(folder: Path, seed: int, control: bool, steps: int, algorithm: str) -> tuple[float, float, float]:
    """Held-out accuracy before and after RL, and the seconds it took."""
    started = time.perf_counter()
    overrides = [f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", "trainer.device=cpu"]
    out = main(
        folder, seed=seed, control=control, algorithm=algorithm, overrides=overrides, console=Console(quiet=True)
    )
    seconds = time.perf_counter() - started
    found = [row[ACCURACY] for row in RunFiles(out).read_metrics() if ACCURACY in row]
    return found[0], found[-1], seconds


def bench() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    args = parser.parse_args()
    title = f"held-out accuracy (512 prompts, greedy) before and after {args.steps} steps of {args.algorithm.upper()}"
    table = Table(title=title)
    for heading in ("seed", "rewards", "after warm-up", "after RL", "seconds"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        cases = [(seed, False) for seed in args.seeds] + [(args.seeds[0], True)]
        for seed, control in cases:
            place = Path(folder) / f"{seed}-{control}"
            before, after, seconds = run(place, seed, control, args.steps, args.algorithm)
            rewards = "coin tosses (control)" if control else "checker"
            table.add_row(str(seed), rewards, f"{before:.3f}", f"{after:.3f}", f"{seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    bench()
