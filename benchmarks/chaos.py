"""kill -9 at random moments: supervised runs must end as the unkilled run does.

    python benchmarks/chaos.py --kills 50 [--backend ray] [--seed 0]

A run has a controller, two trainer ranks, two rollout ranks with processes of their own and two reward processes. A
seeded killer picks one of these kinds and a moment, again and again, until the run ends. Then: exit code 0, weights
equal to the bit, every step once in metrics.jsonl, the same samples trained at every step, no process left.

Time lost, as the runs' own `restarts.jsonl` has it: the wall time of work that is done again (from when the state was
kept to the failure) and that of the restart (from the failure to when work goes on). Its sum is printed beside what the
killed runs took longer than the unkilled one.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.demo import ALPHABET, write_data

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("controller", "trainer", "rollout", "reward")
MARK = "MESHRL_CHAOS"
LOST = (
    ("time lost a restart, median / most", "seconds_lost"),
    ("of it work thrown away", "thrown_away"),
    ("of it the restart", "restart"),
)


@dataclass
class Outcome:
    """What one run went through."""

    code: int
    seconds: float
    kills: list[str] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)


def command(folder: Path, out: Path, backend: str, steps: int, restarts: int, copies: int = -1) -> list[str]:
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
        words += ["ray_init.num_cpus=4", "ray_init.object_store_memory=100000000"]
    if copies > 0:
        words.append(f"trainer.memory_copy_freq={copies}")
    return [sys.executable, "-m", "meshrl.cli", "train", "--supervise", *words]


def ranks_of(out: Path) -> dict[str, list[int]]:
    """The newest process ids of the trainers and the rollouts, as the run's log has them."""
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for role, numbers in re.findall(r"workers of '(\w+)': pids \[([\d, ]+)\]", (out / "log.txt").read_text()):
            found[role] = [int(number) for number in numbers.split(",")]
    return {"trainer": found.get("actor_rollout_ref", []), "rollout": found.get("rollout", [])}


def processes(mark: str, out: Path) -> dict[str, list[int]]:
    """The living processes of a run by kind; every one has the mark in its environment."""
    found: dict[str, list[int]] = {kind: [] for kind in (*TARGETS, "supervisor", "other")}
    ranks = ranks_of(out)
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
        pid = int(entry.name)
        role = next((role for role, pids in ranks.items() if pid in pids), None)
        if "meshrl.rewards.worker" in words:
            found["reward"].append(pid)
        elif role is not None and ("meshrl.controller.nursery" in words or words.startswith("ray::RayWorker")):
            found[role].append(pid)
        elif "meshrl.cli train" in words:
            found["supervisor" if "--supervise" in words else "controller"].append(pid)
        else:
            found["other"].append(pid)
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
            if alive := processes(mark, out)[kind]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(alive), signal.SIGKILL)
                    done.append(kind)
                    next_at, kind = time.monotonic() + rng.uniform(0.1, 2.0), rng.choice(TARGETS)
    until = time.monotonic() + 20
    while any(left := list(processes(mark, out).values())) and time.monotonic() < until:
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
    limit: float = 1500.0,
    copies: int = -1,
) -> list[Outcome]:
    """Runs until so many processes were killed; raises if a run does not end as the unkilled one did.

    The first outcome is the unkilled run's.
    """
    make_tiny_model(folder / "assets" / "model", ALPHABET)
    write_data(folder / "assets", seed=0)
    rng, whole = random.Random(seed), folder / "whole"
    first = run(command(folder, whole, backend, steps, 1), whole, 0, rng, limit)
    assert first.code == 0, (whole / "output.txt").read_text()[-3000:]
    outcomes = [first]
    while (left := kills - sum(len(outcome.kills) for outcome in outcomes)) > 0:
        out = folder / f"run{len(outcomes)}"
        words = command(folder, out, backend, steps, 4 * per_run, copies)
        outcome = run(words, out, min(left, per_run), rng, limit)
        if outcome.code != 0:
            raise RuntimeError(f"{out} ended with {outcome.code}:\n" + (out / "output.txt").read_text()[-3000:])
        if problems := differences(out, whole, steps):
            raise RuntimeError(f"{out}: {problems}")
        outcomes.append(outcome)
        told = f"{out.name}: {outcome.seconds:.0f} s, killed {' '.join(outcome.kills)}"
        Console(stderr=True).print(told, soft_wrap=True)
    return outcomes


def phases(outcomes: Sequence[Outcome]) -> Counter[str]:
    """In which call of the workers the kills were, as far as the controller lived to say it."""
    found: Counter[str] = Counter()
    for record in (record for outcome in outcomes for record in outcome.records if record["event"] == "failed"):
        match = re.search(r"while it ran (\w+)|died (between calls)", record["error"])
        found[(match[1] or match[2]) if match else "controller lost"] += 1
    return found


def table(outcomes: Sequence[Outcome], backend: str) -> str:
    """The result as Markdown; the first outcome is the unkilled run's."""
    unkilled, killed_runs = outcomes[0], outcomes[1:]
    killed = Counter(kind for outcome in killed_runs for kind in outcome.kills)
    resumed = [record for outcome in killed_runs for record in outcome.records if record["event"] == "resumed"]
    where = ", ".join(f"{name} {count}" for name, count in phases(killed_runs).most_common())
    longer = sum(outcome.seconds - unkilled.seconds for outcome in killed_runs)
    rows = [
        ("backend", backend),
        ("kills", f"{sum(killed.values())} ({', '.join(f'{kind} {killed[kind]}' for kind in TARGETS)})"),
        ("restarts, by the call that was hit", where),
        ("runs, all ended with 0", str(len(killed_runs))),
        ("weights, and samples of every step, equal to the unkilled run's", "all"),
        *((name, _spread(record[key] for record in resumed)) for name, key in LOST),
        ("all time lost, beside what the runs took longer", f"{_total(resumed):.0f} s of {longer:.0f} s"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.median(found):.1f} / {max(found):.1f} s" if found else "-"


def _total(resumed: Sequence[dict]) -> float:
    return sum(record["seconds_lost"] for record in resumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--per-run", type=int, default=10, help="kills a run")
    parser.add_argument("--memory-copies", type=int, default=-1, help="trainer.memory_copy_freq of the killed runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshrl-chaos-") as folder:
        how = {"per_run": arguments.per_run, "copies": arguments.memory_copies}
        outcomes = chaos(Path(folder), arguments.kills, arguments.seed, arguments.backend, arguments.steps, **how)
    Console().print(table(outcomes, arguments.backend), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
