"""Checks of models: their folders, families, LoRA adapters, FP8, images and router replay.

A model must be complete on disk, and must fit the engine that runs it and the length of the samples.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import used_engines
from meshrl.config.data import DataConfig
from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.config.families import (
    CUT_FAMILIES,
    GATED_DELTA,
    SEEING,
    dropout_problem,
    family_of,
    longest_rotation,
    packing_problem,
    padding_problem,
)
from meshrl.config.keys import ACTOR, MODEL, REF, ROLLOUT, changed_keys
from meshrl.config.model_folder import (
    EXPERT_COUNTS,
    PROCESSOR_FILES,
    classifier_problem,
    fit_problems,
    folder_problems,
    has_processor,
    misfit_problems,
    quantized_problem,
    read_header,
    read_model_config,
    tensor_file_problems,
)
from meshrl.config.rl import PPOConfig, correction_of
from meshrl.config.rollout import SEEING_ROLLOUTS, VLLM_ADAPTER_RANKS
from meshrl.config.supervised import SFTDataConfig, SupervisedConfig


def scoring_problems(shape: dict[str, Any], prefix: str) -> list[str]:
    """Check that Transformers has a model of this family with a head of one number per token (critic, reward model)."""
    row = family_of(shape)
    if row is None or row.scores:
        return []
    return [
        f"{prefix}.path: Transformers has no language model of the kind {shape['model_type']} with a head for scores: "
        "take another"
    ]


def family_problems(shape: dict[str, Any], model: ModelConfig, prefix: str) -> list[str]:
    """Check by the table of families that training reproduces the model's log-probs, with packed or padded batches."""
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
    """Return a message if packed training would ignore the model's attention dropout.

    meshrl's attention for packed samples has no dropout.
    """
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
    """Return all problems of a model's folder for an engine and for samples of `length` tokens.

    `prefix` and `engine_prefix` are the sections of the model and of the engine. `length_names` are the keys of the
    length. A model that `scores` is a critic or reward model, whose folder may hold a classifier.
    """
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
        # The reference's FP8 settings are in the actor's section.
        problems += training_problems(shape, engine, ACTOR if engine_prefix == REF else engine_prefix, prefix)
    return problems + fit_problems(shape, engine, engine_prefix)


# Checks of LoRA's keys: the layers that may have an adapter, and the adapter's rank.

# Modules whose adapters cannot be merged into the weights that a rollout receives.
UNMERGEABLE = ("lm_head", "embed_tokens")


def adapter_problems(config: PPOConfig) -> list[str]:
    """Return one message for each property of the LoRA adapters that the rollout does not support."""
    model, rollout, most = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, VLLM_ADAPTER_RANKS[-1]
    unmergeable = [name for name in UNMERGEABLE if name in model.target_modules]
    problems = []
    if model.lora_rank and unmergeable:
        problems.append(
            f"{MODEL}.target_modules: adapters of {' and '.join(unmergeable)} cannot be merged into the weights that "
            "the rollout gets: name linear layers before the head alone"
        )
    alone = rollout.update_weights_adapters == "alone" and config.actor_rollout_ref.hybrid_engine
    if rollout.name == "vllm" and alone and model.lora_rank > most:
        problems.append(
            f"{MODEL}.lora_rank ({model.lora_rank}) is above {most}, the most that vLLM takes of adapters alone: set "
            f"{ROLLOUT}.update_weights_adapters=merged"
        )
    return problems


def target_problems(model: ModelConfig, prefix: str) -> list[str]:
    """Return a message if the model has no linear layer of a name in `target_modules`.

    Names are compared with the headers of the safetensors files. The check is skipped if a file is damaged.
    """
    folder = Path(model.path or "nowhere")
    is_named = model.lora_rank and model.lora_adapter_path is None and model.target_modules != ["all-linear"]
    if not is_named or tensor_file_problems(folder):
        return []
    headers = [read_header(file)[1] for file in folder.glob("*.safetensors")]
    matrices = [name for header in headers for name, entry in header.items() if len(entry.get("shape", ())) == 2]
    # Only the layer's own name is compared, because its parents' names in the files may differ from the model's.
    there = sorted({name.split(".")[-2] for name in matrices if name.endswith(".weight")})
    unknown = [name for name in model.target_modules if name.rpartition(".")[2] not in (*there, *UNMERGEABLE)]
    if not there or not unknown:
        return []
    linear = [name for name in there if name not in UNMERGEABLE]
    return [
        f"{prefix}.target_modules: {folder} has no linear layer {', '.join(unknown)}: name some of "
        f"{', '.join(linear)}, or all of them as [all-linear]"
    ]


