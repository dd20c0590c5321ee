"""How much memory a phase took: of a GPU what torch has allocated, on a CPU the process's resident memory.

    with MemoryLog("old_log_prob", device):     # or @MemoryLog("old_log_prob") above a function
        ...

The peaks of blocks like this come with the worker's ledger and are metrics of the step.
"""

from __future__ import annotations

import logging
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from meshrl.telemetry.ledger import current_ledger

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

GIB = 2**30
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Watches a device, or the process, from its making on. Two at a time share one peak: the later one's."""

    def __init__(self, device: torch.device | None = None):
        self.device = device
        if self.is_cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.can_reset = reset_peak_rss()
            self.before = resident_bytes()[0]

    @property
    def is_cuda(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    def metrics(self, phase: str) -> dict[str, float]:
        """GiB before and after the phase, and its peak: allocated and reserved on a GPU, resident on a CPU.

        Where the system cannot forget a process's peak, a CPU's is that of its whole life and is left out.
        """
        if not self.is_cuda:
            after, peak = resident_bytes()
            found = {"before_rss_gib": self.before, "after_rss_gib": after}
            found |= {"max_rss_gib": max(peak, after)} if self.can_reset else {}
            return {f"memory/{phase}/{name}": value / GIB for name, value in found.items()}
        import torch

        return {
            f"memory/{phase}/before_gib": self.before / GIB,
            f"memory/{phase}/after_gib": torch.cuda.memory_allocated(self.device) / GIB,
            f"memory/{phase}/max_allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            f"memory/{phase}/max_reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
        }


class MemoryLog(ContextDecorator):
    """Measures a block, or a decorated function: into the ledger this thread works for, and the log (level DEBUG)."""

    def __init__(self, phase: str, device: torch.device | None = None):
        self.phase, self.device = phase, device
        self.found: dict[str, float] = {}

    def _recreate_cm(self) -> MemoryLog:
        return MemoryLog(self.phase, self.device)

    def __enter__(self) -> MemoryLog:
        self._peak = PeakMemory(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
