"""What a checkpoint keeps beside tensors: the schedule and the random states, one file a rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.engines.optim import LearningRate


def save_extra(folder: Path, rank: int, device: torch.device, schedule: LearningRate | None) -> None:
    """Writes this rank's file."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    extra = {"schedule_steps": None if schedule is None else schedule.steps, "random": states}
    torch.save(extra, folder / f"extra-{rank}.pt")


def load_extra(folder: Path, rank: int, device: torch.device, schedule: LearningRate | None) -> None:
    """Reads it back; on a larger world new ranks take the schedule of rank 0 and keep their own random states."""
    own = folder / f"extra-{rank}.pt"
    extra = torch.load(own if own.is_file() else folder / "extra-0.pt", weights_only=False)
    if schedule is not None and extra["schedule_steps"] is not None:
        schedule.set_steps(extra["schedule_steps"])
    if not own.is_file():
        return
    states: dict[str, Any] = extra["random"]
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if device.type == "cuda" and isinstance(states.get("cuda"), Tensor):
        torch.cuda.set_rng_state(states["cuda"], device)
