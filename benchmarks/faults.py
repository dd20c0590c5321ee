"""Faults aimed at moments: each file of a checkpoint, each part of a weight sync, a run that goes on, each role.

    python benchmarks/faults.py [--kinds files resume-disk resume-memory sync roles] [--every 1] [--seed 0]

An undisturbed run of each kind writes down all its events (`phase_probe/aims.py`). Then processes die at them, by
SIGKILL, by the kernel's out-of-memory killer (where a memory cgroup can be made) or because the disk is full or memory
is used up. A chain of attempts at one run, each given by the same command, meets one fault after the other: an attempt
goes on by itself or ends with an exit code and a message that names who died and what to do, and the next one goes on.
At the end: the weights of the undisturbed run to the bit, every step once in metrics.jsonl, no process, nothing in
/dev/shm.

Attempts are forked from one process that has imported everything (`serve`), so that a fault costs a second or two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROBE = ROOT / "benchmarks" / "phase_probe"
MARK = "MESHRL_FAULTS"
# Seconds within which all processes of an attempt are gone, and an attempt is over.
END_SECONDS, ATTEMPT_SECONDS = 20.0, 240.0
SINGLE = "model.safetensors"
ACTIONS = ("kill", "full disk", "no memory", "oom kill")
# What the end of an attempt must say, by what happened.
SAYS = {
    "full disk": ("File too large", "could not be written"),
    "no memory": ("memory ran out in", "died"),
    "oom kill": ("SIGKILL",),
    "kill": ("SIGKILL",),
}


@dataclass(frozen=True)
class Aim:
    """What is done to whom, at which event, the how-manieth time it comes to it, and how many seconds later."""

    who: str
    event: str
    number: int = 1
    action: str = "kill"
    delay: float = 0.0


@dataclass
class Attempt:
    """One start of the command: its end, what it has said, and the aims it came to."""

    code: int
    said: str
    hit: list[Aim]
    seconds: float


@dataclass
class Kind:
    """A form of run, and the processes and events that are aimed at."""

    name: str
    overrides: Sequence[str]
    whom: Sequence[str]
    events: Sequence[str]
    restarts: int = 0
    actions: Sequence[str] = ("kill",)
    # The update before which a kill opens each chain: the attempts that meet the faults go on from there.
    opener: int = 0

    def opening(self) -> list[Aim]:
        return [Aim("controller", "phase update_actor", self.opener)] if self.opener else []


COMMON = (
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.total_training_steps=6",
    "trainer.save_freq=2",
    "trainer.memory_copy_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "reward.name=null",
    f"reward.functions.own={{weight: 0.5, name: compute_score, path: {Path(__file__).resolve()}}}",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)
APART = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
)
ROLES = (
    *APART,
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "critic.nnodes=1",
    "critic.n_gpus_per_node=1",
    "actor_rollout_ref.ref.nnodes=1",
    "actor_rollout_ref.ref.n_gpus_per_node=1",
    "reward_manager.name=prime",
    "reward_manager.num_processes=1",
    "reward.functions.judge={weight: 0.5, kwargs: {template: '{solution_str}>', pattern: '^([0-9])', high: 9}}",
    "reward.judge.nnodes=1",
    "reward.judge.n_gpus_per_node=1",
    "reward.judge.max_tokens=2",
    "reward.on_error=zero",
)
FILES = ("open-w", "open-r", "rename", "mkdir", "remove", "rmtree")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("files", (), ("controller",), FILES, actions=ACTIONS[:2]),
        # The newest state is a checkpoint after step 2, or a copy in memory after step 3.
        Kind("resume-disk", (), ("controller",), FILES, actions=ACTIONS[:2], opener=3),
        Kind("resume-memory", (), ("controller",), FILES, actions=ACTIONS[:2], opener=4),
        Kind("sync", APART, ("actor_rollout_ref", "rollout"), ("send", "receive", "begin sync", "end of sync"), 40),
        Kind("roles", ROLES, (), ("call", "phase", "sample"), 40, ("oom kill", "no memory")),
    )
}
# Where each role is hit in a run of `ROLES`, in the order of a step.
AT_WORK = {
    "rollout": "call begin_sequences",
    "reward": "sample",
    "judge": "call reply",
    "ref": "call compute_ref_log_prob",
    "critic": "call update_critic",
    "actor_rollout_ref": "call update_actor",
    "controller": "phase save_checkpoint",
}


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """A reward that tells the answers of an untrained model apart, so that every step moves the weights."""
    return sum(map(ord, solution_str)) % 7 / 7


class Server:
    """The process that attempts are forked from."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROBE}:{ROOT}"}
        environment.pop("MESHRL_AIMS", None)
        words = [sys.executable, "-c", "import runpy, sys; sys.argv[1:] = ['--serve']; runpy.run_path("
                 f"{str(Path(__file__))!r}, run_name='__main__')"]  # fmt: skip
        self.process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, order: dict[str, Any]) -> int:
        """Forks an attempt; its process id."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return int(self._line()["pid"])

    def end(self) -> int:
        """The exit code of the attempt, as `subprocess` has it."""
        return int(self._line()["code"])

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class ForkedNursery:
    """The nursery of an attempt, in the place of the process that would have to import everything again."""

    def __init__(self, words: Sequence[str], pass_fds: Sequence[int], **options: Any):
        self.pid = os.fork()
        if self.pid == 0:
            import aims

            from meshrl.controller import forkserver

            with contextlib.suppress(BaseException):
                (control,) = pass_fds
                os.closerange(3, control)
                os.closerange(control + 1, 4096)
                aims.arm("forkserver")
                forkserver.serve(control)
            os._exit(1)

    def wait(self, timeout: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def serve() -> None:
    """Reads orders, forks a process for each that runs the command line, and tells how it ended."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import meshrl.trainer.launch
    import meshrl.workers.generation  # noqa: F401
    from meshrl.cli import main

    telling = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setsid()
            os.environ.update(order["environment"])
            # Not a file: what is said must also get through where the disk is full.
            written = open(order["output"], "ab")  # noqa: SIM115
            marked = {MARK: order["environment"][MARK]}  # who waits for the attempt's end waits for its last words
            output = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=written, stderr=written, env=marked)
            assert output.stdin is not None
            for number in (1, 2):
                os.dup2(output.stdin.fileno(), number)
            sys.orig_argv = [sys.executable, "-m", "meshrl.cli", *order["words"]]
            import aims

            from meshrl.controller import forkserver

            aims.arm("controller")
            forkserver.subprocess = SimpleNamespace(Popen=ForkedNursery, DEVNULL=subprocess.DEVNULL)
            code = 1
            try:
                code = main(order["words"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        telling.write(json.dumps({"pid": pid}) + "\n")
        _, status = os.waitpid(pid, 0)
        telling.write(json.dumps({"code": os.waitstatus_to_exitcode(status)}) + "\n")


@dataclass
class Bench:
    """The server, the data, and the undisturbed runs by kind."""

    folder: Path
    model: Path
    files: dict[str, str]
    cgroup: str | None = None
    server: Server = field(default_factory=Server)
    whole: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)

    def words(self, kind: Kind, out: Path) -> list[str]:
        judge = [f"reward.judge.path={self.model}"] if kind.name == "roles" else []
        return [
            "train",
            "demo_grpo",
            f"data.train_files=[{self.files['prompts']}]",
            f"data.val_files=[{self.files['held_out']}]",
            f"actor_rollout_ref.model.path={self.model}",
            f"trainer.default_local_dir={out}",
            f"trainer.max_restarts={kind.restarts}",
            *(["trainer.restart_wait=0"] if kind.restarts else []),
            *COMMON,
            *kind.overrides,
            *judge,
        ]

    def attempt(self, kind: Kind, out: Path, plan: Sequence[Aim], record: bool = False) -> Attempt:
        """Gives the command once; raises if it does not end, or leaves processes."""
        notes = out.with_name(out.name + "-notes")
        notes.mkdir(parents=True, exist_ok=True)
        before = hits(notes)
        aims = [asdict(aim) for aim in plan]
        content = {"out": str(out), "aims": aims, "record": record, "cgroup": self.cgroup}
        (notes / "plan.json").write_text(json.dumps(content))
        mark, output = f"{os.getpid()}-{out.name}", notes / f"output-{time.monotonic_ns()}.txt"
        environment = {MARK: mark, "MESHRL_AIMS": str(notes), "MESHRL_TRACEBACK": "0"}
        began = time.monotonic()
        pid = self.server.start({"words": self.words(kind, out), "environment": environment, "output": str(output)})
        timer = threading.Timer(ATTEMPT_SECONDS, os.kill, (pid, signal.SIGABRT))
        timer.start()
        code = self.server.end()
        timer.cancel()
        if code == -signal.SIGABRT:
            raise TimeoutError(f"the attempt has not ended after {ATTEMPT_SECONDS} s: {output.read_text()[-3000:]}")
        left = wait_until_gone(mark)
        if left:
            raise RuntimeError(f"processes are left after {hits(notes)}: {left}")
        hit = [plan[number] for number in sorted(hits(notes) - before)]
        return Attempt(code, output.read_text(errors="replace"), hit, time.monotonic() - began)

    def events(self, kind: Kind) -> list[tuple[str, str, int]]:
        """(who, event, which time) of an undisturbed run, in order, or of one that goes on until its first phase."""
        if kind.name not in self.whole:
            out = self.folder / f"{kind.name}-whole"
            found = self._recorded(kind, out, [])
            self._check_moved(out)
            if opening := kind.opening():
                found = self._recorded(kind, self.folder / f"{kind.name}-goes-on", opening)
                found = found[: next(at for at, (_, event, _) in enumerate(found) if event.startswith("phase"))]
            self.whole[kind.name] = list(dict.fromkeys(found))
        return self.whole[kind.name]

    def _recorded(self, kind: Kind, out: Path, plan: Sequence[Aim]) -> list[tuple[str, str, int]]:
        """The events of the last attempt at a run, which meets no fault."""
        written = out.with_name(out.name + "-notes") / "events.jsonl"
        for code in [-signal.SIGKILL] * len(plan) + [0]:
            written.unlink(missing_ok=True)
            found = self.attempt(kind, out, plan, record=True)
            assert found.code == code, found.said[-3000:]
        return [(who, event, number) for who, event, number in map(json.loads, written.read_text().splitlines())]

    def _check_moved(self, out: Path) -> None:
        """The control: two steps fewer are other weights, so that what is compared can differ."""
        from safetensors.torch import load_file

        from meshrl.engines.state_reader import Stored

        stored, final = Stored(out / "checkpoints" / "global_step_4" / "actor"), load_file(out / "model" / SINGLE)
        assert any(not stored.whole(name).equal(final[name]) for name in stored.names() if name in final)

    def chain(self, kind: Kind, name: str, plan: Sequence[Aim]) -> tuple[list[Attempt], list[Aim]]:
        """Attempts at one run until it is whole; they, and the aims that none of them came to."""
        self.events(kind)
        aims, plan = plan, [*kind.opening(), *plan]
        out, attempts = self.folder / name, list[Attempt]()
        while not attempts or attempts[-1].code != 0:
            if len(attempts) > len(plan):
                raise RuntimeError(f"{out}: {len(attempts)} attempts for {len(plan)} faults:\n{attempts[-1].said}")
            attempts.append(self.attempt(kind, out, plan))
            check_end(attempts[-1])
        if problems := self.problems(kind, out):
            raise RuntimeError(f"{out}, after {plan}: {problems}")
        hit = [aim for attempt in attempts for aim in attempt.hit]
        return attempts, [aim for aim in aims if aim not in hit]

    def problems(self, kind: Kind, out: Path) -> list[str]:
        """In what a run that was disturbed differs from the one that was not, and what it has left."""
        from safetensors.torch import load_file

        whole = self.folder / f"{kind.name}-whole"
        ours, theirs = (load_file(path / "model" / SINGLE) for path in (out, whole))
        problems = [f"weight {name} differs" for name in theirs if not ours[name].equal(theirs[name])]
        steps = [[json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
                 for path in (out, whole)]  # fmt: skip
        if steps[0] != steps[1]:
            problems.append(f"metrics.jsonl has steps {steps[0]}, not {steps[1]}")
        named = out.with_name(out.name + "-notes") / "memory.txt"
        made = set(named.read_text().splitlines()) if named.exists() else set()
        problems += [f"{path} is left" for path in sorted(made) if os.path.exists(path)]
        problems += [f"{path} is left" for path in out.rglob("*.part*") if "superseded" not in path.name]
        return problems


def hits(notes: Path) -> set[int]:
    """The numbers of the aims that have happened."""
    return {int(file.name.removeprefix("hit-")) for file in notes.glob("hit-*")}


def wait_until_gone(mark: str) -> list[str]:
    """The command lines of the processes of an attempt that are left; the keeper of copies in memory may wait."""
    until = time.monotonic() + END_SECONDS
    while (left := living(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def living(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if words and not is_zombie and "shm_cleaner" not in words:
                    found.append(f"{entry.name} {words[:200]}")
    return found


def check_end(attempt: Attempt) -> None:
    """An attempt that a fault has ended says so: who died, or what was missing, without a traceback of ours."""
    if attempt.code in (0, -signal.SIGKILL):
        return
    if not attempt.hit or attempt.code not in (1, 2, 75):
        raise RuntimeError(f"an attempt that met {attempt.hit} ended with {attempt.code}:\n{attempt.said[-5000:]}")
    told = attempt.said.rpartition("the run failed")[2] or attempt.said
    # Of several that were met, one has ended the attempt; which one, what is said tells.
    if not any(tells_of(aim, told) for aim in attempt.hit):
        raise RuntimeError(f"nothing tells of {attempt.hit}:\n{attempt.said[-5000:]}")


def tells_of(aim: Aim, told: str) -> bool:
    """Whether the end of what was said has what happened and, if it was a rank's, whose; a full disk has its file."""
    role = aim.who.partition(":")[0]
    names = aim.action != "full disk" or re.search(r"(File too large|be written)[^\n]*/\w", told)
    return (
        any(word in told for word in SAYS[aim.action])
        and bool(names)
        and (role in ("controller", "reward") or role in told)
    )


def all_aims(bench: Bench, kind: Kind, rng: random.Random, every: int = 1) -> list[Aim]:
    """One aim for every event that the undisturbed run came to, in its order, or for each `every`-th of them."""
    if kind.name == "roles":
        # Without a cgroup what the kernel would do.
        actions = ["kill" if action == "oom kill" and not bench.cgroup else action for action in kind.actions]
        return [Aim(who, event, 1, action) for action in actions for who, event in AT_WORK.items()]
    chosen = [(who, event, number) for who, event, number in bench.events(kind)
              if who.partition(":")[0] in kind.whom and event.startswith(tuple(kind.events))]  # fmt: skip
    # A file's name comes again with every step: its first two times say all there is.
    few = [aim for aim in chosen if aim[2] <= 2 or kind.events != FILES]
    offset = rng.randrange(every)
    return [
        Aim(who, event, number, rng.choice(list(kind.actions)), rng.choice((0.0, 0.0, 0.001, 0.005)))
        for who, event, number in few[offset::every]
    ]


def sweep(bench: Bench, kind: Kind, aims: Sequence[Aim], per_chain: int) -> Iterator[tuple[list[Attempt], list[Aim]]]:
    """Chains until every aim was met; one that a chain waited for in vain is left out."""
    left, number = list(aims), 0
    while left:
        plan, number = left[:per_chain], number + 1
        attempts, missed = bench.chain(kind, f"{kind.name}-{number}", plan)
        yield attempts, missed
        left = (missed[1:] if len(missed) == len(plan) else missed) + left[per_chain:]


@contextlib.contextmanager
def memory_cgroup(megabytes: int = 1) -> Iterator[str | None]:
    """A memory cgroup that is too small for anything; None where none can be made."""
    name = f"meshrl-faults-{os.getpid()}"
    for parent, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        folder = Path("/sys/fs/cgroup") / parent / name
        try:
            folder.mkdir()
            (folder / limit).write_text(str(megabytes << 20))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield str(folder)
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return
    yield None


def table(kind: Kind, aims: Sequence[Aim], chains: Sequence[Sequence[Attempt]]) -> str:
    """The faults of a kind as Markdown, by what was done to whom."""
    attempts = [attempt for found in chains for attempt in found]
    hit = {aim for attempt in attempts for aim in attempt.hit} & set(aims)
    met = Counter((aim.who.partition(":")[0], aim.action) for aim in hit)
    rows = [f"| {kind.name} | {who} | {action} | {count} |" for (who, action), count in sorted(met.items())]
    ends = dict(Counter(attempt.code for attempt in attempts))
    text = (
        f"{len(hit)} of {len(aims)} faults met by {len(chains)} runs, {len(attempts)} attempts that ended with {ends}"
    )
    return "\n".join([*rows, f"{text}, in {sum(attempt.seconds for attempt in attempts):.0f} s; all weights equal"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth moment only")
    parser.add_argument("--per-chain", type=int, default=8, help="faults a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the runs' folders stay; otherwise they are deleted")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    from rich.console import Console

    from meshrl.models.tiny import make_tiny_model
    from meshrl.trainer.demo import ALPHABET, write_data

    say = Console(soft_wrap=True).print
    with contextlib.ExitStack() as stack:
        folder = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshrl-faults-")))
        shutil.rmtree(folder / "assets", ignore_errors=True)
        make_tiny_model(folder / "assets" / "model", ALPHABET)
        files = write_data(folder / "assets", seed=0)
        bench = Bench(folder, folder / "assets" / "model", files, stack.enter_context(memory_cgroup()))
        stack.callback(bench.server.close)
        for name in arguments.kinds:
            kind, rng = KINDS[name], random.Random(arguments.seed)
            aims = all_aims(bench, kind, rng, arguments.every)
            say(f"{name}: {len(aims)} faults", markup=False)
            chains = []
            for attempts, missed in sweep(bench, kind, aims, arguments.per_chain):
                chains.append(attempts)
                say(f"  {' '.join(f'{a.code}:{len(a.hit)}' for a in attempts)}, {len(missed)} missed", markup=False)
            say(table(kind, aims, chains), markup=False)


if __name__ == "__main__":
    main()
