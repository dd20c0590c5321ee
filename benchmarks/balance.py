"""Times and grades the partitioners and the micro-batch planner, against verl's where it is installed.

    python benchmarks/balance.py [--seed 0]
    python benchmarks/balance.py --figure docs/images/balancing.png

Lengths are log-normal and capped at 32k tokens, as responses are. "max / mean" is the heaviest part's load over the
mean: the time of a step over what it could be. The plain reference deals the samples out in the given order. The second
table packs random batches under a token cap and counts the micro-batches that break it. With `--figure` the loads of
the parts before and after are drawn, for each algorithm.
"""

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
from rich.console import Console
from rich.table import Table

from meshrl.balance import get_seqlen_balanced_partitions, plan_micro_batches

SIZES = [(512, 8, True), (1_024, 8, True), (4_096, 64, True), (10_000, 64, False), (100_000, 512, False)]
ALGORITHMS = ["greedy", "greedy_improved", "lpt", "kk", "auto"]
VERL_LIMIT = 20_000_000  # items x parts above which verl's takes minutes

Parts = list[list[int]]


def lengths_of(n: int, seed: int) -> np.ndarray:
    draws = np.exp(np.random.default_rng(seed).normal(7.0, 1.2, n))
    return np.minimum(draws.astype(np.int64) + 1, 32_768)


def max_over_mean(lengths: np.ndarray, parts: Parts) -> float:
    loads = np.array([lengths[part].sum() for part in parts])
    return float(loads.max() / loads.mean())


def timed(run: Callable[[], Parts], repeats: int = 3) -> tuple[Parts, float]:
    best, parts = float("inf"), []
    for _ in range(repeats):
        start = time.perf_counter()
        parts = run()
        best = min(best, time.perf_counter() - start)
        if best > 2:
            break
    return parts, best


def in_given_order(n: int, k: int) -> Parts:
    return [part.tolist() for part in np.array_split(np.arange(n), k)]


def partition_table(verl: ModuleType | None, seed: int) -> Table:
    table = Table(title="partitions: max / mean load, and seconds")
    for name in ("items -> parts", "sizes", "in order", *ALGORITHMS, "verl"):
        table.add_column(name, justify="right")
    for n, k, equal in SIZES:
        lengths = lengths_of(n, seed)
        cells = [f"{n} -> {k}", "equal" if equal else "free", f"{max_over_mean(lengths, in_given_order(n, k)):.3f}"]
        for algorithm in ALGORITHMS:
            if algorithm == "kk" and not equal and n * k > VERL_LIMIT:
                cells.append("-")
                continue
            parts, seconds = timed(partial(get_seqlen_balanced_partitions, lengths, k, equal, algorithm=algorithm))
            cells.append(f"{max_over_mean(lengths, parts):.4f} {seconds:.3f}s")
        if verl is None or n * k > VERL_LIMIT:
            cells.append("-")
        else:
            parts, seconds = timed(partial(verl.get_seqlen_balanced_partitions, lengths.tolist(), k, equal), repeats=1)
            cells.append(f"{max_over_mean(lengths, parts):.4f} {seconds:.3f}s")
        table.add_row(*cells)
    return table


def cap_table(verl: ModuleType | None, batches: int = 100) -> Table:
    """The plain reference splits into ceil(tokens / cap) runs of equal counts."""
    table = Table(title=f"{batches} batches of 256 samples under a cap of 32,768 tokens")
    for name in ("", "batches over the cap", "worst excess", "micro-batches", "ms a batch"):
        table.add_column(name, justify="right" if name else "left")
    cap = 32_768

    def wanted(lengths: np.ndarray) -> int:
        return -(-int(lengths.sum()) // cap)

    sides: dict[str, Callable[[np.ndarray], Parts]] = {
        "meshrl": lambda lengths: [part.tolist() for part in plan_micro_batches(lengths, cap)],
        "runs of equal counts": lambda lengths: in_given_order(len(lengths), wanted(lengths)),
    }
    if verl is not None:
        partition = verl.get_seqlen_balanced_partitions
        sides["verl's partitions, same count"] = lambda lengths: partition(lengths.tolist(), wanted(lengths), False)
    for name, split in sides.items():
        over, excess, count, start = 0, 0.0, 0, time.perf_counter()
        for seed in range(batches):
            lengths = lengths_of(256, seed)
            parts = split(lengths)
            heaviest = max(int(lengths[part].sum()) for part in parts)
            over, excess, count = over + (heaviest > cap), max(excess, heaviest / cap - 1), count + len(parts)
        milliseconds = (time.perf_counter() - start) / batches * 1e3
        table.add_row(name, str(over), f"{excess:.1%}", str(count), f"{milliseconds:.2f}")
    return table


def draw(path: Path, seed: int) -> None:
    """Loads of 16 parts of 16 samples each, before and after, one panel an algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    n, k = 256, 16
    lengths = lengths_of(n, seed)
    panels = {"in the given order": in_given_order(n, k)}
    for algorithm in ALGORITHMS:
        name = f"{algorithm} (default)" if algorithm == "auto" else algorithm
        panels[name] = get_seqlen_balanced_partitions(lengths, k, True, algorithm=algorithm)
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5), sharex=True, sharey=True, layout="constrained")
    for axis, (name, parts) in zip(axes.flat, panels.items(), strict=True):
        loads = np.sort([lengths[part].sum() for part in parts])[::-1] / 1000
        axis.bar(np.arange(k), loads, color="0.65" if name == "in the given order" else "tab:blue", width=0.85)
        axis.set_xticks(np.arange(0, k, 5))
        axis.axhline(loads.mean(), color="black", linewidth=0.8)
        axis.set_title(f"{name}: max / mean {loads.max() / loads.mean():.3f}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("part, heaviest first (line: mean)")
    figure.supylabel("thousand tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="draw the figure to this file instead")
    options = parser.parse_args()
    if options.figure is not None:
        draw(options.figure, options.seed)
        return
    console = Console(width=170)
    try:
        verl: ModuleType | None = importlib.import_module("verl.utils.seqlen_balancing")
    except ImportError as error:
        verl = None
        console.print(f"verl is not compared: {error}")
    console.print(partition_table(verl, options.seed))
    console.print(cap_table(verl))


if __name__ == "__main__":
    main()
