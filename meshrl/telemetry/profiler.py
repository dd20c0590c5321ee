"""Profiles of single steps inside a worker: a torch trace, a snapshot of GPU memory, or marks for Nsight Systems."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

from meshrl.files import writing_whole

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
