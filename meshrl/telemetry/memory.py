"""How much device memory a phase took."""

from __future__ import annotations

import torch

GIB = 2**30


class PeakMemory:
    """Watches a device from its making on; on a CPU there is nothing to report."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def metrics(self, phase: str) -> dict[str, float]:
        """Allocated GiB before and after the phase, and its peak (allocated and reserved)."""
        if self.device.type != "cuda":
            return {}
        return {
            f"memory/{phase}/before_gib": self.before / GIB,
            f"memory/{phase}/after_gib": torch.cuda.memory_allocated(self.device) / GIB,
            f"memory/{phase}/max_allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            f"memory/{phase}/max_reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
        }
