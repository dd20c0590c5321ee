"""What workers share: their settings, joining the process group, and engines that wait in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.config.rl import RolloutCorrectionConfig
from meshrl.config.user_code import import_code
from meshrl.engines.training_engine import Engine
from meshrl.parallel.mesh import init_process_group, prepare_device

# What a worker needs to know beyond the config of its roles.


@dataclass(frozen=True)
class WorkerSettings:
    """Numbers that the trainer derives once for all workers of a role."""

    device: str
    collective_deadline: float
    mini_batches: int
    total_optimizer_steps: int
    with_reference: bool
    seed: int = 0
    with_rollout: bool = True  # whether the actor's workers generate, too
    # Of every token's distribution, the sum of its squares: for the optimal token baselines.
    with_sum_pi_squared: bool = False
    # Where the loss itself compares the policy with the rollout's.
    bypass: RolloutCorrectionConfig | None = None
    # Variables of the chat template, as the prompts were rendered with.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


# What every worker with a model does first.


def join_ranks(device: str, local_rank: int, deadline: float) -> torch.device:
    """Prepares this rank's device and joins the other ranks of its group; returns the device."""
    transformers_logging.disable_progress_bar()
    own = prepare_device(device, local_rank)
    init_process_group(own, deadline)
    return own


def import_external_lib(model: ModelConfig) -> None:
    """Imports the user's own module, which may register losses and models, before the model is made."""
    if model.external_lib:
        import_code(model.external_lib)


# Engines that wait in host memory between phases.


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
