"""Measured rates of this machine's device, written as an entry of the file for `meshrl plan --hardware`."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from meshrl.files import write_whole
from meshrl.tools.doctor.machine import Finding

if TYPE_CHECKING:
    import torch

GIB = 2**30
MINIMUM_SECONDS = 0.3


@dataclass(frozen=True)
class Entry:
    """One device's rates in the units of the hardware file, with a remark on each rate that needs a caveat."""

    name: str
    numbers: Mapping[str, float]
    remarks: Mapping[str, str]

    def to_yaml(self) -> str:
        """Return the entry as YAML text: one mapping under the device's name."""
        lines = [f"{self.name}:"]
        for key, value in self.numbers.items():
            remark = f"  # {self.remarks[key]}" if key in self.remarks else ""
            lines.append(f"  {key}: {value:.4g}{remark}")
        return "\n".join([*lines, "  measured: true", ""])


def measure(findings: Iterable[Finding]) -> Entry:
    """Time this machine's device and return its entry. Link rates are taken from the doctor's findings."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_gpu = device.type == "cuda"
    name = _short_name(torch.cuda.get_device_name()) if has_gpu else "CPU"
    memory_gbs = copy_gbs(device, 2**30 if has_gpu else 2**27)
    numbers = {
        "memory_gib": (torch.cuda.mem_get_info()[1] if has_gpu else psutil.virtual_memory().total) / GIB,
        "bf16_tflops": matmul_tflops(device, "bfloat16", 8192 if has_gpu else 512),
        "fp32_tflops": matmul_tflops(device, "float32", 8192 if has_gpu else 1024),
        "memory_gbs": memory_gbs,
    }
    host_gbs = host_copy_gbs() if has_gpu else memory_gbs
    links, remarks = _links(findings, host_gbs)
    if not has_gpu:
        remarks["host_gbs"] = "the CPU's own memory"
    ordered = numbers | {key: links[key] for key in ("intra_node_gbs", "inter_node_gbs")}
    return Entry(name, ordered | {"host_gbs": host_gbs, "latency_us": links["latency_us"]}, remarks)


def write_entry(entry: Entry, file: str | Path) -> None:
    """Write the entry to a hardware file, and keep the entries of other devices in that file."""
    import yaml

    path = Path(file)
    try:
        others = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if others is not None and not isinstance(others, dict):
        raise ValueError(f"{path} is no hardware file: it must map names of devices to their numbers")
    kept = {name: numbers for name, numbers in (others or {}).items() if name != entry.name}
    text = "# Written by `meshrl doctor --measure`; read by `meshrl plan --hardware`. GB are 10^9 bytes, GiB 2^30.\n"
    text += entry.to_yaml() + (yaml.safe_dump(kept, sort_keys=False) if kept else "")
    write_whole(path, text)


def matmul_tflops(device: "torch.device", dtype: str, size: int) -> float:
    """Return the rate of a square matmul in 10^12 operations a second. Float32 runs without TF32 (torch's default)."""
    import torch

    left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    out = torch.empty_like(left)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, left, out=out), device) / 1e12


def copy_gbs(device: "torch.device", size: int) -> float:
    """Return the rate of a copy within the device's memory, in 10^9 bytes a second, read and written bytes added."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device) / 1e9


def host_copy_gbs(size: int = 2**28) -> float:
    """Return the rate of a copy from pinned host memory to the GPU, in 10^9 bytes a second."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return size / seconds_of(lambda: target.copy_(source, non_blocking=True), target.device) / 1e9


def seconds_of(work: Callable[[], object], device: "torch.device") -> float:
    """Return the seconds of one call of `work`: the best of three rounds.

    Each round makes enough calls to take about 0.1 seconds, so that the clock's resolution does not matter. A call of
    more than `MINIMUM_SECONDS` is timed only once.
    """
    import torch

    def finished() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    work()
    before = finished()
    work()
    once = finished() - before
    if once > MINIMUM_SECONDS:  # more rounds add nothing: a CPU without bfloat16 needs seconds for a matmul
        return once
    calls = max(1, int(MINIMUM_SECONDS / 3 / max(once, 1e-7)))
    best = float("inf")
    for _ in range(3):
        before = finished()
        for _ in range(calls):
            work()
        best = min(best, (finished() - before) / calls)
    return best


def _links(findings: Iterable[Finding], host_gbs: float) -> tuple[dict[str, float], dict[str, str]]:
    """Return link rates and remarks, by key of the hardware file, taken from the findings.

    Without a second GPU or host, the nearest known rate is used and a remark is added.
    """
    by_check = {finding.check: finding for finding in findings if "gbs" in finding.numbers}
    numbers: dict[str, float] = {}
    remarks: dict[str, str] = {}
    intra, inter = by_check.get("links"), by_check.get("hosts")
    if intra is None:
        numbers |= {"intra_node_gbs": host_gbs, "latency_us": 10.0}
        remarks["intra_node_gbs"] = "not measured: the host link's"
        remarks["latency_us"] = "not measured: a guess"
    else:
        numbers |= {"intra_node_gbs": intra.numbers["gbs"], "latency_us": intra.numbers["latency_us"]}
        if "gloo" in intra.found:
            remarks["intra_node_gbs"] = "processes over gloo"
    if inter is None:
        numbers["inter_node_gbs"] = numbers["intra_node_gbs"]
        remarks["inter_node_gbs"] = "not measured (no second host): that within the node; set it by hand"
    else:
        numbers["inter_node_gbs"] = inter.numbers["gbs"]
        remarks["inter_node_gbs"] = "one TCP stream"
    return numbers, remarks


def _short_name(name: str) -> str:
    """Shorten a device name as in the table of `meshrl plan`.

    `NVIDIA H200` becomes `H200`, and `NVIDIA H100 80GB HBM3` becomes `H100`.
    """
    words = [word for word in name.split() if word.upper() not in ("NVIDIA", "AMD", "TESLA")]
    return words[0].split("-")[0] if words else "GPU"