# Checks of FP8: the models and devices that can generate (`rollout.quantization`, `kv_cache_dtype`) or train with it.


def eight_bit_problems(config: PPOConfig) -> list[str]:
    """Check the requirements of FP8 in the rollout and in training.

    An FP8 KV cache needs a GPU. FP8 matmuls in the rollout need another dtype than float16. The correction of rounding
    needs the rollout's log-probs.
    """
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
    """Check that the embedded rollout supports FP8 matmuls for the model's family (`CUT_FAMILIES`, without experts)."""
    policy = config.actor_rollout_ref
    if policy.rollout.quantization is None or not (found := _shape(policy.model)):
        return []
    if (kind := found.get("model_type")) in CUT_FAMILIES:
        return []
    return [
        f"{ROLLOUT}.quantization={policy.rollout.quantization} is for models of type {', '.join(CUT_FAMILIES)}, and "
        f"{MODEL}.path={policy.model.path} is {kind}: leave it out"
    ]


def training_problems(shape: dict[str, Any], engine: EngineConfig, prefix: str, model_prefix: str) -> list[str]:
    """Check that a model can be trained with FP8 matmuls.

    It needs dense layers without linear attention, matrices whose sizes are multiples of 16, and another parameter
    dtype than float16.
    """
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
    """Return the reason that an engine's FP8 training does not work or gains nothing on a GPU, or None.

    FP8 training on GPUs needs bfloat16 parameters and compiled layers.
    """
    mixed = engine.fsdp_config.mixed_precision
    name = f"mixed_precision.product_dtype={mixed.product_dtype}"
    if engine.rounds and mixed.param_dtype not in ("bf16", "bfloat16"):
        return f"{name} gives bf16 on GPUs, not param_dtype={mixed.param_dtype}: set bf16"
    if engine.rounds and not engine.use_torch_compile:
        return f"{name} gains nothing on GPUs without compiled layers: set use_torch_compile=true"
    return None


def gpu_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return the results of `gpu_problem` for all engines of a run, with the names of their sections."""
    found = {prefix: gpu_problem(engine) for prefix, engine in used_engines(config).items()}
    return [f"{prefix}.fsdp_config.{problem}" for prefix, problem in found.items() if problem is not None]


# Checks of vision-language models: settings that do not support images yet.


def seeing_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return one message for each setting that does not support images, if the model is a vision-language model.

    Keys of images that are set for a model without images are problems as well.
    """
    if isinstance(config, SupervisedConfig):
        pairs = {"pairs of answers": not isinstance(config.data, SFTDataConfig)}
        found = _problems(config.model, "model", config.engine, "engine", pairs)
        return found + _image_key_problems(config, config.model)
    policy = config.actor_rollout_ref
    rollout = policy.rollout
    sends_adapters = policy.model.has_adapters and policy.hybrid_engine and rollout.update_weights_adapters != "merged"
    given = {
        f"{ROLLOUT}.name={rollout.name} (use {' or '.join(SEEING_ROLLOUTS)})": rollout.name not in SEEING_ROLLOUTS,
        f"adapters sent to vllm alone (use {ROLLOUT}.update_weights_adapters=merged)": sends_adapters
        and rollout.name == "vllm",
        f"{ROLLOUT}.name=vllm in the processes of {rollout.replica_size} ranks (use {ROLLOUT}.as_server=true)": (
            rollout.name == "vllm" and rollout.replica_size > 1 and not rollout.as_server
        ),
        f"a critic (algorithm.adv_estimator={config.algorithm.adv_estimator})": uses_critic(
            config.critic, config.algorithm.adv_estimator
        ),
        "reward_model.enable=true": config.reward_model.enable,
    }
    idle = [
        f"{name}.freeze_vision_tower=true has no effect: only the policy may see images"
        for name, engine in (("critic", config.critic), ("reward_model", config.reward_model))
        if engine.freeze_vision_tower
    ]
    problems = _problems(policy.model, MODEL, policy.actor, ACTOR, given) + idle
    problems += _image_key_problems(config, policy.model)
    if policy.ref.model.path is not None and _kind(policy.model) in SEEING:
        reference = replace(policy.model, path=policy.ref.model.path)
        if (kind := _kind(reference)) not in SEEING:
            problems.append(
                f"{REF}.model.path={reference.path} ({kind}) does not see the images of the policy's prompts"
            )
        elif not has_processor(reference.path or ""):
            problems.append(_no_processor(f"{REF}.model", reference))
    return problems


