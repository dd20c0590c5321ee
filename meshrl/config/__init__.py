"""The config: a tree of dataclasses, loaded from recipes and overrides, checked before any worker starts."""

from meshrl.config.batch_sizes import BatchUnits, SupervisedBatchUnits
from meshrl.config.keys import ConfigError
from meshrl.config.load import Loaded, load_config
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import PreferenceConfig, SFTConfig
from meshrl.config.validate import check_config, ensure_runnable, unsupported

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
