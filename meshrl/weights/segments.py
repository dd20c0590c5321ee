"""Settings of torch's CUDA allocator by phase: memory that can grow in place while training, and not while generating.

Training takes tensors of many sizes. In segments of fixed size the gaps between them add up; segments that grow in
place (`expandable_segments`) have few. A rollout hands memory to other processes or puts it to sleep by an allocator of
its own, and neither goes with such segments.
"""

from __future__ import annotations

import os

import torch

GROWS = "expandable_segments"
# Where users set the allocator; the second is the older name, and wins for GPUs.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Segments:
    """The process's choice. Whatever else its environment sets (`PYTORCH_ALLOC_CONF`) stays as it is."""

    def __init__(self) -> None:
        now = ",".join(os.environ.get(name, "") for name in VARIABLES)
        self.others = [setting for setting in now.split(",") if setting and not setting.startswith(GROWS)]
        self.grow_now = self.grew = f"{GROWS}:True" in now

    def grow(self, wanted: bool) -> None:
        """From now on new segments grow in place, or have fixed sizes.

        Memory that is cached but not in use goes back: the allocator would not use one kind's for the other.
        """
        if wanted != self.grow_now:
            torch.cuda.empty_cache()
            # A call drops what it does not name.
            torch._C._accelerator_setAllocatorSettings(",".join([*self.others, f"{GROWS}:{wanted}"]))
            self.grow_now = wanted

    def restore(self) -> None:
        """As the environment has it."""
        self.grow(self.grew)
