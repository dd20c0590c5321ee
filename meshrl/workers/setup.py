"""Shared parts of workers: their settings, joining the process group, and CPU offload of engines between phases."""

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

# Settings of a worker besides the config of its roles.


@dataclass(frozen=True)
class WorkerSettings:
    """The settings that the trainer derives once for all workers of a role."""

    device: str
    collective_deadline: float
    mini_batches: int
    total_optimizer_steps: int
    with_reference: bool
    seed: int = 0
    with_rollout: bool = True  # whether the actor's workers also generate
    # Whether to compute the sum of squared probabilities of each token's distribution, for optimal token baselines.
    with_sum_pi_squared: bool = False
    # Set if the loss itself compares the policy with the rollout's policy.
    bypass: RolloutCorrectionConfig | None = None
    # Variables of the chat template with which the prompts were rendered.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


# The first steps of every worker with a model.


def join_ranks(device: str, local_rank: int, deadline: float) -> torch.device:
    """Prepare this rank's device and join the process group; return the device. `deadline` is in seconds."""
    transformers_logging.disable_progress_bar()
    own = prepare_device(device, local_rank)
    init_process_group(own, deadline)
    return own


def import_external_lib(model: ModelConfig) -> None:
    """Import the user's own module, which may register losses and models, before the model is made."""
    if model.external_lib:
        import_code(model.external_lib)


# CPU offload of engines between phases.


def rests(config: EngineConfig) -> tuple[bool, bool]:
    """Return whether the weights are offloaded to host memory, and whether the optimizer states are."""
    settings = config.megatron if config.strategy == "megatron" else config.fsdp_config
    return settings.param_offload, settings.optimizer_offload


def send_to_rest(engine: Engine, model: bool, optimizer: bool) -> None:
    """Offload the weights and optimizer states to host memory, as configured."""
    if model or optimizer:
        engine.to("cpu", model=model, optimizer=optimizer)


@contextmanager
def awake(engine: Engine, device: torch.device, *, model: bool, optimizer: bool) -> Iterator[None]:
    """Keep offloaded weights and optimizer states on the device inside the context."""
    if model or optimizer:
        engine.to(device, model=model, optimizer=optimizer)
    try:
        yield
    finally:
        send_to_rest(engine, model, optimizer)
