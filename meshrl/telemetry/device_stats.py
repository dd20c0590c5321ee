"""Peak memory of phases, and profilers inside a worker.

    with MemoryLog("old_log_prob", device):     # or @MemoryLog("old_log_prob") above a function
        ...

On a GPU, memory means what torch has allocated; on a CPU, it means the resident memory of the process. The peaks of
such blocks are recorded in the worker's ledger and become metrics of the step. `ProcessProfiler` records a torch trace,
a memory snapshot or marks for Nsight Systems.
"""

from __future__ import annotations

import gzip
import logging
import shutil
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from meshrl.files import writing_whole
from meshrl.telemetry.time_ledger import current_ledger

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

GIB = 2**30
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter(Protocol):
    """An interface for reading the memory in use and its peak since the last reset, in bytes."""

    names: tuple[str, str, str]  # metric names for the memory before, after and at the peak

    def used(self) -> int: ...

    def peak(self) -> int | None: ...

    def reset_peak(self) -> None: ...

    def further(self) -> dict[str, int]: ...


class CudaMeter:
    """A meter of the memory that torch has allocated on one GPU."""

    names = ("before_gib", "after_gib", "max_allocated_gib")

    def __init__(self, device: torch.device):
        self.device = device

    def used(self) -> int:
        import torch

        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self.device)

    def further(self) -> dict[str, int]:
        import torch

        return {"max_reserved_gib": torch.cuda.max_memory_reserved(self.device)}


class ProcessMeter:
    """A meter of the resident memory of this process; `peak` is None if the system cannot reset the peak."""

    names = ("before_rss_gib", "after_rss_gib", "max_rss_gib")
    can_reset = False

    def used(self) -> int:
        return resident_bytes()[0]

    def peak(self) -> int | None:
        return max(resident_bytes()) if self.can_reset else None

    def reset_peak(self) -> None:
        self.can_reset = reset_peak_rss()

    def further(self) -> dict[str, int]:
        return {}


class PeakMemory:
    """A measurement of memory from construction on, for a device or for the process.

    Two measurements at the same time share one peak, which counts from the construction of the later one. With
    `budget_bytes`, a phase whose peak exceeds both the budget and the memory before it raises a MemoryError.
    """

    def __init__(
        self, device: torch.device | None = None, budget_bytes: int | None = None, *, meter: Meter | None = None
    ):
        self.meter: Meter = meter or meter_of(device)
        self.budget_bytes = budget_bytes
        self.meter.reset_peak()
        self.before = self.meter.used()

    def metrics(self, phase: str) -> dict[str, float]:
        """Return `memory/<phase>/...` metrics in GiB: before, after and at the peak.

        On a GPU the peaks are of allocated and reserved memory, on a CPU of resident memory.
        """
        names, peak = self.meter.names, self.meter.peak()
        found = {names[0]: self.before, names[1]: self.meter.used()}
        found |= {} if peak is None else {names[2]: peak} | self.meter.further()
        most = max(found.values()) if peak is None else peak
        if self.budget_bytes is not None and most > max(self.budget_bytes, self.before):
            raise MemoryError(
                f"phase '{phase}' took {most / GIB:.2f} GiB ({self.before / GIB:.2f} before it), more than "
                f"actor_rollout_ref.memory_budget_gigabytes ({self.budget_bytes / GIB:.2f}): {_remedy(phase)}"
            )
        return {f"memory/{phase}/{name}": value / GIB for name, value in found.items()}


def meter_of(device: torch.device | None) -> CudaMeter | ProcessMeter:
    """Return the memory meter of a CUDA device, or of this process for any other device."""
    return ProcessMeter() if device is None or device.type != "cuda" else CudaMeter(device)


def _remedy(phase: str) -> str:
    """Return advice on the config keys that lower a phase's memory."""
    if phase.startswith("switch_"):
        return (
            "lower rollout.gpu_memory_utilization or rollout.update_weights_bucket_megabytes, or set param_offload and "
            "optimizer_offload"
        )
    if phase == "gen":
        return "lower rollout.gpu_memory_utilization, rollout.max_num_seqs or rollout.max_num_batched_tokens"
    return "smaller micro-batches, more sharding, or param_offload and optimizer_offload"


