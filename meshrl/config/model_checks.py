"""Whether a model's folder is whole, and fits the engine that is to hold it and the samples that it is to read."""

from pathlib import Path
from typing import Any

from meshrl.config.adapters import target_problems
from meshrl.config.eight_bits import training_problems
from meshrl.config.engine import EngineConfig
from meshrl.config.model import ModelConfig
from meshrl.config.model_files import misfit_problems
from meshrl.config.model_folder import (
    GATED_DELTA,
    SCORING_DELTA,
    classifier_problem,
    fit_problems,
    folder_problems,
    packing_problems,
    quantized_problem,
    read_model_config,
)
from meshrl.config.names import ACTOR, REF


def scoring_problems(shape: dict[str, Any], prefix: str) -> list[str]:
    """Whether there is a model of this kind with a head of one number a token."""
    kind = shape.get("model_type")
    if kind not in GATED_DELTA or kind in SCORING_DELTA:
        return []
    return [
        f"{prefix}.path: Transformers has no language model of the kind {kind} with a head for scores: take another"
    ]


def model_problems(
    model: ModelConfig,
    prefix: str,
    engine: EngineConfig,
    engine_prefix: str,
    length: int,
    length_names: str,
    *,
    scores: bool = False,
) -> list[str]:
    """What is wrong with a model for samples of `length` tokens; one that `scores` may be a classifier."""
    problems = folder_problems(model, prefix)
    if model.path and not model.random_init:
        misfits = misfit_problems(Path(model.path), model.override_config)
        problems += [f"{prefix}.path: {problem}" for problem in misfits]
    try:
        shape: dict[str, Any] = read_model_config(model)
    except ValueError as error:
        return [*problems, f"{prefix}.path: {error}"]
    if model.path and (quantized := quantized_problem(Path(model.path))):
        problems.append(f"{prefix}.path: {quantized}")
    if not scores and (classifier := classifier_problem(model, shape)):
        problems.append(f"{prefix}.path: {classifier}")
    if scores:
        problems += scoring_problems(shape, prefix)
    positions = shape.get("max_position_embeddings")
    if positions is not None and length > positions:
        problems.append(f"{length_names} ({length}) is over the model's max_position_embeddings ({positions})")
    if engine.strategy != "megatron":
        problems += packing_problems(shape, model, prefix)
        problems += target_problems(model, prefix)
        # A reference has the actor's.
        problems += training_problems(shape, engine, ACTOR if engine_prefix == REF else engine_prefix, prefix)
    return problems + fit_problems(shape, engine, engine_prefix)
