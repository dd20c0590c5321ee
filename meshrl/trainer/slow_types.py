"""Says before a run begins that this machine's processor has no products of the types that it is to compute with."""

from __future__ import annotations

import time

import torch

from meshrl.config.engine import EngineConfig
from meshrl.config.names import ROLLOUT
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.used_engines import used_engines
from meshrl.models.loading import torch_dtype

# So many times as long as float32's, and a run is told; types that are merely somewhat slower are not.
SLOW = 10.0
# Rollouts that compute with torch in our own workers; the others choose their kernels themselves.
OWN_ROLLOUTS = ("embedded", "hf")


def slow_types(config: PPOConfig | SupervisedConfig) -> list[str]:
    """A line for each type that a run on CPUs asks for and this processor is slow at, with the keys to change."""
    device = config.trainer.device
    is_here = config.trainer.backend == "local"  # with Ray, the processors are others'
    if not is_here or device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return []
    asked: dict[torch.dtype, list[str]] = {}
    for key, name in _keys(config).items():
        asked.setdefault(torch_dtype(name), []).append(key)
    return [
        f"products of {str(dtype).removeprefix('torch.')} take {ratio:.0f} times as long as float32's on this "
        f"processor; for float32 set {' '.join(f'{key}=float32' for key in keys)}"
        for dtype, keys in asked.items()
        if (ratio := times_slower(dtype)) >= SLOW
    ]


def times_slower(dtype: torch.dtype) -> float:
    """How many times as long as with float32 a small product takes on the CPU, the way workers there compute."""
    if dtype == torch.float32:
        return 1.0
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        return _product_seconds(dtype) / _product_seconds(torch.float32)
    finally:
        torch.backends.mkldnn.enabled = before


def _product_seconds(dtype: torch.dtype) -> float:
    x, weight = torch.ones(64, 128, dtype=dtype), torch.ones(128, 128, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        _ = x @ weight
        best = min(best, time.perf_counter() - started)
    return best


def _keys(config: PPOConfig | SupervisedConfig) -> dict[str, str]:
    """The types that the run's own models compute with, by key."""
    found = dict(_engine_type(prefix, engine) for prefix, engine in used_engines(config).items())
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.name in OWN_ROLLOUTS:
        found[f"{ROLLOUT}.dtype"] = config.actor_rollout_ref.rollout.dtype
    return found


def _engine_type(prefix: str, engine: EngineConfig) -> tuple[str, str]:
    if engine.strategy == "megatron":
        return f"{prefix}.megatron.dtype", engine.megatron.dtype
    return f"{prefix}.fsdp_config.mixed_precision.param_dtype", engine.fsdp_config.mixed_precision.param_dtype
