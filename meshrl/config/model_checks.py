"""Whether a model's folder is whole, and fits the engine that is to hold it and the samples that it is to read."""

from pathlib import Path
from typing import Any

from meshrl.config.adapters import target_problems
from meshrl.config.eight_bits import training_problems
from meshrl.config.engine import EngineConfig
from meshrl.config.families import (
    dropout_problem,
    family_of,
    longest_rotation,
    packing_problem,
    padding_problem,
)
from meshrl.config.model import ModelConfig
from meshrl.config.model_files import misfit_problems
from meshrl.config.model_folder import (
    classifier_problem,
    fit_problems,
    folder_problems,
    quantized_problem,
    read_model_config,
)
from meshrl.config.names import ACTOR, REF


def scoring_problems(shape: dict[str, Any], prefix: str) -> list[str]:
    """Whether there is a model of this kind with a head of one number a token."""
    row = family_of(shape)
    if row is None or row.scores:
        return []
    return [
        f"{prefix}.path: Transformers has no language model of the kind {shape['model_type']} with a head for scores: "
        "take another"
    ]


def family_problems(shape: dict[str, Any], model: ModelConfig, prefix: str) -> list[str]:
    """What the training engines would compute otherwise than the model's own forward, by its family's name."""
    if "model_type" not in shape:
        return []
    kind, unpacked, unpadded = shape["model_type"], packing_problem(shape), padding_problem(shape)
    if model.use_remove_padding and unpacked is not None:
        advice = f"set {prefix}.use_remove_padding=false" if unpadded is None else "take a model of another family"
        return [f"{prefix}.path: samples of a {kind} model cannot share a row ({unpacked}): {advice}"]
    row = family_of(shape)
    if not model.use_remove_padding and unpadded is not None and not (row is not None and row.sees):
        advice = f"set {prefix}.use_remove_padding=true" if unpacked is None else "take a model of another family"
        return [f"{prefix}.path: a padded batch of a {kind} model has other log-probs ({unpadded}): {advice}"]
    return []


def _checkpointing_problems(shape: dict[str, Any], model: ModelConfig, prefix: str) -> list[str]:
    row = family_of(shape)
    if row is None or row.checkpoints or not model.enable_gradient_checkpointing:
        return []
    return [
        f"{prefix}.path: Transformers has no gradient checkpointing for a {shape['model_type']} model: set "
        f"{prefix}.enable_gradient_checkpointing=false"
    ]


def _dropout_problems(shape: dict[str, Any], model: ModelConfig, prefix: str) -> list[str]:
    """Our attention, which packed samples are trained with, drops no weights out."""
    if not shape or not model.use_remove_padding or (found := dropout_problem(shape)) is None:
        return []
    field = found.split("=")[0]
    return [
        f"{prefix}.path: the model has {found}, which samples that share a row are not trained with: set "
        f"{prefix}.override_config.{field}=0"
    ]


def _rotation_problems(shape: dict[str, Any], length: int, length_names: str, prefix: str) -> list[str]:
    if (limit := longest_rotation(shape)) is None or length <= limit:
        return []
    return [
        f"{length_names} ({length}) is over {limit} tokens, beyond which the angles of the model's rotary embedding "
        f"(longrope) depend on the longest sample of a micro-batch: take shorter samples, or a rope_type with fixed "
        f"angles ({prefix}.override_config.rope_parameters)"
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
    trained: bool = True,
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
        problems += family_problems(shape, model, prefix)
        if trained:
            problems += _dropout_problems(shape, model, prefix) + _checkpointing_problems(shape, model, prefix)
        problems += _rotation_problems(shape, length, length_names, prefix)
        problems += target_problems(model, prefix)
        # A reference has the actor's.
        problems += training_problems(shape, engine, ACTOR if engine_prefix == REF else engine_prefix, prefix)
    return problems + fit_problems(shape, engine, engine_prefix)
