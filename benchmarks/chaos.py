"""kill -9 in every phase: supervised runs must end as the unkilled run does.

    python benchmarks/chaos.py --kills 50 [--backend ray] [--seed 0]

A run has a controller, two trainer ranks (policy, reference and critic), two rollout ranks with processes of their own
and two reward processes. A killer takes all pairs of who and phase in a seeded order, again and again, until there were
so many kills: it waits for a phase of the next few pairs, lets a seeded part of it go by, stops the controller
(SIGSTOP), looks that the phase is still the same, kills -9 a process of that kind, and lets the controller go on. Then:
exit code 0, weights equal to the bit, every step once in metrics.jsonl, the same samples trained at every step, no
process left.

Time lost, as the runs' own `restarts.jsonl` has it: the wall time of work that is done again (from when the state was
kept to the failure) and that of the restart (from the failure to when work goes on). Its sum is printed beside what the
killed runs took longer than the unkilled one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.demo import ALPHABET, write_data

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("controller", "trainer", "rollout", "reward")
# As the controller names them; "start": before the first step of an attempt, "between": outside of all phases.
PHASES = (
    "start", "gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor", "sync",
    "save_checkpoint", "testing", "between",
)  # fmt: skip
MARK = "MESHRL_CHAOS"
PROBE = Path(__file__).parent / "phase_probe"
# So many pairs of who and phase are waited for at once: some phases are rare, and a start comes once an attempt.
WINDOW = 8
Aim = tuple[str, str]
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
    kills: list[Aim] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)


# A run that has every phase.
ALL_PHASES = (
    "trainer.critic_warmup=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "algorithm.rollout_correction.bypass_mode=false",
)


def command(
    folder: Path, out: Path, backend: str, steps: int, restarts: int, copies: int = -1, recipe: str = "demo_ppo"
) -> list[str]:
    words = [
        recipe,
        f"data.train_files=[{folder / 'assets' / 'prompts.jsonl'}]",
        f"data.val_files=[{folder / 'assets' / 'held_out.jsonl'}]",
        f"actor_rollout_ref.model.path={folder / 'assets' / 'model'}",
        f"trainer.default_local_dir={out}",
        f"trainer.rollout_data_dir={out / 'samples'}",
        f"trainer.total_training_steps={steps}",
        f"trainer.max_restarts={restarts}",
        f"trainer.backend={backend}",
        *(["trainer.restart_wait=0"] if restarts else []),
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.save_freq=4",
        "trainer.max_ckpt_to_keep=2",
        "trainer.test_freq=4",
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
    if recipe == "demo_ppo":
        words += ALL_PHASES
    if backend == "ray":
        words += ["ray_init.num_cpus=4", "ray_init.object_store_memory=100000000"]
    if copies > 0:
        words.append(f"trainer.memory_copy_freq={copies}")
    return [sys.executable, "-m", "meshrl.cli", "train", "--supervise", *words]


def ranks_of(out: Path) -> dict[str, list[int]]:
    """The newest process ids of the trainers and the rollouts, as the run's log has them."""
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for role, numbers in re.findall(r"workers of '([\w+]+)': pids \[([\d, ]+)\]", (out / "log.txt").read_text()):
            found[role] = [int(number) for number in numbers.split(",")]
    trainers = next((pids for role, pids in found.items() if role.startswith("actor_rollout_ref")), [])
    return {"trainer": trainers, "rollout": found.get("rollout", [])}


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
        if "meshrl.rewards.pool_worker" in words:
            found["reward"].append(pid)
        elif role is not None and ("meshrl.controller.forkserver" in words or words.startswith("ray::RayWorker")):
            found[role].append(pid)
        elif "meshrl.cli train" in words:
            found["supervisor" if "--supervise" in words else "controller"].append(pid)
        else:
            found["other"].append(pid)
    return found


@dataclass(frozen=True)
class Seen:
    """Where the controller is: `number` grows with every change of its phase."""

    pid: int
    number: int
    phase: str


def look(file: Path) -> Seen | None:
    """What the probe in the controller has written last."""
    try:
        pid, number, phase = file.read_text().split()
        return Seen(int(pid), int(number), phase)
    except (OSError, ValueError):
        return None


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def aims(rng: random.Random, phases: Sequence[str] = PHASES) -> Iterator[Aim]:
    """All pairs of who and phase in a random order, and again in another."""
    while True:
        pairs = list(itertools.product(TARGETS, phases))
        rng.shuffle(pairs)
        yield from pairs


