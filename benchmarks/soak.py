"""A day's run compressed: many steps of a micro model with saves, validations and rollouts that are replaced.

    python benchmarks/soak.py --steps 2000 [--kill-every 200]

Prints the memory of every process after a warm-up (the first tenth of the run) and at its end, and what is left when it
is over: processes, open files, shared memory, temporary files. Where the system allows it (`unshare`), the run has a
/dev/shm of its own, so that what is found there is the run's; elsewhere files of other programs may be counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos import MARK, ROOT, command, processes
from rich.console import Console

from meshrl.models.tiny import make_tiny_model
from meshrl.trainer.demo import ALPHABET, write_data

# Each kind's memory may grow by this share between a tenth of the run and its end.
ALLOWED = 0.05
# Seconds that shared memory which is not ours has to go away again.
GRACE = 120.0
OWN_MEMORY = "MESHRL_SOAK_OWN_MEMORY"


def memory_of(pid: int) -> float:
    """Private memory in MB, which others do not share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    wanted = ("Private_Clean:", "Private_Dirty:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(wanted)) / 1024


def files_of(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def with_memory_of_its_own() -> None:
    """Begins this program again where /dev/shm is empty and nobody else's."""
    tool = shutil.which("unshare")
    if tool is None or os.environ.get(OWN_MEMORY):
        return
    words = [tool, "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    mount = "mount -t tmpfs own /dev/shm"
    if subprocess.run([*words, mount], capture_output=True, timeout=60).returncode == 0:
        environment = {**os.environ, OWN_MEMORY: "1"}
        program = [sys.executable, *sys.argv]
        os.execve(tool, [*words, f'{mount} && exec "$@"', "sh", *program], environment)


def left_behind() -> set[str]:
    """Shared memory that is there; the run's temporary files have a folder of their own."""
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def used_by_others(path: str) -> bool:
    """Whether a living process has it open or mapped: then it is not what a run that is over has left."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if path in (entry / "maps").read_text() or any(
                os.readlink(file).startswith(path) for file in (entry / "fd").iterdir()
            ):
                return True
        except OSError:
            continue
    return False


def steps_of(out: Path) -> int:
    try:
        with open(out / "metrics.jsonl", "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 8192))
            return int(json.loads(stream.read().splitlines()[-1])["step"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def soak(folder: Path, steps: int, kill_every: int) -> dict[str, list[tuple[int, float, int]]]:
    """Runs it; for every kind of process (step, MB, open files), the largest of the kind, over the run."""
    make_tiny_model(folder / "assets" / "model", ALPHABET)
    write_data(folder / "assets", seed=0)
    out = folder / "run"
    out.mkdir()
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    words = command(folder, out, "local", steps, 1000, recipe="demo_grpo")
    words = [word for word in words if "rollout_data_dir" not in word]
    changed = ("save_freq", "test_freq")
    words = [word for word in words if not word.startswith(tuple(f"trainer.{name}=" for name in changed))]
    words += [f"trainer.save_freq={max(1, steps // 20)}", f"trainer.test_freq={max(1, steps // 10)}"]
    words.append("actor_rollout_ref.rollout.n=2")
    seen: dict[str, list[tuple[int, float, int]]] = {}
    killed_at = 0
    with open(out / "output.txt", "wb") as output:
        parent = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while parent.poll() is None:
            time.sleep(1.0)
            step, alive = steps_of(out), processes(mark, out)
            for kind, pids in alive.items():
                # The nursery's pages are its children's too: what is its own depends on who lives.
                if pids and step and kind != "other":
                    seen.setdefault(kind, []).append((step, max(map(memory_of, pids)), max(map(files_of, pids))))
            if kill_every and step >= killed_at + kill_every and alive["rollout"]:
                killed_at = step
                os.kill(alive["rollout"][0], signal.SIGKILL)
    if parent.returncode != 0:
        raise RuntimeError((out / "output.txt").read_text()[-3000:])
    until = time.monotonic() + 20
    while any(processes(mark, out).values()) and time.monotonic() < until:
        time.sleep(0.5)
    if any(left := list(processes(mark, out).values())):
        raise RuntimeError(f"processes are left: {left}")
    if files := list((folder / "tmp").iterdir()):
        raise RuntimeError(f"temporary files are left: {files}")
    return seen


def table(seen: dict[str, list[tuple[int, float, int]]], steps: int) -> tuple[str, bool]:
    """Early and late medians of every kind; whether all are flat."""
    rows, flat = (
        ["| process | MB early | MB late | growth | files early | files late |", "|---|---:|---:|---:|---:|---:|"],
        True,
    )
    for kind, points in seen.items():
        early = [point for point in points if 0.1 * steps <= point[0] < 0.3 * steps]
        late = [point for point in points if point[0] >= 0.8 * steps]
        if not early or not late:
            continue
        a, b = (statistics.median(point[1] for point in part) for part in (early, late))
        files = [statistics.median(point[2] for point in part) for part in (early, late)]
        growth = b / max(a, 1e-9) - 1
        flat &= growth <= ALLOWED
        rows.append(f"| {kind} | {a:.0f} | {b:.0f} | {growth:+.1%} | {files[0]:.0f} | {files[1]:.0f} |")
    return "\n".join(rows), flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kill-every", type=int, default=0, help="kill a rollout every so many steps")
    arguments = parser.parse_args()
    with_memory_of_its_own()
    before = left_behind()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        seen = soak(Path(folder), arguments.steps, arguments.kill_every)
    text, flat = table(seen, arguments.steps)
    until = time.monotonic() + GRACE
    # Others on this machine come and go; what this run has left stays.
    while (
        left := sorted(path for path in left_behind() - before if not used_by_others(path))
    ) and time.monotonic() < until:
        time.sleep(5.0)
    Console().print(text, markup=False, soft_wrap=True)
    where = "in a /dev/shm of its own" if os.environ.get(OWN_MEMORY) else "in a /dev/shm that others use too"
    took = f"{arguments.steps} steps in {time.monotonic() - began:.0f} s"
    Console().print(f"{took}; left behind: {left or 'nothing'} ({where})", soft_wrap=True)
    sys.exit(0 if flat and not left else 1)


if __name__ == "__main__":
    main()
