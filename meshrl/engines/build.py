"""The one place where `strategy` chooses an engine."""

from __future__ import annotations

from typing import Any

import torch

from meshrl.config.engine import EngineConfig
from meshrl.config.model import ModelConfig
from meshrl.config.optim import OptimConfig
from meshrl.engines.base import Engine


def build_engine(
    model: ModelConfig,
    engine: EngineConfig,
    optim: OptimConfig | None,
    *,
    device: torch.device,
    head: str = "lm",
    total_steps: int = 0,
    seed: int = 0,
) -> Engine:
    """The engine of `engine.strategy`, not initialized yet. Without `optim` the model only answers."""
    kind: Any
    if engine.strategy == "megatron":
        from meshrl.engines.megatron.engine import MegatronEngine

        kind = MegatronEngine
    else:
        from meshrl.engines.fsdp.engine import FSDPEngine

        kind = FSDPEngine
    return kind(model, engine, optim, device=device, head=head, total_steps=total_steps, seed=seed)