class Killer:
    """Kills one process of a run after the other, each in a phase of the controller that was chosen before."""

    def __init__(self, out: Path, mark: str, plan: Iterator[Aim], limit: int, rng: random.Random):
        self.out, self.mark, self.limit, self.rng = out, mark, limit, rng
        self.plan, self.aims = plan, list(itertools.islice(plan, WINDOW)) if limit else []
        self.file, self.done = out / "phase.txt", list[Aim]()
        self._rest_until = self._since = 0.0
        self._seen: Seen | None = None
        self._tried: Seen | None = None
        self._lengths: dict[str, deque[float]] = {}
        self._part = rng.random()

    def strike(self) -> None:
        """Looks where the run is, and kills if it is where somebody was waited for."""
        now, seen = time.monotonic(), look(self.file)
        if seen is None or len(self.done) >= self.limit:
            return
        if seen != self._seen:
            if self._seen is not None and seen.pid == self._seen.pid and seen.number == self._seen.number + 1:
                self._lengths.setdefault(self._seen.phase, deque(maxlen=20)).append(now - self._since)
            self._seen, self._since = seen, now
        if now < self._rest_until or seen == self._tried or now - self._since < self._part * self._usual(seen.phase):
            return
        wanted = [aim for aim in self.aims if aim[1] == seen.phase]
        aim = next((aim for aim in wanted if self._kill(seen, aim)), None)
        if aim is not None:
            self.aims.remove(aim)
            self.aims.append(next(self.plan))
            self._rest_until, self._part = time.monotonic() + self.rng.uniform(0.1, 2.0), self.rng.random()
        elif seen.phase == "start":
            self._rest_until = now + 0.2  # who was waited for may not be there yet
        else:
            self._tried = seen

    def _usual(self, phase: str) -> float:
        found = self._lengths.get(phase)
        return statistics.median(found) if found else 0.0

    def _kill(self, seen: Seen, aim: Aim) -> bool:
        alive = processes(self.mark, self.out)
        if seen.pid not in alive["controller"]:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGSTOP)
            try:
                until = time.monotonic() + 1.0
                while not is_stopped(seen.pid) and time.monotonic() < until:
                    time.sleep(0.0005)
                targets = [pid for pid in alive[aim[0]] if Path(f"/proc/{pid}").exists()]
                if look(self.file) != seen or not targets:
                    return False
                os.kill(self.rng.choice(targets), signal.SIGKILL)
                self.done.append(aim)
                return True
            finally:
                os.kill(seen.pid, signal.SIGCONT)
        return self.done[-1:] == [aim]  # the controller was the target, and is gone


