"""Measurements of links and clocks.

Parts: `LinkRun` measures between ranks of this machine with real processes. `check_cluster` examines a Ray cluster: its
nodes, their software, and the links and clocks between hosts.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from meshrl.config.keys import count
from meshrl.controller.in_process import loopback_environment
from meshrl.tools.doctor.machine import Finding, judged

SECONDS = 60
# Bounds beyond which a step's collectives become visibly slow.
# Bandwidth: (warn, fail) in 10^9 bytes a second. Latency: warn, in microseconds. Clocks: (warn, fail) in seconds.
LINK_BANDWIDTH = {"gloo": (0.2, 0.01), "nccl": (5.0, 0.1)}
LATENCY_US = {"gloo": 5000.0, "nccl": 500.0}
CLOCK_SECONDS = (0.05, 2.0)


class LinkRun:
    """The processes of a link measurement, started at construction so that other checks can run at the same time."""

    def __init__(self, ranks: int = 2, backend: str = "auto", environment: Mapping[str, str] | None = None):
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="meshrl-doctor-")
        own = {"OMP_NUM_THREADS": "1"} | loopback_environment() | dict(environment or {})
        store = Path(self._folder.name) / "store"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "meshrl.tools.doctor.link_probe", str(rank), str(ranks), str(store), backend],
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
        """Wait for the ranks and return rank 0's measurements, or a sentence with the reason why there are none."""
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
    """Turn the measurements of a link run, or its error text, into findings on links and clocks."""
    if isinstance(measured, str):
        advice = (
            "processes of this machine cannot form a group: look at firewalls, at GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME, and at shared memory above; NCCL_DEBUG=INFO says more"
        )
        return [Finding("links", "fail", measured, advice)]
    backend, pairs = measured["backend"], measured["pairs"]
    slowest = min(pairs, key=lambda pair: pair["gbs"])
    latest = max(pair["latency_us"] for pair in pairs)
    warn, fail = LINK_BANDWIDTH[backend]
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
    """Return a finding on the pair whose clocks differ most, less what its round-trip time leaves open."""
    known = [(abs(pair["clock_offset_s"]), pair["clock_error_s"]) for pair in pairs]
    offset, error = max(known, key=lambda pair: (pair[0] - pair[1], pair[0]), default=(0.0, 0.0))
    status = judged(max(0.0, offset - error), *CLOCK_SECONDS, low_is_bad=False)
    advice = (
        "" if status == "ok" else "start chrony or systemd-timesyncd on the hosts: timelines and logs are off by this"
    )
    found = f"{host} clocks agree to {offset * 1e3:.2f} ms (known to {error * 1e3:.2f} ms)"
    if status != "ok":
        found = f"{host} clocks differ by {offset:.3f} s (known to {error * 1e3:.2f} ms)"
    return Finding("clock skew", status, found, advice, {"offset_s": offset, "error_s": error})


# ---- Ray cluster: nodes, software, links and clocks between hosts

PINGS, BLOCKS, BLOCK_BYTES = 20, 64, 2**20
HOST_BANDWIDTH = (0.1, 0.005)
SAME_EVERYWHERE = ("torch", "ray", "meshrl")


