"""The config: a tree of dataclasses, loaded from recipes and overrides, checked before any worker starts."""

from meshrl.config.checks import check_config, ensure_runnable
from meshrl.config.errors import ConfigError
from meshrl.config.load import Loaded, load_config
from meshrl.config.preferences import PreferenceConfig
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTConfig
from meshrl.config.units import BatchUnits, SupervisedBatchUnits
from meshrl.config.values import unsupported

__all__ = [
    "BatchUnits",
    "ConfigError",
    "Loaded",
    "PPOConfig",
    "PreferenceConfig",
    "SFTConfig",
    "SupervisedBatchUnits",
    "check_config",
    "ensure_runnable",
    "load_config",
    "unsupported",
]
