"""Checks of 8 bits: which models and devices generate with them (`rollout.quantization`, `kv_cache_dtype`) or train."""

from typing import Any

from meshrl.config.correction import correction_of
from meshrl.config.engine import EngineConfig
from meshrl.config.families import CUT_FAMILIES, GATED_DELTA
from meshrl.config.model_folder import EXPERT_COUNTS, read_model_config
from meshrl.config.names import MODEL, ROLLOUT
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.used_engines import used_engines


def eight_bit_problems(config: PPOConfig) -> list[str]:
    """A cache of 8 bits is read by kernels of a GPU; what corrects the rounding needs the rollout's log-probs."""
    policy, problems = config.actor_rollout_ref, []
    rollout = policy.rollout
    if rollout.kv_cache_dtype != "auto" and config.trainer.device == "cpu":
        problems.append(
            f"{ROLLOUT}.kv_cache_dtype={rollout.kv_cache_dtype} is for GPUs, and trainer.device=cpu: set it to auto"
        )
    if rollout.quantization is not None and rollout.dtype in ("fp16", "float16"):
        problems.append(
            f"{ROLLOUT}.quantization={rollout.quantization} does not go with {ROLLOUT}.dtype={rollout.dtype}, whose "
            "largest numbers are too small for its products: set bfloat16"
        )
    rounds = rollout.rounds or policy.actor.rounds
    if rounds and not rollout.calculate_log_probs and correction_of(config).rollout_is is not None:
        problems.append(
            f"{ROLLOUT}.calculate_log_probs=false leaves out what corrects for products in 8 bits: set it to true, "
            "or algorithm.rollout_correction.rollout_is=off"
        )
    return problems


def eight_bit_file_problems(config: PPOConfig) -> list[str]:
    """The model's layers must be known, and have no experts."""
    policy = config.actor_rollout_ref
    if policy.rollout.quantization is None or not (found := read_model_config(policy.model)):
        return []
    if (kind := found.get("model_type")) in CUT_FAMILIES:
        return []
    return [
        f"{ROLLOUT}.quantization={policy.rollout.quantization} is for models of type {', '.join(CUT_FAMILIES)}, and "
        f"{MODEL}.path={policy.model.path} is {kind}: leave it out"
    ]


def training_problems(shape: dict[str, Any], engine: EngineConfig, prefix: str, model_prefix: str) -> list[str]:
    """Products in 8 bits are for layers without experts; other types have too small numbers, or none, on GPUs."""
    if not engine.rounds:
        return []
    mixed, problems = engine.fsdp_config.mixed_precision, []
    name = f"{prefix}.fsdp_config.mixed_precision.product_dtype={mixed.product_dtype}"
    field = next((field for field in EXPERT_COUNTS if shape.get(field)), None)
    if field is not None:
        problems.append(f"{name} takes no experts, and {model_prefix} has {field}={shape[field]}: leave it out")
    if shape.get("model_type") in GATED_DELTA:
        kind = shape["model_type"]
        problems.append(f"{name} has not been tried on linear attention, and {model_prefix} is {kind}: leave it out")
    sizes = {field: shape[field] for field in ("hidden_size", "intermediate_size") if shape.get(field)}
    problems += [
        f"{name} takes matrices whose sizes are multiples of 16, and {model_prefix} has {field}={size}: leave it out"
        for field, size in sizes.items()
        if size % 16
    ]
    if mixed.param_dtype in ("fp16", "float16"):
        problems.append(f"{name} gives bf16, not param_dtype={mixed.param_dtype}: set bf16")
    return problems


def gpu_problem(engine: EngineConfig) -> str | None:
    """Why an engine would not train in 8 bits on a GPU, if it is to."""
    mixed = engine.fsdp_config.mixed_precision
    name = f"mixed_precision.product_dtype={mixed.product_dtype}"
    if engine.rounds and mixed.param_dtype not in ("bf16", "bfloat16"):
        return f"{name} gives bf16 on GPUs, not param_dtype={mixed.param_dtype}: set bf16"
    if engine.rounds and not engine.use_torch_compile:
        return f"{name} gains nothing on GPUs without compiled layers: set use_torch_compile=true"
    return None


def gpu_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """The same of all engines of a run, with the names of their sections."""
    found = {prefix: gpu_problem(engine) for prefix, engine in used_engines(config).items()}
    return [f"{prefix}.fsdp_config.{problem}" for prefix, problem in found.items() if problem is not None]
