"""Checks of `rollout.quantization` and `kv_cache_dtype`: which models and devices generate in 8 bits."""

from meshrl.config.correction import correction_of
from meshrl.config.model_folder import read_model_config
from meshrl.config.names import MODEL, ROLLOUT
from meshrl.config.root import PPOConfig
from meshrl.config.split_rollout import MODEL_TYPES


def eight_bit_problems(config: PPOConfig) -> list[str]:
    """A cache of 8 bits is read by kernels of a GPU; what corrects the rounding needs the rollout's log-probs."""
    rollout, problems = config.actor_rollout_ref.rollout, []
    if rollout.kv_cache_dtype != "auto" and config.trainer.device == "cpu":
        problems.append(
            f"{ROLLOUT}.kv_cache_dtype={rollout.kv_cache_dtype} is for GPUs, and trainer.device=cpu: set it to auto"
        )
    if rollout.quantization is not None and rollout.dtype in ("fp16", "float16"):
        problems.append(
            f"{ROLLOUT}.quantization={rollout.quantization} does not go with {ROLLOUT}.dtype={rollout.dtype}, whose "
            "largest numbers are too small for its products: set bfloat16"
        )
    if rollout.rounds and not rollout.calculate_log_probs and correction_of(config).rollout_is is not None:
        problems.append(
            f"{ROLLOUT}.calculate_log_probs=false leaves out what corrects for generation in 8 bits: set it to true, "
            "or algorithm.rollout_correction.rollout_is=off"
        )
    return problems


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
