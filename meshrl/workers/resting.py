"""Engines that wait in host memory between phases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshrl.config.engine import EngineConfig
from meshrl.engines.base import Engine


def rests(config: EngineConfig) -> tuple[bool, bool]:
    """Whether the weights, and whether the optimizer states, wait in host memory."""
    settings = config.megatron if config.strategy == "megatron" else config.fsdp_config
    return settings.param_offload, settings.optimizer_offload


def send_to_rest(engine: Engine, model: bool, optimizer: bool) -> None:
    """Sends what is configured to wait in host memory there."""
    if model or optimizer:
        engine.to("cpu", model=model, optimizer=optimizer)


@contextmanager
def awake(engine: Engine, device: torch.device, *, model: bool, optimizer: bool) -> Iterator[None]:
    """Inside, what rests in host memory is on the device."""
    if model or optimizer:
        engine.to(device, model=model, optimizer=optimizer)
    try:
        yield
    finally:
        send_to_rest(engine, model, optimizer)
