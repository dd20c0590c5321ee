"""What a checkpoint keeps beside tensors: the schedule and the random states, one file a rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.data import plain
from meshrl.engines.optim import LearningRate


def extra_state(device: torch.device, schedule: LearningRate | None) -> dict[str, Any]:
    """This rank's schedule and random states, as tensors and plain values only."""
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {"schedule_steps": None if schedule is None else schedule.steps, "random": states}


def load_extra(folder: Path, rank: int, device: torch.device, schedule: LearningRate | None) -> dict[str, Any]:
    """Reads it back; on a larger world new ranks take the schedule of rank 0 and keep their own random states."""
    own = folder / f"extra-{rank}.plain"
    extra: dict[str, Any] = plain.load(own if own.is_file() else folder / "extra-0.plain")
    if schedule is not None and extra["schedule_steps"] is not None:
        schedule.set_steps(extra["schedule_steps"])
    if not own.is_file():
        return {}
    states: dict[str, Any] = extra["random"]
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    if device.type == "cuda" and isinstance(states.get("cuda"), Tensor):
        torch.cuda.set_rng_state(states["cuda"], device)
    return extra
