"""kill -9 at random moments: supervised runs must end as the unkilled run does.

    python benchmarks/chaos.py --kills 50 [--backend ray] [--seed 0]

A run has a controller, two trainer ranks, two rollout ranks with processes of their own and two reward processes. A
seeded killer picks one of these kinds and a moment, again and again, until the run ends. Then: exit code 0, weights
equal to the bit, every step once in metrics.jsonl, the same samples trained at every step, no process left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.demo import ALPHABET, write_data

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("controller", "trainer", "rollout", "reward")
MARK = "MESHRL_CHAOS"


@dataclass
class Outcome:
    """What one run went through."""

    code: int
    seconds: float
    kills: list[str] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)


def command(folder: Path, out: Path, backend: str, steps: int, restarts: int) -> list[str]:
    words = [
        "demo_grpo",
        f"data.train_files=[{folder / 'assets' / 'prompts.jsonl'}]",
        f"actor_rollout_ref.model.path={folder / 'assets' / 'model'}",
        f"trainer.default_local_dir={out}",
        f"trainer.rollout_data_dir={out / 'samples'}",
        f"trainer.total_training_steps={steps}",
        f"trainer.max_restarts={restarts}",
        f"trainer.backend={backend}",
        "trainer.restart_wait=0",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.save_freq=4",
        "trainer.max_ckpt_to_keep=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.n_gpus_per_node=2",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "reward_manager.name=prime",
        "reward_manager.num_processes=2",
    ]
    if backend == "ray":
        words.append("ray_init.num_cpus=8")
    return [sys.executable, "-m", "meshrl.cli", "train", "--supervise", *words]


def processes(mark: str) -> dict[str, list[int]]:
    """The living processes of a run by kind; every one has the mark in its environment."""
    found: dict[str, list[int]] = {kind: [] for kind in (*TARGETS, "supervisor", "other")}
    ranks = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat[0] == "Z":
            continue
        pid, parent = int(entry.name), int(stat[1])
        if "meshrl.rewards.worker" in words:
            found["reward"].append(pid)
        elif "meshrl.controller.nursery" in words:
            ranks.append((pid, parent))
        elif words.startswith("ray::RayWorker"):
            ranks.append((pid, -1))
        elif "meshrl.cli train" in words:
            found["supervisor" if "--supervise" in words else "controller"].append(pid)
        else:
            found["other"].append(pid)
    numbers = {pid for pid, _ in ranks}
    # The nursery is no rank: the ranks are its children. The first pool's two are older than the second's.
    workers = sorted(pid for pid, parent in ranks if parent == -1 or parent in numbers)
    found["other"] += numbers - set(workers)
    if len(workers) == 4:
        found["trainer"], found["rollout"] = workers[:2], workers[2:]
    return found


def run(words: Sequence[str], out: Path, kills: int, rng: random.Random, limit: float) -> Outcome:
    """One run; up to `kills` processes of it are killed, the first after its first step."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out.mkdir(parents=True)
    began, done = time.monotonic(), []
    with open(out / "output.txt", "wb") as output:
        parent = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
        next_at, kind = None, rng.choice(TARGETS)
        while parent.poll() is None:
            time.sleep(0.02)
            if time.monotonic() - began > limit:
                parent.kill()
                raise TimeoutError(f"the run has not ended after {limit} s, see {out}")
            if next_at is None and (out / "metrics.jsonl").exists():
                next_at = time.monotonic() + rng.uniform(0, 0.5)
            if next_at is None or time.monotonic() < next_at or len(done) == kills:
                continue
            # The kind is chosen before anybody looks who lives, so that a start is not hit more than its share.
            if alive := processes(mark)[kind]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(alive), signal.SIGKILL)
                    done.append(kind)
                    next_at, kind = time.monotonic() + rng.uniform(0.1, 2.0), rng.choice(TARGETS)
    until = time.monotonic() + 20
    while any(left := list(processes(mark).values())) and time.monotonic() < until:
        time.sleep(0.2)
    if any(left):
        raise RuntimeError(f"processes are left: {left}")
    file = out / "restarts.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Outcome(parent.returncode, time.monotonic() - began, done, records)


def differences(out: Path, whole: Path, steps: int) -> list[str]:
    """In what a run differs from the unkilled one."""
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (out, whole))
    problems = [f"weight {name} differs" for name in theirs if not ours[name].equal(theirs[name])]
    logged = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    if logged != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl has steps {logged}")
    for step in range(1, steps + 1):
        if (out / "samples" / f"{step}.jsonl").read_bytes() != (whole / "samples" / f"{step}.jsonl").read_bytes():
            problems.append(f"step {step} was trained on other samples")
    return problems


def chaos(
    folder: Path,
    kills: int,
    seed: int,
    backend: str = "local",
    steps: int = 60,
    per_run: int = 10,
    limit: float = 600.0,
) -> list[Outcome]:
    """Runs until so many processes were killed; raises if a run does not end as the unkilled one did."""
    make_tiny_model(folder / "assets" / "model", ALPHABET)
    write_data(folder / "assets", seed=0)
    rng, outcomes = random.Random(seed), []
    whole = folder / "whole"
    first = run(command(folder, whole, backend, steps, 1), whole, 0, rng, limit)
    assert first.code == 0, (whole / "output.txt").read_text()[-3000:]
    while (left := kills - sum(len(outcome.kills) for outcome in outcomes)) > 0:
        out = folder / f"run{len(outcomes)}"
        outcome = run(command(folder, out, backend, steps, 4 * per_run), out, min(left, per_run), rng, limit)
        if outcome.code != 0:
            raise RuntimeError(f"{out} ended with {outcome.code}:\n" + (out / "output.txt").read_text()[-3000:])
        if problems := differences(out, whole, steps):
            raise RuntimeError(f"{out}: {problems}")
        outcomes.append(outcome)
    return outcomes


def phases(outcomes: Sequence[Outcome]) -> Counter[str]:
    """In which call of the workers the kills were, as far as the controller lived to say it."""
    found: Counter[str] = Counter()
    for record in (record for outcome in outcomes for record in outcome.records if record["event"] == "failed"):
        match = re.search(r"while it ran (\w+)|died (between calls)", record["error"])
        found[(match[1] or match[2]) if match else "controller lost"] += 1
    return found


def table(outcomes: Sequence[Outcome], backend: str) -> str:
    """The result as Markdown."""
    killed = Counter(kind for outcome in outcomes for kind in outcome.kills)
    lost = [r["seconds_lost"] for outcome in outcomes for r in outcome.records if "seconds_lost" in r]
    where = ", ".join(f"{name} {count}" for name, count in phases(outcomes).most_common())
    rows = [
        ("backend", backend),
        ("kills", f"{sum(killed.values())} ({', '.join(f'{kind} {killed[kind]}' for kind in TARGETS)})"),
        ("restarts, by the call that was hit", where),
        ("runs, all ended with 0", str(len(outcomes))),
        ("weights, and samples of every step, equal to the unkilled run's", "all"),
        ("time lost a restart, median / most", f"{statistics.median(lost):.1f} / {max(lost):.1f} s" if lost else "-"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshrl-chaos-") as folder:
        outcomes = chaos(Path(folder), arguments.kills, arguments.seed, arguments.backend, arguments.steps)
    Console().print(table(outcomes, arguments.backend), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