class MemoryLog(ContextDecorator):
    """A context manager or decorator that measures the memory of a block or function.

    The peaks go to the current ledger of this thread, and all values go to the log (level DEBUG). `budget_bytes` is
    the limit of `PeakMemory`.
    """

    def __init__(self, phase: str, device: torch.device | None = None, budget_bytes: int | None = None):
        self.phase, self.device, self.budget_bytes = phase, device, budget_bytes
        self.found: dict[str, float] = {}

    def _recreate_cm(self) -> MemoryLog:
        return MemoryLog(self.phase, self.device, self.budget_bytes)

    def start(self) -> MemoryLog:
        """Start to measure outside a `with` block; `note` then records the peak so far."""
        self._peak = PeakMemory(self.device, self.budget_bytes)
        return self

    def __enter__(self) -> MemoryLog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._peak.budget_bytes = None  # the error inside the block must not be replaced
        self.note()

    def note(self) -> None:
        """Record the measured values in the ledger and the log; raise a MemoryError for a peak above the budget."""
        self.found = self._peak.metrics(self.phase)
        logger.debug("%s", ", ".join(f"{name} {value:.3f}" for name, value in self.found.items()))
        if (ledger := current_ledger()) is not None:
            for name, value in self.found.items():
                if "/max_" in name:
                    ledger.raise_to(name, value)


def resident_bytes() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process in bytes.

    Both are 0 on systems without `/proc/self/status`.
    """
    if not _STATUS.exists():
        return 0, 0
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    found = {line[0]: int(line[1]) << 10 for line in lines if line and line[0] in ("VmRSS:", "VmHWM:")}
    return found.get("VmRSS:", 0), found.get("VmHWM:", 0)


def reset_peak_rss() -> bool:
    """Reset the peak resident memory of this process; return whether the system supports the reset."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


# Profiling of single steps inside a worker: a torch trace, a snapshot of GPU memory, or marks for Nsight Systems.

TOOLS = ("torch", "torch_memory", "nsys")
# Number of past allocations in a memory snapshot.
MOST_ALLOCATIONS = 200_000


class ProcessProfiler:
    """A profiler in this process, with one of the `TOOLS`."""

    def __init__(self, tool: str) -> None:
        if tool not in TOOLS:
            raise ValueError(f"there is no profiler '{tool}': use one of {', '.join(TOOLS)}")
        import torch

        if tool != "torch" and not torch.cuda.is_available():
            raise ValueError(
                f"global_profiler.tool={tool} needs a GPU in the worker's process: use tool=torch on a CPU"
            )
        self.tool = tool
        self._profile: Any = None

    def start(self) -> None:
        """Start profiling. Call it from the thread to be profiled."""
        import torch

        if self.tool == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, acc_events=True)
            self._profile.start()
        elif self.tool == "torch_memory":
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        else:
            torch.cuda.profiler.start()

    def stop(self, stem: Path) -> Path | None:
        """Stop profiling and write the result to `stem` with the tool's suffix.

        Return the path of the file, or None for nsys, which writes its files outside this process.
        """
        import torch

        stem.parent.mkdir(parents=True, exist_ok=True)
        if self.tool == "nsys":
            torch.cuda.profiler.stop()
            return None
        if self.tool == "torch_memory":
            path = stem.with_name(stem.name + ".memory.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            return path
        self._profile.stop()
        plain, path = stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".trace.json.gz")
        self._profile.export_chrome_trace(str(plain))
        with (
            open(plain, "rb") as source,
            writing_whole(path) as aside,
            gzip.open(aside, "wb", compresslevel=3) as target,
        ):
            shutil.copyfileobj(source, target)
        plain.unlink()
        return path


def nsys_command(save_path: str, command: str) -> str:
    """Return the command line that runs `command` under Nsight Systems and records the marked steps."""
    return (
        "nsys profile --trace=cuda,nvtx,osrt --trace-fork-before-exec=true --capture-range=cudaProfilerApi "
        f"--capture-range-end=repeat --output={save_path}/meshrl-%p {command}"
    )
