"""Selection of the training engine by `strategy`."""

from __future__ import annotations

from meshrl.config.engine import EngineConfig
from meshrl.engines.training_engine import Engine


def engine_class(config: EngineConfig) -> type[Engine]:
    """Return the engine class of `config.strategy`; only that engine's module is imported."""
    if config.strategy == "megatron":
        from meshrl.engines.megatron.megatron_engine import MegatronEngine

        return MegatronEngine
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine

    return FSDPEngine
