"""How much memory a phase took: of a GPU what torch has allocated, on a CPU the process's resident memory.

    with MemoryLog("old_log_prob", device):     # or @MemoryLog("old_log_prob") above a function
        ...

The peaks of blocks like this come with the worker's ledger and are metrics of the step.
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
    """Tells how much memory is in use, and the most there has been since its peak was reset."""

    names: tuple[str, str, str]  # of the metrics: before, after and at the peak

    def used(self) -> int: ...

    def peak(self) -> int | None: ...

    def reset_peak(self) -> None: ...

    def further(self) -> dict[str, int]: ...


class CudaMeter:
    """What torch has allocated of one GPU."""

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
    """Resident memory of this process. Where the system cannot forget its peak there is none to tell."""

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
    """Watches a device, or the process, from its making on. Two at a time share one peak: the later one's.

    With `budget_bytes`, a phase that takes more (and more than there was before it) is an error that names it.
    """

    def __init__(
        self, device: torch.device | None = None, budget_bytes: int | None = None, *, meter: Meter | None = None
    ):
        self.meter: Meter = meter or meter_of(device)
        self.budget_bytes = budget_bytes
        self.meter.reset_peak()
        self.before = self.meter.used()

    def metrics(self, phase: str) -> dict[str, float]:
        """GiB before and after the phase, and its peak: allocated and reserved on a GPU, resident on a CPU."""
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
    """What tells of a device's memory."""
    return ProcessMeter() if device is None or device.type != "cuda" else CudaMeter(device)


def _remedy(phase: str) -> str:
    """What to change after a phase took too much."""
    if phase.startswith("switch_"):
        return (
            "lower rollout.gpu_memory_utilization or rollout.update_weights_bucket_megabytes, or set param_offload and "
            "optimizer_offload"
        )
    if phase == "gen":
        return "lower rollout.gpu_memory_utilization, rollout.max_num_seqs or rollout.max_num_batched_tokens"
    return "smaller micro-batches, more sharding, or param_offload and optimizer_offload"


class MemoryLog(ContextDecorator):
    """Measures a block, or a decorated function: into the ledger this thread works for, and the log (level DEBUG).

    `budget_bytes` as in `PeakMemory`.
    """

    def __init__(self, phase: str, device: torch.device | None = None, budget_bytes: int | None = None):
        self.phase, self.device, self.budget_bytes = phase, device, budget_bytes
        self.found: dict[str, float] = {}

    def _recreate_cm(self) -> MemoryLog:
        return MemoryLog(self.phase, self.device, self.budget_bytes)

    def start(self) -> MemoryLog:
        """Begins to measure what is no block: `note` tells of the peak so far."""
        self._peak = PeakMemory(self.device, self.budget_bytes)
        return self

    def __enter__(self) -> MemoryLog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._peak.budget_bytes = None  # what went wrong inside is what is told
        self.note()

    def note(self) -> None:
        """Into the ledger and the log; a peak above the budget is an error."""
        self.found = self._peak.metrics(self.phase)
        logger.debug("%s", ", ".join(f"{name} {value:.3f}" for name, value in self.found.items()))
        if (ledger := current_ledger()) is not None:
            for name, value in self.found.items():
                if "/max_" in name:
                    ledger.raise_to(name, value)


def resident_bytes() -> tuple[int, int]:
    """The process's resident memory, now and at its peak; zeros where the system does not say."""
    if not _STATUS.exists():
        return 0, 0
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    found = {line[0]: int(line[1]) << 10 for line in lines if line and line[0] in ("VmRSS:", "VmHWM:")}
    return found.get("VmRSS:", 0), found.get("VmHWM:", 0)


def reset_peak_rss() -> bool:
    """Forgets the peak so far; whether the system can."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


# Profiles of single steps inside a worker: a torch trace, a snapshot of GPU memory, or marks for Nsight Systems.

TOOLS = ("torch", "torch_memory", "nsys")
# Allocations that a memory snapshot looks back on.
MOST_ALLOCATIONS = 200_000


class ProcessProfiler:
    """One tool in one process. `stop` says which file it wrote, if any."""

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
        """Begins; in the thread whose work is to be seen."""
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
        """Ends, and writes `stem` with the tool's own ending."""
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
    """How to start a run so that Nsight Systems records the steps that are marked."""
    return (
        "nsys profile --trace=cuda,nvtx,osrt --trace-fork-before-exec=true --capture-range=cudaProfilerApi "
        f"--capture-range-end=repeat --output={save_path}/meshrl-%p {command}"
    )
