"""What running ahead gains: GRPO with a tool whose answers take a skewed time, synchronous and with growing staleness.

python benchmarks/asynchronous.py [--steps 20] [--staleness 0 1 2 4] [--median 0.2] [--spread 1.0]

Conversations of the calculator recipe, with a tool that waits before it answers: log-normal, so that a few are slow, as
searches, sandboxes and long answers are. Waiting takes no processor, so two cores suffice to see the overlap. One
trainer process and one rollout process; the first row has both in one, taking turns.

At most: with k batches ahead, k + 1 are generated at once, and a step takes at least what is not generation.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshrl.agents.calculator import evaluate
from meshrl.agents.calculator_task import make_calculator_model, write_calculator_data
from meshrl.agents.tools import tool
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.calculator_demo import rl_run, warm_up

MEDIAN, SPREAD = "MESHRL_BENCH_MEDIAN", "MESHRL_BENCH_SPREAD"
SEPARATE = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)


@tool(timeout=30.0)
async def calculator(expression: str) -> str:
    """Works out an expression, after a while.

    Args:
        expression: such as 12*34
    """
    await asyncio.sleep(delay(expression))
    return str(evaluate(expression))


def delay(expression: str) -> float:
    """Seconds, log-normal over expressions and always the same for one."""
    left, right = (int.from_bytes(hashlib.sha256(f"{expression}{i}".encode()).digest()[:6], "big") for i in range(2))
    u, v = (left + 1) / (1 << 48), right / (1 << 48)
    normal = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
    return float(os.environ[MEDIAN]) * math.exp(float(os.environ[SPREAD]) * normal)


def run(folder: Path, model: Path, files: dict[str, str], steps: int, *overrides: str) -> dict[str, float]:
    """Medians over the steps after the first few, which fill the queue."""
    own = [
        f"actor_rollout_ref.rollout.multi_turn.tools=[{Path(__file__).absolute()}:calculator]",
        "actor_rollout_ref.rollout.multi_turn.max_concurrent_calls=1024",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        *overrides,
    ]
    out = rl_run(folder, model, files, 0, own, Console(quiet=True))
    rows = [row for row in RunFiles(out).read_metrics() if "timing_s/step" in row]
    names = ("timing_s/step", "timing_s/gen", "training/staleness_mean", "training/staleness_max", "critic/score/mean")
    return {name: statistics.median(row[name] for row in rows[5:]) for name in names}


def bench() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--median", type=float, default=0.2, help="seconds the tool takes")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of their logarithm")
    args = parser.parse_args()
    os.environ |= {MEDIAN: str(args.median), SPREAD: str(args.spread), "OMP_NUM_THREADS": "1"}
    table = Table(title=f"{args.steps} steps, 256 conversations each; seconds are medians")
    for heading in (
        "placement",
        "max_staleness",
        "step",
        "waits for answers",
        "staleness mean",
        "max",
        "faster",
        "at most",
    ):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_calculator_model(folder / "assets" / "model")
        files = write_calculator_data(folder / "assets")
        model = warm_up(folder, files, 0, Console(quiet=True))
        cases = [("together", 0, ())]
        cases += [("apart", k, (*SEPARATE, f"async_training.max_staleness={k}")) for k in args.staleness]
        first = None
        for number, (placement, staleness, overrides) in enumerate(cases):
            found = run(folder / str(number), model, files, args.steps, *overrides)
            step, wait = found["timing_s/step"], found["timing_s/gen"]
            first = first or found
            works = first["timing_s/step"] - first["timing_s/gen"]
            table.add_row(
                placement,
                str(staleness),
                f"{step:.2f}",
                f"{wait:.2f}",
                f"{found['training/staleness_mean']:.2f}",
                f"{found['training/staleness_max']:.0f}",
                f"{first['timing_s/step'] / step:.2f}x",
                f"{min(1 + staleness, first['timing_s/step'] / works):.2f}x",
            )
    Console().print(table)


if __name__ == "__main__":
    bench()
