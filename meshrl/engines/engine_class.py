"""The one place where `strategy` chooses an engine."""

from __future__ import annotations

from meshrl.config.engine import EngineConfig
from meshrl.engines.training_engine import Engine


def engine_class(config: EngineConfig) -> type[Engine]:
    """The engine of `config.strategy`, imported only if it is asked for."""
    if config.strategy == "megatron":
        from meshrl.engines.megatron.megatron_engine import MegatronEngine

        return MegatronEngine
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine

    return FSDPEngine