def _image_key_problems(config: PPOConfig | SupervisedConfig, model: ModelConfig) -> list[str]:
    """Return a message if a column of images is named for a model that is known to take no images."""
    kind = _kind(model)
    if kind is None or kind in SEEING:
        return []
    return [
        f"{name}={config.data.image_key} has no effect: the model ({kind}) sees no images; leave it out"
        for name in changed_keys(config, "data.image_key")
        if isinstance(config.data, DataConfig | SFTDataConfig) and config.data.image_key is not None
    ]


def _kind(model: ModelConfig) -> str | None:
    return _shape(model).get("model_type")


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Return a model's config, or nothing if it cannot be read, which `model_problems` reports."""
    try:
        return read_model_config(model)
    except ValueError:
        return {}


def _no_processor(name: str, model: ModelConfig) -> str:
    return f"{name}.path: {model.path} sees images, but has no {' or '.join(PROCESSOR_FILES)} that says how"


def _problems(
    model: ModelConfig, model_name: str, engine: EngineConfig, engine_name: str, others: dict[str, bool]
) -> list[str]:
    shape = _shape(model)
    kind = shape.get("model_type")
    if kind not in SEEING:
        frozen = shape and engine.freeze_vision_tower
        return [f"{engine_name}.freeze_vision_tower=true has no effect: the model sees no images"] if frozen else []
    given = {
        f"{engine_name}.strategy=megatron (use fsdp2)": engine.strategy == "megatron",
        f"{model_name}.use_remove_padding=false": not model.use_remove_padding,
        **others,
    }
    words = f"not supported yet: a model that sees images ({kind}) with"
    problems = [f"{words} {what}" for what, is_set in given.items() if is_set]
    if model.path and not has_processor(model.path):
        problems.append(_no_processor(model_name, model))
    return problems


# Checks of `actor.router_replay`: models that have routes, and rollouts that record their routes.

MODE = f"{ACTOR}.router_replay.mode"


def replay_problems(config: PPOConfig) -> list[str]:
    """Check that the routes to replay are recorded: by the pass for old log-probs (R2) or by the rollout (R3)."""
    policy = config.actor_rollout_ref
    mode, rollout = policy.actor.router_replay.mode, policy.rollout
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        return [
            f"{MODE}=R2 replays the routes of the pass for old log-probs, which bypass_mode=true leaves out: set R3, "
            "or algorithm.rollout_correction.bypass_mode=false"
        ]
    if mode == "R3" and rollout.name == "vllm" and rollout.as_server:
        return [
            f"not supported yet: {MODE}=R3 with {ROLLOUT}.as_server=true, for vLLM's server does not say where its "
            "tokens went: set as_server=false, R2, or another rollout"
        ]
    return []


def replay_file_problems(config: PPOConfig) -> list[str]:
    """Check that a model with router replay has experts."""
    policy = config.actor_rollout_ref
    if policy.actor.router_replay.mode == "disabled":
        return []
    found = _shape(policy.model)
    if not found or any(found.get(name) for name in (*EXPERT_COUNTS, "moe_num_experts")):
        return []
    return [
        f"{MODE}={policy.actor.router_replay.mode} is for mixtures of experts, and {MODEL}.path={policy.model.path} "
        f"({found.get('model_type')}) has no experts: set disabled"
    ]