def run(
    words: Sequence[str], out: Path, kills: int, plan: Iterator[Aim], rng: random.Random, limit: float
) -> tuple[Outcome, list[Aim]]:
    """One run; up to `kills` processes of it are killed. Also: the aims that it has not come to."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROBE}:{ROOT}"}
    environment["MESHRL_PHASE_FILE"] = str(out / "phase.txt")
    out.mkdir(parents=True)
    began, killer = time.monotonic(), Killer(out, mark, plan, kills, rng)
    with open(out / "output.txt", "wb") as output:
        parent = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while parent.poll() is None:
            time.sleep(0.002 if len(killer.done) < kills else 0.1)
            if time.monotonic() - began > limit:
                parent.kill()
                raise TimeoutError(f"the run has not ended after {limit} s, see {out}")
            killer.strike()
    until = time.monotonic() + 20
    while any(left := list(processes(mark, out).values())) and time.monotonic() < until:
        time.sleep(0.2)
    if any(left):
        raise RuntimeError(f"processes are left: {left}")
    file = out / "restarts.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Outcome(parent.returncode, time.monotonic() - began, killer.done, records), killer.aims


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


def prepare(folder: Path) -> None:
    """Writes the model and the data of the runs."""
    make_tiny_model(folder / "assets" / "model", ALPHABET)
    write_data(folder / "assets", seed=0)


def chaos(
    folder: Path,
    kills: int,
    seed: int,
    backend: str = "local",
    steps: int = 60,
    per_run: int = 10,
    limit: float = 1500.0,
    copies: int = -1,
    phases: Sequence[str] = PHASES,
    unkilled: Outcome | None = None,
) -> list[Outcome]:
    """Runs until so many processes were killed; raises if a run does not end as the unkilled one did.

    The first outcome is the unkilled run's; whoever passes it has prepared the folder and left the run in its `whole`.
    """
    rng, whole = random.Random(seed), folder / "whole"
    plan = aims(rng, phases)
    if unkilled is None:
        prepare(folder)
        unkilled, _ = run(command(folder, whole, backend, steps, 1), whole, 0, plan, rng, limit)
        assert unkilled.code == 0, (whole / "output.txt").read_text()[-3000:]
    outcomes = [unkilled]
    while (left := kills - sum(len(outcome.kills) for outcome in outcomes)) > 0:
        out = folder / f"run{len(outcomes)}"
        words = command(folder, out, backend, steps, 4 * per_run, copies)
        outcome, missed = run(words, out, min(left, per_run), plan, rng, limit)
        plan = itertools.chain(missed, plan)
        if outcome.code != 0:
            raise RuntimeError(f"{out} ended with {outcome.code}:\n" + (out / "output.txt").read_text()[-3000:])
        if problems := differences(out, whole, steps):
            raise RuntimeError(f"{out}: {problems}")
        outcomes.append(outcome)
        killed = " ".join("/".join(aim) for aim in outcome.kills)
        say = Console(stderr=True, soft_wrap=True).print
        say(f"{out.name}: {outcome.seconds:.0f} s, killed {killed}")
        say(table(outcomes, backend), markup=False)
    return outcomes


def calls(outcomes: Sequence[Outcome]) -> Counter[str]:
    """In which call of the workers the kills were, as far as the controller lived to say it."""
    found: Counter[str] = Counter()
    for record in (record for outcome in outcomes for record in outcome.records if record["event"] == "failed"):
        match = re.search(r"while it ran ([\w/]+)|died (between calls)|([\w/]+) failed on rank", record["error"])
        found[next(filter(None, match.groups())).rpartition("/")[2] if match else "controller lost"] += 1
    return found


def table(outcomes: Sequence[Outcome], backend: str) -> str:
    """The result as Markdown; the first outcome is the unkilled run's."""
    unkilled, killed_runs = outcomes[0], outcomes[1:]
    killed = Counter(aim for outcome in killed_runs for aim in outcome.kills)
    resumed = [record for outcome in killed_runs for record in outcome.records if record["event"] == "resumed"]
    where = ", ".join(f"{name} {count}" for name, count in calls(killed_runs).most_common())
    longer = sum(outcome.seconds - unkilled.seconds for outcome in killed_runs)
    rows = [
        ("backend", backend),
        ("kills", str(sum(killed.values()))),
        ("restarts, by the call that was hit", where),
        ("runs, all ended with 0", str(len(killed_runs))),
        ("weights, and samples of every step, equal to the unkilled run's", "all"),
        *((name, _spread(record[key] for record in resumed)) for name, key in LOST),
        ("all time lost, beside what the runs took longer", f"{_total(resumed):.0f} s of {longer:.0f} s"),
    ]
    text = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([*text, "", *_by_phase(killed)])


def _by_phase(killed: Counter[Aim]) -> list[str]:
    """Kills by phase and who."""
    rows = ["| killed in | " + " | ".join(TARGETS) + " | all |", "|---|" + "---:|" * (len(TARGETS) + 1)]
    for phase in (*PHASES, "all"):
        chosen = PHASES if phase == "all" else (phase,)
        counts = [sum(killed[who, name] for name in chosen) for who in TARGETS]
        rows.append(f"| {phase} | " + " | ".join(map(str, (*counts, sum(counts)))) + " |")
    return rows


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
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="kill only in these")
    parser.add_argument("--out", type=Path, help="where the runs' folders stay; otherwise they are deleted")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshrl-chaos-")))
        how = {"per_run": arguments.per_run, "copies": arguments.memory_copies, "phases": arguments.phases}
        outcomes = chaos(folder, arguments.kills, arguments.seed, arguments.backend, arguments.steps, **how)
    Console().print(table(outcomes, arguments.backend), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
