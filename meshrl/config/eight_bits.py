"""Checks of `rollout.quantization` and `kv_cache_dtype`: which rollouts generate in 8 bits, with which models."""

from meshrl.config.engine_arguments import EXTERNAL
from meshrl.config.model_folder import read_model_config
from meshrl.config.names import MODEL, ROLLOUT
from meshrl.config.root import PPOConfig
from meshrl.config.split_rollout import MODEL_TYPES

QUANTIZATION, CACHE = f"{ROLLOUT}.quantization", f"{ROLLOUT}.kv_cache_dtype"


def eight_bit_problems(config: PPOConfig) -> list[str]:
    """Only the embedded rollout rounds weights again after every sync, and only on GPUs it has a cache of 8 bits."""
    rollout = config.actor_rollout_ref.rollout
    problems = []
    if rollout.quantization is not None and rollout.name != "embedded":
        problems.append(
            f"{QUANTIZATION}={rollout.quantization} is for {ROLLOUT}.name=embedded, which rounds its weights anew "
            f"after every sync, and this is {rollout.name}: leave it out, or set embedded"
        )
    if rollout.kv_cache_dtype != "auto":
        said = f"{CACHE}={rollout.kv_cache_dtype}"
        if rollout.name in EXTERNAL:
            argument = {"vllm": "fp8", "sglang": "fp8_e4m3"}[rollout.name]
            problems.append(
                f"{said} is for {ROLLOUT}.name=embedded: set "
                f"{ROLLOUT}.engine_kwargs.{rollout.name}.kv_cache_dtype={argument} instead"
            )
        elif rollout.name != "embedded" or config.trainer.device == "cpu":
            problems.append(f"{said} is for {ROLLOUT}.name=embedded on GPUs: set it to auto")
    return problems


def eight_bit_file_problems(config: PPOConfig) -> list[str]:
    """The model's layers must be known, and have no experts."""
    policy = config.actor_rollout_ref
    if policy.rollout.quantization is None or not (found := read_model_config(policy.model)):
        return []
    if (kind := found.get("model_type")) in MODEL_TYPES:
        return []
    return [
        f"{QUANTIZATION}={policy.rollout.quantization} is for models of type {', '.join(MODEL_TYPES)}, and "
        f"{MODEL}.path={policy.model.path} is {kind}: leave it out"
    ]