class Witness:
    """A Ray actor that runs on one node and reports the node's software, clock and links."""

    def about(self) -> dict[str, Any]:
        """Return the node's host name, process id and software versions."""
        versions: dict[str, str] = {"python": platform.python_version()}
        for name in SAME_EVERYWHERE:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "missing"
        return {"host": socket.gethostname(), "versions": versions, "pid": os.getpid()}

    def clock(self) -> float:
        """Return the node's wall-clock time in seconds since the epoch."""
        return time.time()

    def listen(self, address: str) -> int:
        """Serve one link measurement from a background thread, and return the port."""
        server = socket.create_server((address, 0))
        server.settimeout(SECONDS)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def link_to(self, address: str, port: int) -> dict[str, float]:
        """Measure one TCP stream to a listening node: latency in microseconds, bandwidth in 10^9 bytes a second."""
        with socket.create_connection((address, port), timeout=SECONDS) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(PINGS):
                before = time.perf_counter()
                link.sendall(b"x")
                link.recv(1)
                trips.append(time.perf_counter() - before)
            block, before = bytes(BLOCK_BYTES), time.perf_counter()
            for _ in range(BLOCKS):
                link.sendall(block)
            link.recv(1)
            took = time.perf_counter() - before
        return {"latency_us": sorted(trips)[PINGS // 2] / 2 * 1e6, "gbs": BLOCKS * BLOCK_BYTES / took / 1e9}


def _serve(server: socket.socket) -> None:
    """Serve one measurement of `Witness.link_to`: echo the pings, then receive all blocks and confirm."""
    with server, server.accept()[0] as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            link.sendall(link.recv(1))
        left = BLOCKS * BLOCK_BYTES
        while left > 0 and (received := link.recv(2**20)):
            left -= len(received)
        link.sendall(b"x")


def check_cluster(address: str | None) -> list[Finding]:
    """Return findings on the Ray cluster at `address` (`auto` is allowed); without an address, an `ok` finding."""
    if not address:
        found = "no cluster asked for (--address, RAY_ADDRESS): runs use processes of this machine"
        return [Finding("ray", "ok", found)]
    try:
        import ray

        from meshrl.controller.ray import init_ray
    except ImportError:
        return [Finding("ray", "fail", "Ray is not installed", "pip install 'meshrl[ray]'")]
    was_connected = ray.is_initialized()
    try:
        init_ray(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        advice = "ray start --head on one host, ray start --address=HOST:6379 on the others; then ray status"
        return [Finding("ray", "fail", f"no cluster answers at {address}: {reason}", advice)]
    try:
        return _examine(ray.nodes())
    finally:
        if not was_connected:
            ray.shutdown()


def _examine(nodes: Sequence[dict[str, Any]]) -> list[Finding]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    living = [node for node in nodes if node["Alive"]]
    found = [_judge_nodes(nodes)]
    kind: Any = ray.remote(num_cpus=0)(Witness)
    witnesses = [
        kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in living
    ]
    try:
        about = ray.get([witness.about.remote() for witness in witnesses], timeout=SECONDS)
        found.append(judge_software(about))
        found.append(judge_clocks([_clock_of(witness) for witness in witnesses], "the nodes'"))
        addresses = [node["NodeManagerAddress"] for node in living]
        found += [judge_hosts(measure_pairs(witnesses, addresses), [seen["host"] for seen in about])]
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        found.append(Finding("ray", "fail", f"a node does not answer: {reason}", "see ray status and the node's logs"))
    finally:
        for witness in witnesses:
            ray.kill(witness)
    return found


def _judge_nodes(nodes: Sequence[dict[str, Any]]) -> Finding:
    living = [node for node in nodes if node["Alive"]]
    gpus = sum(int(node["Resources"].get("GPU", 0)) for node in living)
    cpus = sum(int(node["Resources"].get("CPU", 0)) for node in living)
    found = f"{len(living)} of {count(len(nodes), 'node')} alive, {count(cpus, 'CPU')}, {count(gpus, 'GPU')}"
    counts = {int(node["Resources"].get("GPU", 0)) for node in living}
    numbers = {"nodes": len(living), "dead": len(nodes) - len(living), "gpus": gpus}
    if len(living) < len(nodes):
        return Finding("ray", "warn", found, "ray start on the hosts that have left, if a run needs them", numbers)
    if len(counts) > 1:
        advice = "trainer.n_gpus_per_node is one number for all nodes: the smallest counts"
        return Finding("ray", "warn", f"{found}, unevenly: {sorted(counts)}", advice, numbers)
    return Finding("ray", "ok", found, numbers=numbers)


def judge_software(about: Sequence[dict[str, Any]]) -> Finding:
    """Check that all nodes run the same Python, torch, Ray and meshrl as this process."""
    own = Witness().about()["versions"]
    for seen in about:
        for name, version in own.items():
            there = seen["versions"].get(name, "missing")
            # Pickles that Ray exchanges between minor versions of Python fail. Patch levels do not matter.
            if there != version and (name != "python" or there.split(".")[:2] != version.split(".")[:2]):
                found = f"{seen['host']} has {name} {there}, this process {version}"
                return Finding("ray software", "fail", found, "install the same environment on every node")
    named = ", ".join(f"{name} {version}" for name, version in own.items())
    return Finding("ray software", "ok", f"the same on {count(len(about), 'node')}: {named}")


def _clock_of(witness: Any) -> dict[str, float]:
    """Return a node's clock offset against this process, from the quickest of ten calls."""
    import ray

    best = {"clock_offset_s": 0.0, "clock_error_s": float("inf")}
    for _ in range(10):
        wall, before = time.time(), time.perf_counter()
        theirs = ray.get(witness.clock.remote(), timeout=SECONDS)
        half = (time.perf_counter() - before) / 2
        if half < best["clock_error_s"]:
            best = {"clock_offset_s": theirs - (wall + half), "clock_error_s": half}
    return best


def measure_pairs(witnesses: Sequence[Any], addresses: Sequence[str]) -> list[dict[str, float]]:
    """Measure the links from the first node to every other node."""
    import ray

    found = []
    for witness, address in zip(witnesses[1:], addresses[1:], strict=True):
        port = ray.get(witness.listen.remote(address), timeout=SECONDS)
        found.append(ray.get(witnesses[0].link_to.remote(address, port), timeout=SECONDS))
    return found


def judge_hosts(links: Sequence[dict[str, float]], hosts: Sequence[str]) -> Finding:
    """Return a finding on the slowest link between hosts.

    The rate is of one TCP stream; NCCL uses several and gets more.
    """
    if not links:
        return Finding("hosts", "ok", f"one node ({hosts[0]}): no links between hosts")
    slowest = min(range(len(links)), key=lambda index: links[index]["gbs"])
    gbs, latency = links[slowest]["gbs"], max(link["latency_us"] for link in links)
    status = judged(gbs, *HOST_BANDWIDTH)
    advice = (
        "" if status == "ok" else "look at the network; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose an interface"
    )
    found = f"{hosts[0]} to {hosts[slowest + 1]}: {gbs:.2f} GB/s (slowest, one TCP stream), latency {latency:.0f} us"
    return Finding("hosts", status, found, advice, {"gbs": gbs, "latency_us": latency})
