"""Links between ranks of this machine, and their clocks, by a short run of real processes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.controller.in_process import loopback_environment
from meshrl.doctor.findings import Finding, judged

SECONDS = 60
# Beyond these a step's collectives take visibly long: (warn, fail) in 10^9 bytes a second, a warning in microseconds.
BANDWIDTH = {"gloo": (0.2, 0.01), "nccl": (5.0, 0.1)}
LATENCY_US = {"gloo": 5000.0, "nccl": 500.0}
CLOCK_SECONDS = (0.05, 2.0)


class LinkRun:
    """The processes of the run, started at once so that other checks can go on meanwhile."""

    def __init__(self, ranks: int = 2, backend: str = "auto", environment: Mapping[str, str] | None = None):
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="meshrl-doctor-")
        own = {"OMP_NUM_THREADS": "1"} | loopback_environment() | dict(environment or {})
        store = Path(self._folder.name) / "store"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "meshrl.doctor.link_probe", str(rank), str(ranks), str(store), backend],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | own | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> "LinkRun":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._folder.cleanup()

    def result(self, seconds: float = SECONDS) -> dict[str, Any] | str:
        """What rank 0 measured, or a sentence that says why there is nothing."""
        deadline = time.monotonic() + seconds
        said = ""
        for rank, process in enumerate(self._processes):
            try:
                output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"rank {rank} of {self.ranks} did not end within {seconds:.0f} s"
            if process.returncode:
                last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
                return f"rank {rank} of {self.ranks} failed: {last[0]}"
            said = said or output
        return dict(json.loads(said.strip().splitlines()[-1]))


def judge_links(measured: Mapping[str, Any] | str, host: str = "local") -> list[Finding]:
    """Findings on the links and clocks that a run measured (or on why it did not)."""
    if isinstance(measured, str):
        advice = (
            "processes of this machine cannot form a group: look at firewalls, at GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME, and at shared memory above; NCCL_DEBUG=INFO says more"
        )
        return [Finding("links", "fail", measured, advice)]
    backend, pairs = measured["backend"], measured["pairs"]
    slowest = min(pairs, key=lambda pair: pair["gbs"])
    latest = max(pair["latency_us"] for pair in pairs)
    warn, fail = BANDWIDTH[backend]
    status = judged(slowest["gbs"], warn, fail)
    if status == "ok" and latest > LATENCY_US[backend]:
        status = "warn"
    advice = ""
    if status != "ok":
        advice = (
            "GPUs without peer access or NVLink: nvidia-smi topo -m; keep tensor parallelism within linked pairs"
            if backend == "nccl"
            else "the cores are busy or the loopback is slow: end other programs and look again"
        )
    found = (
        f"{len(pairs) + 1} {host} ranks over {backend}: {slowest['gbs']:.2f} GB/s (slowest pair), "
        f"latency {latest:.0f} us"
    )
    numbers = {"gbs": slowest["gbs"], "latency_us": latest}
    return [Finding("links", status, found, advice, numbers), judge_clocks(pairs, host)]


def judge_clocks(pairs: list[Mapping[str, float]], host: str = "local") -> Finding:
    """How far apart the clocks are, as far as the round trips can tell."""
    offset = max((abs(pair["clock_offset_s"]) for pair in pairs), default=0.0)
    error = max((pair["clock_error_s"] for pair in pairs), default=0.0)
    status = judged(max(0.0, offset - error), *CLOCK_SECONDS, low_is_bad=False)
    advice = (
        "" if status == "ok" else "start chrony or systemd-timesyncd on the hosts: timelines and logs are off by this"
    )
    found = f"{host} clocks agree to {offset * 1e3:.2f} ms (known to {error * 1e3:.2f} ms)"
    if status != "ok":
        found = f"{host} clocks differ by {offset:.3f} s (known to {error * 1e3:.2f} ms)"
    return Finding("clock skew", status, found, advice, {"offset_s": offset, "error_s": error})
