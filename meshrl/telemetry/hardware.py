"""A table of devices with their memory, FLOP rates and bandwidths, and clusters of these devices.

A YAML file may extend the table or replace entries; `meshrl doctor --measure` writes such a file:

    # hardware.yaml
    H200:
      memory_gib: 139.8        # what a process can allocate
      bf16_tflops: 989         # dense bf16 matrix products
      fp32_tflops: 67          # float32 without TF32
      memory_gbs: 4800         # the device's own memory
      intra_node_gbs: 450      # to another device of the machine, one direction
      inter_node_gbs: 50       # to a device of another machine, one direction, per device
      host_gbs: 55             # to the host's memory, one direction
      latency_us: 10           # of one collective call
      measured: false          # true: the rates were measured, not read from a data sheet

Bandwidths are in 10^9 bytes a second, memory in 2^30 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Hardware:
    """One kind of device with its rates and links; the module docstring gives the units."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gbs: float
    intra_node_gbs: float
    inter_node_gbs: float
    host_gbs: float
    latency_us: float
    measured: bool = False

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    def flops(self, bits: int) -> float:
        """Return the peak FLOP/s of dense matrix products in number formats of `bits` bits."""
        return (self.bf16_tflops if bits <= 16 else self.fp32_tflops) * 1e12

    def link(self, crosses_nodes: bool) -> float:
        """Return the bytes per second of the slowest link of a group, within a node or across nodes."""
        return (min(self.inter_node_gbs, self.intra_node_gbs) if crosses_nodes else self.intra_node_gbs) * 1e9


NUMBERS = tuple(field.name for field in fields(Hardware) if field.name not in ("name", "measured"))

# Rates are from data sheets. Memory is what CUDA reports, a little below the data sheet. Inter-node links are those of
# common machines: one 400 Gb/s port per GPU (A100: 200 Gb/s). The L40S has no NVLink and uses PCIe 4 within a node.
TABLE: dict[str, tuple[float, ...]] = {
    #        memory_gib bf16   fp32  memory_gbs intra  inter host latency_us
    "H100": (79.1, 989.0, 67.0, 3350.0, 450.0, 50.0, 55.0, 10.0),
    "H200": (139.8, 989.0, 67.0, 4800.0, 450.0, 50.0, 55.0, 10.0),
    "A100": (79.1, 312.0, 19.5, 2039.0, 300.0, 25.0, 25.0, 10.0),
    "B200": (178.4, 2250.0, 75.0, 7700.0, 900.0, 50.0, 55.0, 10.0),
    "L40S": (44.4, 362.0, 91.6, 864.0, 22.0, 22.0, 22.0, 15.0),
    "CPU": (16.0, 0.2, 0.1, 20.0, 5.0, 1.0, 20.0, 100.0),
}


WITHOUT_8_BITS = ("A100",)  # devices without FP8 matmuls


def hardware_table(file: str | Path | None = None) -> dict[str, Hardware]:
    """Return the built-in devices by name, extended or changed by the entries of a YAML file."""
    table = {
        name: Hardware(name, **dict(zip(NUMBERS, numbers, strict=True)), measured=False)
        for name, numbers in TABLE.items()
    }
    if file is None:
        return table
    if not Path(file).is_file():
        raise ValueError(f"--hardware: there is no file {file}")
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--hardware: {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} must map names of devices to their numbers ({', '.join(NUMBERS)})")
    for name, numbers in content.items():
        table[str(name)] = _entry(str(name), numbers, table.get(str(name)), file)
    return table


def known_peak(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a GPU by its CUDA name, such as `NVIDIA H200`.

    Return None if no name of the built-in table is part of the CUDA name.
    """
    return next((found.flops(16) for name, found in hardware_table().items() if name in device_name), None)


def _entry(name: str, numbers: Any, known: Hardware | None, file: str | Path) -> Hardware:
    """Build a device from its mapping in a file; a device that is already known needs only the changed numbers."""
    if not isinstance(numbers, Mapping):
        raise ValueError(f"{file}: {name} must be a mapping of {', '.join(NUMBERS)}")
    if unknown := sorted(set(numbers) - set(NUMBERS) - {"measured"}):
        raise ValueError(f"{file}: {name} has '{unknown[0]}'; the numbers of a device are {', '.join(NUMBERS)}")
    given = {key: getattr(known, key) for key in (*NUMBERS, "measured")} if known else {}
    given |= dict(numbers)
    if missing := [key for key in NUMBERS if key not in given]:
        raise ValueError(f"{file}: {name} lacks {', '.join(missing)}")
    for key in NUMBERS:
        number = given[key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ValueError(f"{file}: {name}.{key} must be a finite number above 0, got {number!r}")
    rest = {key: float(given[key]) for key in NUMBERS}
    return Hardware(name, **rest, measured=bool(given.get("measured", False)))


@dataclass(frozen=True)
class Cluster:
    """`devices` identical devices, `per_node` of them in each machine."""

    hardware: Hardware
    devices: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)


def parse_cluster(text: str, per_node: int | None = None, table: Mapping[str, Hardware] | None = None) -> Cluster:
    """Parse a cluster such as `8xH200`, or `H200` for a single device.

    Machines have `per_node` devices, by default 8 or all devices if there are fewer.
    """
    table = table or hardware_table()
    match = re.fullmatch(r"(?:(\d+)\s*[x*])?\s*(\S+)", text.strip())
    if match is None:
        raise ValueError(f"--gpus must be like 8xH200, got '{text}'")
    devices = int(match[1] or 1)
    names = {name.lower(): name for name in table}
    if match[2].lower() not in names:
        raise ValueError(
            f"--gpus {text}: no device '{match[2]}'; known are {', '.join(table)} (or give --hardware FILE)"
        )
    per_node = min(devices, 8) if per_node is None else per_node
    if devices < 1 or per_node < 1:
        raise ValueError(f"--gpus ({devices}) and --gpus-per-node ({per_node}) must be at least 1")
    if devices > per_node and devices % per_node:
        raise ValueError(f"--gpus ({devices}) must be a multiple of --gpus-per-node ({per_node})")
    return Cluster(table[names[match[2].lower()]], devices, min(per_node, devices))
