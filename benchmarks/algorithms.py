"""Times advantage estimators against plain Python loops, and against verl's where it is installed.

    python benchmarks/algorithms.py [--repeats 5]

GAE: the loop goes over time, backwards, one vector operation a step. GRPO, RLOO and OPO: the loop goes over samples.
Both sides return advantages and returns from the same inputs, an int64 mask among them. The same at a quarter of the
batch shows how the time grows with it. Two tables: time on the clock with all threads that torch takes by default (a
loop's small operations cannot use them), and CPU time of one thread. Every figure is the best of `--repeats` turns of
at least 0.2 s, after a first run of each and in a process that keeps freed memory, as that of a trainer does after
some steps; the difference is the largest between our results and the loop's.
"""

import argparse
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from meshrl import algorithms

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Case:
    name: str
    ours: Run
    loop: Run
    verl: Run | None
    quarter: Run


@torch.no_grad()
def loop_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backwards over time, passing over tokens that are not the policy's; then whitened over the batch's tokens."""
    mask = mask.float()
    next_value = torch.zeros(len(rewards))
    running = torch.zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        keep = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = keep * (delta + gamma * lam * running) + (1 - keep) * running
        next_value = keep * values[:, t] + (1 - keep) * next_value
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=1)
    returns = (advantages + values) * mask
    kept = advantages[mask.bool()]
    return (advantages - kept.mean()) / kept.std() * mask, returns


@torch.no_grad()
def loop_groups(
    name: str, rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores collected per group in a dict of lists, statistics per group, then one sample after the other."""
    scores = rewards.sum(-1)
    lengths = mask.sum(-1).float() if name == "opo" else scores
    own, weights = defaultdict(list), defaultdict(list)
    for sample in range(len(scores)):
        own[index[sample]].append(scores[sample])
        if name == "opo":
            weights[index[sample]].append(lengths[sample])
    first, second = {}, {}
    for group, members in own.items():
        stacked = torch.stack(members)
        if name == "grpo":
            first[group], second[group] = stacked.mean(), stacked.std()
        elif name == "rloo":
            first[group] = stacked.sum()
        else:
            weight = torch.stack(weights[group])
            first[group] = (stacked * weight).sum() / weight.sum()
    out = torch.empty_like(scores)
    for sample in range(len(scores)):
        group, score = index[sample], scores[sample]
        if name == "grpo":
            out[sample] = (score - first[group]) / (second[group] + 1e-6)
        elif name == "rloo":
            out[sample] = score - (first[group] - score) / (len(own[group]) - 1)
        else:
            out[sample] = score - first[group]
    advantages = out[:, None] * mask
    return advantages, advantages


def batch_of(rows: int, columns: int, gaps: bool = False) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Rewards at the last token, masks of random lengths (`gaps`: tool output inside), groups of 8 by string id."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(columns // 4, columns + 1, (rows,), generator=generator)
    mask = (torch.arange(columns) < lengths[:, None]).long()
    if gaps:
        mask[:, columns // 16 : columns // 8] = 0
    rewards = torch.zeros(rows, columns)
    rewards[torch.arange(rows), lengths - 1] = torch.rand(rows, generator=generator)
    return rewards, mask, np.array([f"prompt-{row // 8}" for row in range(rows)], dtype=object)


def gae_case(verl: ModuleType | None, gaps: bool) -> Case:
    rewards, mask, _ = batch_of(256, 8192, gaps)
    values = torch.randn(256, 8192, generator=torch.Generator().manual_seed(1))
    function = algorithms.compute_gae_advantage_return
    quarter = (rewards[:64].clone(), values[:64].clone(), mask[:64].clone(), 0.99, 0.95)
    return Case(
        "gae 256 x 8192" + (", tool output inside" if gaps else ""),
        lambda: function(rewards, values, mask, 0.99, 0.95),
        lambda: loop_gae(rewards, values, mask, 0.99, 0.95),
        None if verl is None else lambda: verl.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95),
        lambda: function(*quarter),
    )


def group_case(verl: ModuleType | None, name: str) -> Case:
    rewards, mask, index = batch_of(8192, 256)
    function_name = f"compute_{name}_outcome_advantage"
    function = getattr(algorithms, function_name)
    theirs = getattr(verl, function_name, None)
    quarter = rewards[:2048].clone(), mask[:2048].clone(), index[:2048].copy()
    return Case(
        f"{name} 8192 samples",
        lambda: function(rewards, mask, index),
        lambda: loop_groups(name, rewards, mask, index),
        None if theirs is None else lambda: theirs(rewards, mask, index),
        lambda: function(*quarter),
    )


def best_seconds(
    runs: list[Run | None], repeats: int, clock: Callable[[], float] = time.process_time
) -> list[float | None]:
    """The best time of each, taking turns of at least 0.2 s."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for place, run in enumerate(runs):
            begin = clock()
            while run is not None:
                start = clock()
                run()
                best[place] = min(best[place], clock() - start)
                if clock() - begin > 0.2:
                    break
    return [None if run is None else seconds for run, seconds in zip(runs, best, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    # Once a block of this size was freed, glibc no longer hands the memory of a freed result back to the system, to be
    # mapped anew, page by page, at the next call of either side.
    torch.ones(31 * 2**18)
    try:
        verl: ModuleType | None = importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        verl = None
        Console().print(f"verl is not compared: {error}")

    cases = [gae_case(verl, False), gae_case(verl, True)] + [group_case(verl, name) for name in ("grpo", "rloo", "opo")]
    threads = torch.get_num_threads()
    show(cases, f"time on the clock with {threads} threads", options.repeats, time.perf_counter)
    torch.set_num_threads(1)
    show(cases, "CPU time of one thread", options.repeats, time.process_time)


def show(cases: list[Case], what: str, repeats: int, clock: Callable[[], float]) -> None:
    """Measures every case and prints a table."""
    table = Table(title=f"advantage estimators, {what}, ms")
    columns = ("", "meshrl", "loop", "loop / meshrl", "verl", "verl / meshrl", "batch / its quarter", "difference")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for case in cases:
        pairs = zip(case.ours(), case.loop(), strict=True)  # also the first, untimed run of both
        difference = max((ours - loop).abs().max().item() for ours, loop in pairs)
        ours, loop, theirs, quarter = best_seconds([case.ours, case.loop, case.verl, case.quarter], repeats, clock)
        assert ours is not None
        assert loop is not None
        assert quarter is not None
        table.add_row(
            case.name,
            f"{ours * 1e3:.1f}",
            f"{loop * 1e3:.0f}",
            f"{loop / ours:.0f}x",
            "-" if theirs is None else f"{theirs * 1e3:.0f}",
            "-" if theirs is None else f"{theirs / ours:.0f}x",
            f"{ours / quarter:.1f}x",
            f"{difference:.0e}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
