"""A Ray cluster: its nodes, whether they run the same software, the links and clocks between hosts."""

import os
import platform
import socket
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from meshrl.config.names import count
from meshrl.doctor.findings import Finding, judged
from meshrl.doctor.links import judge_clocks

SECONDS = 60
PINGS, BLOCKS, BLOCK_BYTES = 20, 64, 2**20
BANDWIDTH = (0.1, 0.005)
SAME_EVERYWHERE = ("torch", "ray", "meshrl")


class Witness:
    """Runs on one node (as an actor) and says what it sees there."""

    def about(self) -> dict[str, Any]:
        """Host, versions and GPUs of the node."""
        versions: dict[str, str] = {"python": platform.python_version()}
        for name in SAME_EVERYWHERE:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "missing"
        return {"host": socket.gethostname(), "versions": versions, "pid": os.getpid()}

    def clock(self) -> float:
        """This node's time."""
        return time.time()

    def listen(self, address: str) -> int:
        """Serve one link measurement on a free port, in a thread."""
        server = socket.create_server((address, 0))
        server.settimeout(SECONDS)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def link_to(self, address: str, port: int) -> dict[str, float]:
        """Latency and bandwidth of one stream to a listening node."""
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
    """The other side of `link_to`."""
    with server, server.accept()[0] as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            link.sendall(link.recv(1))
        left = BLOCKS * BLOCK_BYTES
        while left > 0 and (received := link.recv(2**20)):
            left -= len(received)
        link.sendall(b"x")


def check_cluster(address: str | None) -> list[Finding]:
    """Findings on the cluster at `address` (Ray's `auto` included), or on none being asked for."""
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
    """Whether all nodes and this process run the same Python, torch, Ray and meshrl."""
    own = Witness().about()["versions"]
    for seen in about:
        for name, version in own.items():
            there = seen["versions"].get(name, "missing")
            # Ray pickles between minor versions of Python fail; patch levels do not matter.
            if there != version and (name != "python" or there.split(".")[:2] != version.split(".")[:2]):
                found = f"{seen['host']} has {name} {there}, this process {version}"
                return Finding("ray software", "fail", found, "install the same environment on every node")
    named = ", ".join(f"{name} {version}" for name, version in own.items())
    return Finding("ray software", "ok", f"the same on {count(len(about), 'node')}: {named}")


def _clock_of(witness: Any) -> dict[str, float]:
    """A node's clock against ours, by its quickest answer."""
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
    """The links from the first node to every other one."""
    import ray

    found = []
    for witness, address in zip(witnesses[1:], addresses[1:], strict=True):
        port = ray.get(witness.listen.remote(address), timeout=SECONDS)
        found.append(ray.get(witnesses[0].link_to.remote(address, port), timeout=SECONDS))
    return found


def judge_hosts(links: Sequence[dict[str, float]], hosts: Sequence[str]) -> Finding:
    """The slowest link between hosts; one stream of TCP, which is less than what NCCL gets from several."""
    if not links:
        return Finding("hosts", "ok", f"one node ({hosts[0]}): no links between hosts")
    slowest = min(range(len(links)), key=lambda index: links[index]["gbs"])
    gbs, latency = links[slowest]["gbs"], max(link["latency_us"] for link in links)
    status = judged(gbs, *BANDWIDTH)
    advice = (
        "" if status == "ok" else "look at the network; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose an interface"
    )
    found = f"{hosts[0]} to {hosts[slowest + 1]}: {gbs:.2f} GB/s (slowest, one TCP stream), latency {latency:.0f} us"
    return Finding("hosts", status, found, advice, {"gbs": gbs, "latency_us": latency})
