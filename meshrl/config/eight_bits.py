"""Checks of `rollout.quantization` and `kv_cache_dtype`: which models and devices generate in 8 bits."""

from meshrl.config.model_folder import read_model_config
from meshrl.config.names import MODEL, ROLLOUT
from meshrl.config.root import PPOConfig
from meshrl.config.split_rollout import MODEL_TYPES


def eight_bit_problems(config: PPOConfig) -> list[str]:
    """A cache of 8 bits is read by kernels of a GPU."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_dtype == "auto" or config.trainer.device != "cpu":
        return []
    return [f"{ROLLOUT}.kv_cache_dtype={rollout.kv_cache_dtype} is for GPUs, and trainer.device=cpu: set it to auto"]


def eight_bit_file_problems(config: PPOConfig) -> list[str]:
    """The model's layers must be known, and have no experts."""
    policy = config.actor_rollout_ref
    if policy.rollout.quantization is None or not (found := read_model_config(policy.model)):
        return []
    if (kind := found.get("model_type")) in MODEL_TYPES:
        return []
    return [
        f"{ROLLOUT}.quantization={policy.rollout.quantization} is for models of type {', '.join(MODEL_TYPES)}, and "
        f"{MODEL}.path={policy.model.path} is {kind}: leave it out"
    ]
