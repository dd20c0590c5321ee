"""Everything that is checked before a worker starts. Pure Python: no torch, no transformers, no Ray."""

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.config.adapters import adapter_problems
from meshrl.config.algorithm import ESTIMATORS, GROUP_ESTIMATORS
from meshrl.config.algorithm_checks import (
    bypass_problems,
    distillation_problems,
    estimator_problems,
    filter_groups_problems,
    first_kl_problems,
    idle_key_problems,
    reference_problems,
    threshold_problems,
)
from meshrl.config.asynchronous import async_problems
from meshrl.config.chat_template import chat_template_problems
from meshrl.config.checkpoint_checks import checkpoint_notes, checkpoint_problems
from meshrl.config.correction import RATIO_LOSSES
from meshrl.config.critic import uses_critic
from meshrl.config.data_checks import (
    custom_class_problems,
    data_problems,
    sample_problems,
    sampler_file_problems,
)
from meshrl.config.data_files import data_file_problems
from meshrl.config.eight_bits import eight_bit_file_problems, eight_bit_problems
from meshrl.config.engine import EngineConfig
from meshrl.config.engine_arguments import engine_argument_problems
from meshrl.config.errors import ConfigError, Note
from meshrl.config.families import GATED_DELTA, engine_problem, gpu_problem
from meshrl.config.gates import gate_problems
from meshrl.config.layout import engine_problems, rollout_problems, sequence_ranks
from meshrl.config.model import ModelConfig
from meshrl.config.model_checks import model_problems, scoring_problems
from meshrl.config.model_folder import read_model_config
from meshrl.config.multi_turn import multi_turn_file_problems, multi_turn_problems
from meshrl.config.names import ACTOR, COMMAND_LINE, MODEL, REF, ROLLOUT
from meshrl.config.optim import OptimConfig
from meshrl.config.own_code import external_lib_problems, own_function_problems
from meshrl.config.packages import package_problems
from meshrl.config.pools import pool_problems, ranks_of, whose
from meshrl.config.preferences import PreferenceConfig, preference_problems
from meshrl.config.recipe import VERL_CONFIGS
from meshrl.config.reference_layout import reads_the_other_engine, reference_layout_problems
from meshrl.config.reward import reward_file_problems, reward_problems
from meshrl.config.rollout import READERS, SPEED_KEYS, UNNEEDED
from meshrl.config.root import PPOConfig
from meshrl.config.router_replay import replay_file_problems, replay_problems
from meshrl.config.sampling import sampling_problems
from meshrl.config.seeing import seeing_problems
from meshrl.config.sft import SupervisedConfig
from meshrl.config.split_rollout import split_file_problems, split_problems
from meshrl.config.telemetry_checks import profiler_problems, timeline_problems
from meshrl.config.trainer import RunConfig
from meshrl.config.tree import changed_keys, counted_as_changed, fill_followers, get_value
from meshrl.config.units import batch_problems
from meshrl.config.values import unread_notes, unread_problems, unsupported, value_problems

# What the other kind of FSDP reads.
FSDP_ONLY_KEYS = (
    "ulysses_sequence_parallel_size",
    "context_parallel_size",
    "use_torch_compile",
    "activation_memory_budget",
    "keep_logits_megabytes",
)
FSDP_ONLY_MODEL_KEYS = ("lora_rank", "lora_adapter_path", "enable_activation_offload", "use_remove_padding")
# Where and in which pieces a critic would run, which is nothing to miss where there is none.
CRITIC_PLACES = (
    "critic.strategy", "critic.fsdp_config.", "critic.megatron.", "critic.ulysses_sequence_parallel_size",
    "critic.ppo_micro_batch_size_per_gpu", "critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu",
)  # fmt: skip
# What is read while a model is trained only.
TRAINING_KEYS = (
    "grad_clip", "keep_logits_megabytes", "fsdp_config.optimizer_offload", "model.enable_gradient_checkpointing",
    "model.enable_activation_offload", "model.lora_rank", "megatron.use_distributed_optimizer",
    "megatron.overlap_grad_reduce", "megatron.overlap_param_gather", "megatron.grad_offload",
    "megatron.optimizer_offload",
)  # fmt: skip
# Policy losses whose objective is a mean of sequences.
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")
IDLE_FSDP_KEYS = {"fsdp2": "use_orig_params", "fsdp": "reshard_after_forward"}


def ensure_runnable(config: PPOConfig | SupervisedConfig, check_files: bool = True) -> None:
    """Raise one `ConfigError` with all that is unsupported, wrong in the config or, with its files, not installed."""
    problems = unsupported(config) + check_config(config, check_files)
    problems += package_problems(config) if check_files else []
    if problems:
        raise ConfigError(problems)


def check_config(config: PPOConfig | SupervisedConfig, check_files: bool = True) -> list[str]:
    """All problems of a config, a line each; `check_files` also looks at data, model folder and reward function."""
    return [line for line in _checked(config, check_files) if not isinstance(line, Note)]


def _checked(config: PPOConfig | SupervisedConfig, check_files: bool) -> list[str]:
    """Problems, and notes on keys without effect that do no harm."""
    config = copy.deepcopy(config)
    fill_followers(config)
    problems = [problem for _, problem in value_problems(config)]
    if problems:
        return problems  # the checks below count on numbers in their ranges
    return (
        _check_supervised(config, check_files)
        if isinstance(config, SupervisedConfig)
        else _check_ppo(config, check_files)
    )


def check_notes(config: PPOConfig | SupervisedConfig, sources: Mapping[str, str]) -> list[str]:
    """Keys that were written and do nothing here, but could do no harm either: a line each."""
    config = copy.deepcopy(config)
    fill_followers(config)
    notes = [*checkpoint_notes(config), *_balance_notes(config)]
    if config.trainer.backend != "ray":
        notes += [f"{name} is for trainer.backend=ray: no Ray is started" for name in changed_keys(config, "ray_init.")]
    if isinstance(config, PPOConfig):
        rollout = config.actor_rollout_ref.rollout
        notes += [
            f"{name} has no effect: the model reads the policy's tokens"
            for role in ("critic", "reward_model")
            for name in changed_keys(config, f"{role}.model.tokenizer_path")
        ]
        notes += [
            f"{name} is not needed with {ROLLOUT}.name={rollout.name}: {why}"
            for key, why in UNNEEDED.get(rollout.name, {}).items()
            for name in changed_keys(config, f"{ROLLOUT}.{key}")
        ]
    # A default that somebody wrote is what happens anyway; said of a key that nothing reads, it is worth a word.
    # A file may be all of a config, as `meshrl config` prints it.
    written = {name for name, source in sources.items() if source == COMMAND_LINE}
    if {f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")} <= written:
        notes.append(
            f"{ACTOR}.clip_ratio has no effect beside clip_ratio_low and clip_ratio_high, which say both sides"
        )
    if isinstance(config, PPOConfig) and f"{ROLLOUT}.enable_prefix_caching" in written:
        notes += _prefix_notes(config)
    # What is switched off by its own word asks for nothing.
    written -= {name for name in written if name.endswith(".enable") and not get_value(config, name)}
    known = _checked(config, check_files=False)
    with counted_as_changed(written):
        notes += unread_notes(config)
        more = _checked(config, check_files=False)
    problems = [line for line in known if not isinstance(line, Note)]
    found = [line for line in [*known, *more] if line not in problems]
    # What a file of verl chooses for all of its scripts is nothing that somebody wrote.
    chosen = tuple(f"{name} has no effect" for name, source in sources.items() if source in VERL_CONFIGS)
    by_key = {line.partition(" has no effect")[0]: str(line) for line in [*notes, *found]}  # one reason for each key
    return [line for line in by_key.values() if not line.startswith(chosen)]


def _check_ppo(config: PPOConfig, check_files: bool) -> list[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    world_size = config.trainer.world_size
    problems = [
        *engine_problems(actor, ACTOR, world_size),
        *reference_layout_problems(config),
        *rollout_problems(rollout, ROLLOUT, world_size, is_apart=not config.actor_rollout_ref.hybrid_engine),
        *split_problems(config),
        *replay_problems(config),
        *eight_bit_problems(config),
        *batch_problems(config),
        *async_problems(config),
        *pool_problems(config),
        *data_problems(config),
        *chat_template_problems(config.data.apply_chat_template_kwargs, config.actor_rollout_ref.model, check_files),
        *gate_problems(config),
        *_token_budget_problems(config),
        *sampling_problems(config),
        *_rollout_size_problems(config),
        *_reader_problems(config),
        *_budget_problems(config),
        *engine_argument_problems(config),
        *adapter_problems(config),
        *multi_turn_problems(config),
        *_algorithm_problems(config),
        *estimator_problems(config),
        *distillation_problems(config),
        *idle_key_problems(config),
        *filter_groups_problems(config),
        *first_kl_problems(config),
        *reference_problems(config),
        *bypass_problems(config),
        *threshold_problems(config),
        *_loss_problems(config),
        *_optim_problems(actor.optim, f"{ACTOR}.optim"),
        *_run_problems(config.trainer),
        *profiler_problems(config),
        *checkpoint_problems(config),
        *_idle_problems(config, actor, ACTOR),
        *_critic_problems(config, check_files),
        *_reward_model_problems(config, check_files),
        *reward_problems(
            config.reward, config.custom_reward_function, config.reward_manager, config.data.max_response_length
        ),
    ]
    problems += unread_problems(config, problems)
    if check_files:
        libraries = external_lib_problems(config)  # first: they may add families, losses and functions
        problems += _file_problems(config)
        problems += model_problems(
            config.actor_rollout_ref.model,
            MODEL,
            actor,
            ACTOR,
            config.data.max_prompt_length + config.data.max_response_length,
            "data.max_prompt_length + max_response_length",
        )
        problems += split_file_problems(config)
        problems += replay_file_problems(config)
        problems += eight_bit_file_problems(config)
        problems += seeing_problems(config)
        problems += _generation_problems(config)
        problems += sampler_file_problems(config)
        problems += custom_class_problems(config)
        problems += _reference_file_problems(config)
        problems += reward_file_problems(
            config.reward, config.custom_reward_function, config.reward_manager, config.reward_model.enable
        )
        problems += multi_turn_file_problems(config)
        problems += libraries or own_function_problems(config)
    return problems


def _shape_of(model: ModelConfig) -> dict[str, Any]:
    """What config.json says; nothing where it cannot be read, which is said where the model is checked."""
    try:
        return read_model_config(model)
    except ValueError:
        return {}


def _balance_notes(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Say that a model's own loss for balanced experts is not added, where its config.json asks for it."""
    model, engine, prefix, role = (
        (config.actor_rollout_ref.model, config.actor_rollout_ref.actor, MODEL, ACTOR)
        if isinstance(config, PPOConfig)
        else (config.model, config.engine, "model", "engine")
    )
    shape = _shape_of(model)
    key = "megatron.override_transformer_config.moe_aux_loss_coeff"
    has_own = engine.strategy == "megatron" and engine.megatron.override_transformer_config.get("moe_aux_loss_coeff")
    if has_own or not (shape.get("output_router_logits") and (weight := shape.get("router_aux_loss_coef"))):
        return []
    return [
        f"{prefix}.path: the model's config.json asks for a loss for balanced experts (output_router_logits with "
        f"router_aux_loss_coef={weight}), which is not added: {role}.{key}={weight} with {role}.strategy=megatron does"
    ]


def _generation_problems(config: PPOConfig) -> list[str]:
    """What the engines of the rollout and of the judge would compute otherwise than the model's own forward."""
    model, name, judge = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.name, config.reward.judge
    problems = _engine_problems(name, _shape_of(model), f"{ROLLOUT}.name")
    if judge.path is not None:
        problems += _engine_problems(judge.engine, _shape_of(ModelConfig(path=judge.path)), "reward.judge.engine")
    if config.trainer.device == "cuda":
        problems += gpu_generation_problems(config)
    shape = _shape_of(model) if name == "embedded" and not problems else {}
    if shape.get("model_type") in GATED_DELTA and not model.use_remove_padding:
        return [
            f"actor_rollout_ref.model.use_remove_padding=false trains {shape['model_type']} with Transformers' own "
            "attention, by which the embedded rollout cannot generate: leave it true (samples do not leak into one "
            "another), or set rollout.name to vllm, sglang or hf"
        ]
    return problems


def gpu_generation_problems(config: PPOConfig) -> list[str]:
    """Models that the embedded rollout, or the judge, generates with on a CPU only."""
    policy, judge = config.actor_rollout_ref, config.reward.judge
    asked = {f"{ROLLOUT}.name": (policy.rollout.name, policy.model)}
    if judge.path is not None:
        asked["reward.judge.engine"] = (judge.engine, ModelConfig(path=judge.path))
    found = {key: (_shape_of(model), engine) for key, (engine, model) in asked.items()}
    return [
        f"{key}=embedded cannot generate with a {shape['model_type']} model on a GPU ({why}): use hf, vllm or sglang"
        for key, (shape, engine) in found.items()
        if engine == "embedded" and "model_type" in shape and (why := gpu_problem(shape)) is not None
    ]


def _engine_problems(engine: str, shape: dict[str, Any], key: str) -> list[str]:
    """By the table of families, what an engine cannot generate with."""
    if "model_type" not in shape or (why := engine_problem(engine, shape)) is None:
        return []
    others = [name for name in ("hf", "vllm", "sglang") if engine_problem(name, shape) is None]
    return [f"{key}={engine} cannot generate with a {shape['model_type']} model ({why}): use {' or '.join(others)}"]


def _prefix_notes(config: PPOConfig) -> list[str]:
    """Prefix caching that somebody asked for and a model with states cannot have."""
    rollout, kind = config.actor_rollout_ref.rollout, _shape_of(config.actor_rollout_ref.model).get("model_type")
    if rollout.name != "embedded" or not rollout.enable_prefix_caching or kind not in GATED_DELTA:
        return []
    return [
        f"{ROLLOUT}.enable_prefix_caching=true has no effect with a model of type {kind}: of a prefix, its linear "
        "attention would need the state, which is not kept"
    ]


def _reference_file_problems(config: PPOConfig) -> list[str]:
    """A reference of its own is read by the policy's tokenizer and run by the actor's engine."""
    ref, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    path, is_apart = ref.model.path, ref.has_own_devices
    if path is None and not is_apart:
        return []
    path = path or config.actor_rollout_ref.model.path
    model = _read_by_ids(replace(config.actor_rollout_ref.model, path=path, random_init=False, lora_rank=0), config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    words = "data.max_prompt_length + max_response_length"
    engine, name = ref.engine(actor), REF if is_apart else ACTOR
    return model_problems(model, f"{REF}.model", engine, name, longest, words, trained=False)


def _critic_problems(config: PPOConfig, check_files: bool) -> list[str]:
    """A critic is checked as the policy is; without one its settings would silently do nothing."""
    critic, estimator = config.critic, config.algorithm.adv_estimator
    if estimator in ESTIMATORS and (estimator == "gae") != uses_critic(critic, estimator):
        return [
            f"critic.enable={str(critic.enable).lower()} does not go with algorithm.adv_estimator={estimator}: "
            "gae needs a critic, the others have no use for one"
        ]
    if not uses_critic(critic, estimator):
        changed = [*changed_keys(config, "critic."), *changed_keys(config, "trainer.critic_warmup")]
        return [
            (Note if name.startswith(CRITIC_PLACES) else str)(
                f"{name} has no effect with algorithm.adv_estimator={estimator}: it has no critic"
            )
            for name in changed
        ]
    problems = [
        *engine_problems(critic, "critic", ranks_of(config, critic), whose(critic, "critic")),
        *_idle_engine_problems(config, critic, "critic", "critic.model"),
        *_optim_problems(critic.optim, "critic.optim"),
        *(
            f"{name} has no effect: a critic has values, and no logits to keep"
            for name in changed_keys(config, "critic.keep_logits_megabytes")
        ),
        *(
            f"{name} has no effect without critic.model.path: of the policy's model {MODEL}.trust_remote_code says it"
            for name in changed_keys(config, "critic.model.trust_remote_code")
            if critic.model.path is None
        ),
    ]
    actor = config.actor_rollout_ref.actor
    budgets = actor.activation_memory_budget, critic.activation_memory_budget
    shares_process = not critic.has_own_devices
    if shares_process and actor.use_torch_compile and critic.use_torch_compile and budgets[0] != budgets[1]:
        problems.append(
            f"{ACTOR}.activation_memory_budget ({budgets[0]}) and critic.activation_memory_budget ({budgets[1]}) "
            "must be equal: torch has one for all models of a process"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if critic.use_dynamic_bsz and critic.ppo_max_token_len_per_gpu * sequence_ranks(critic) < longest:
        problems.append(
            f"critic.ppo_max_token_len_per_gpu ({_times(critic.ppo_max_token_len_per_gpu, critic)}) must hold the "
            f"longest sample: data.max_prompt_length + max_response_length ({longest})"
        )
    if check_files and critic.model.path is not None:
        words = "data.max_prompt_length + max_response_length"
        problems += model_problems(
            _read_by_ids(critic.model, config), "critic.model", critic, "critic", longest, words, scores=True
        )
    elif check_files:  # it begins as the policy, which is looked at by itself
        problems += scoring_problems(_shape_of(config.actor_rollout_ref.model), "critic.model")
    return problems


def _read_by_ids(model: ModelConfig, config: PPOConfig) -> ModelConfig:
    """A model that gets the policy's token ids needs no tokenizer of its own."""
    policy = config.actor_rollout_ref.model
    return replace(model, tokenizer_path=model.tokenizer_path or policy.tokenizer_path or policy.path)


def _reward_model_problems(config: PPOConfig, check_files: bool) -> list[str]:
    model = config.reward_model
    if not model.enable:
        changed = changed_keys(config, "reward_model.")
        return [f"{name} has no effect without reward_model.enable=true" for name in changed]
    problems = engine_problems(model, "reward_model", ranks_of(config, model), whose(model, "reward_model"))
    problems += _idle_engine_problems(config, model, "reward_model", "reward_model.model")
    problems += [
        f"{name} has no effect: a reward model is not trained"
        for key in TRAINING_KEYS
        for name in changed_keys(config, f"reward_model.{key}")
    ]
    longest = config.data.max_prompt_length + config.data.max_response_length + 1
    budget = model.forward_max_token_len_per_gpu
    if model.use_dynamic_bsz and budget * sequence_ranks(model) < longest:
        problems.append(
            f"reward_model.forward_max_token_len_per_gpu ({_times(budget, model)}) must hold the longest sample and "
            f"one token more ({longest})"
        )
    if not model.use_dynamic_bsz and model.micro_batch_size_per_gpu is None:
        problems.append("set reward_model.micro_batch_size_per_gpu, or reward_model.use_dynamic_bsz=true")
    if check_files:
        words = "data.max_prompt_length + max_response_length + 1"
        scorer = _read_by_ids(model.model, config)
        problems += model_problems(
            scorer, "reward_model.model", model, "reward_model", longest, words, scores=True, trained=False
        )
    return problems


def _epoch_problems(config: SupervisedConfig) -> list[str]:
    """Validations and checkpoints after every pass stand for their numbers of steps, also in the checks after this."""
    trainer, problems = config.trainer, []
    for what in ("test", "save"):
        if not getattr(trainer, f"{what}_after_epoch"):
            continue
        if (steps := getattr(trainer, f"{what}_freq")) > 0:
            problems.append(f"trainer.{what}_freq={steps} and {what}_after_epoch=true both say when: choose one")
        setattr(trainer, f"{what}_freq", 1)
    return problems


def _check_supervised(config: SupervisedConfig, check_files: bool) -> list[str]:
    data, engine = config.data, config.engine
    problems = [
        *_epoch_problems(config),
        *engine_problems(engine, "engine", config.trainer.world_size),
        *batch_problems(config),
        *sample_problems(config),
        *_optim_problems(config.optim, "optim"),
        *_run_problems(config.trainer),
        *checkpoint_problems(config),
        *_idle_problems(config, engine, "engine"),
        *chat_template_problems(config.data.apply_chat_template_kwargs, config.model, check_files),
    ]
    longest, scores = config.longest_sequence, config.trains_scores
    names = "data.max_length + 1" if scores else "data.max_length"
    budget, together = data.max_token_len_per_gpu * sequence_ranks(engine), config.sequences_per_row
    if data.micro_batch_size_per_gpu is None and budget < longest * together:
        problems.append(
            f"data.max_token_len_per_gpu ({_times(data.max_token_len_per_gpu, engine)}) must hold the longest "
            f"{config.noun}: {names if together == 1 else f'{together} * ({names})'} ({longest * together})"
        )
    if isinstance(config, PreferenceConfig):
        problems += preference_problems(config)
    problems += unread_problems(config, problems)
    if check_files:
        problems += external_lib_problems(config)
        problems += _file_problems(config)
        problems += model_problems(config.model, "model", engine, "engine", longest, names, scores=scores)
        problems += seeing_problems(config)
        if isinstance(config, PreferenceConfig) and config.reference.path is not None:
            reference = replace(config.model, path=config.reference.path, random_init=False, lora_rank=0)
            words = "data.max_length"
            problems += model_problems(reference, "reference", engine, "engine", data.max_length, words, trained=False)
    return problems


def _token_budget_problems(config: PPOConfig) -> list[str]:
    """Micro-batches cut by tokens must hold the longest sample; those cut by samples need a number."""
    actor = config.actor_rollout_ref.actor
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    problems = []
    for prefix, switch, budget, size in (
        (ACTOR, "use_dynamic_bsz", "ppo_max_token_len_per_gpu", None),
        (ROLLOUT, *(f"log_prob_{name}" for name in _LOG_PROB_KEYS)),
        (REF, *(f"log_prob_{name}" for name in _LOG_PROB_KEYS)),
    ):
        engine = config.actor_rollout_ref.ref.engine(actor) if prefix == REF else actor
        if not get_value(config, f"{prefix}.{switch}"):
            if size and get_value(config, f"{prefix}.{size}") is None and actor.use_dynamic_bsz:
                problems.append(f"set {prefix}.{size}, or {prefix}.{switch}=true")
            continue
        tokens = get_value(config, f"{prefix}.{budget}")
        if tokens * sequence_ranks(engine) < prompt + response:
            problems.append(
                f"{prefix}.{budget} ({_times(tokens, engine)}) must hold the longest sample: data.max_prompt_length "
                f"+ max_response_length ({prompt} + {response} = {prompt + response})"
            )
    return list(dict.fromkeys(problems))


_LOG_PROB_KEYS = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


def _times(tokens: int, engine: EngineConfig) -> str:
    ranks = sequence_ranks(engine)
    return str(tokens) if ranks == 1 else f"{tokens} * {ranks} ranks = {tokens * ranks}"


def _rollout_size_problems(config: PPOConfig) -> list[str]:
    rollout, problems = config.actor_rollout_ref.rollout, []
    if rollout.update_weights_delta and rollout.free_cache_engine and config.actor_rollout_ref.hybrid_engine:
        problems.append(
            f"{ROLLOUT}.update_weights_delta=true builds on weights that {ROLLOUT}.free_cache_engine=true gives up: "
            "set the latter to false"
        )
    for length, limit in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        ours, theirs = getattr(rollout, length), getattr(config.data, limit)
        if ours != theirs:
            problems.append(f"{ROLLOUT}.{length} ({ours}) must equal data.{limit} ({theirs}); leave it null")
    total = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < total:
        problems.append(
            f"{ROLLOUT}.max_model_len ({rollout.max_model_len}) must be at least data.max_prompt_length "
            f"+ max_response_length ({total})"
        )
    return problems


def _reader_problems(config: PPOConfig) -> list[str]:
    """Keys of the rollout, and of the judge, that are set, but that their engine does not read."""
    name, judge, memory = config.actor_rollout_ref.rollout.name, config.reward.judge, "gpu_memory_utilization"
    # What one engine's scripts carry for another: none of it changes an answer.
    others = {"engine_kwargs.vllm": name == "sglang", "engine_kwargs.sglang": name == "vllm"}
    of_judge = [
        f"{changed} is only read by reward.judge.engine={' or '.join(READERS[memory])}, but it is {judge.engine}"
        for changed in changed_keys(config, f"reward.judge.{memory}")
        if judge.engine not in READERS[memory]
    ]
    return of_judge + [
        (Note if others.get(key, key in SPEED_KEYS) else str)(
            f"{changed} is only read by {ROLLOUT}.name={' or '.join(engines)}, but it is {name}"
        )
        for key, engines in READERS.items()
        if name not in engines and key not in UNNEEDED.get(name, {})
        for changed in changed_keys(config, f"{ROLLOUT}.{key}")
    ]


def _budget_problems(config: PPOConfig) -> list[str]:
    """Memory that vLLM puts to sleep within a process still counts as allocated."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    sleeps = rollout.name == "vllm" and not rollout.as_server and rollout.free_cache_engine and policy.hybrid_engine
    if policy.memory_budget_gigabytes is None or not sleeps or config.trainer.device == "cpu":
        return []
    return [
        "actor_rollout_ref.memory_budget_gigabytes cannot be held to while vLLM sleeps in the trainer's process: set "
        f"{ROLLOUT}.as_server=true or {ROLLOUT}.free_cache_engine=false"
    ]


def _algorithm_problems(config: PPOConfig) -> list[str]:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    problems = []
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2:
        problems.append(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one prompt: "
            f"{ROLLOUT}.n ({rollout.n}) must be at least 2"
        )
    if algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        problems.append(f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss both count the KL: choose one")
    if algorithm.rollout_correction.bypass_mode and not rollout.calculate_log_probs:
        problems.append(
            f"algorithm.rollout_correction.bypass_mode=true takes the rollout's log-probs: "
            f"{ROLLOUT}.calculate_log_probs must be true"
        )
    correction = algorithm.rollout_correction
    asked = []
    if not correction.bypass_mode:
        given = [name for name in ("rollout_is", "rollout_rs") if getattr(correction, name) not in (None, "off")]
        asked = [f"algorithm.rollout_correction.{name}" for name in given]
    if config.actor_rollout_ref.actor.policy_loss.loss_mode in RATIO_LOSSES:
        asked.append(f"{ACTOR}.policy_loss.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}")
        idle = changed_keys(config, "algorithm.rollout_correction.rollout_is")
        problems += [f"{name} has no effect with {asked[-1]}, which weighs by the plain ratio" for name in idle]
    if not algorithm.use_kl_in_reward:
        why, weight = "has no effect with algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef"
        idle = [*changed_keys(config, "algorithm.kl_ctrl."), *changed_keys(config, "algorithm.kl_penalty")]
        if weight in idle and algorithm.kl_ctrl.kl_coef != 0:  # 0 says the same
            problems.append(f"{weight} {why}")
        problems += [Note(f"{name} {why}") for name in idle if name != weight]
    if asked and (correction.bypass_mode or not rollout.calculate_log_probs):
        problems.append(
            f"{asked[0]} compares the trainer's log-probs with the rollout's: rollout_correction.bypass_mode must be "
            f"false and {ROLLOUT}.calculate_log_probs true"
        )
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        problems.append("algorithm.rollout_correction.rollout_rs and rollout_rs_threshold go together: set both")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "fixed":
        idle = [name for key in ("horizon", "target_kl") for name in changed_keys(config, f"algorithm.kl_ctrl.{key}")]
        problems += [f"{name} has no effect with algorithm.kl_ctrl.type=fixed: set adaptive" for name in idle]
    if algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.target_kl == 0:
        problems.append("algorithm.kl_ctrl.type=adaptive needs algorithm.kl_ctrl.target_kl above 0")
    return problems


def _loss_problems(config: PPOConfig) -> list[str]:
    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    problems = []
    if loss.loss_mode in SEQUENCE_LOSSES and actor.loss_agg_mode == "token-mean":
        problems.append(
            f"{ACTOR}.policy_loss.loss_mode={loss.loss_mode} is a loss of whole sequences, which token-mean weighs "
            f"by their lengths: set {ACTOR}.loss_agg_mode=seq-mean-token-mean"
        )
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        problems.append(
            f"{ACTOR}.loss_scale_factor={actor.loss_scale_factor} is read with loss_agg_mode=seq-mean-token-sum-norm "
            f"only, not with {actor.loss_agg_mode}"
        )
    if actor.loss_scale_factor == 0:
        problems.append(f"{ACTOR}.loss_scale_factor=0 must be above 0")
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1:
        problems.append(f"{ACTOR}.clip_ratio_c={actor.clip_ratio_c} must be above 1")
    for low, high in (("clip_cov_lb", "clip_cov_ub"), ("icepop_low", "icepop_high")):
        if getattr(loss, low) >= getattr(loss, high):
            problems.append(
                f"{ACTOR}.policy_loss.{low} ({getattr(loss, low)}) must be below {high} ({getattr(loss, high)})"
            )
    positive = "tau_pos", "tau_neg", "clip_cov_ratio", "kl_cov_ratio", "dro_beta", "behaviour_weight_cap"
    for name in (*positive, "m2_threshold"):
        if getattr(loss, name) == 0:
            problems.append(f"{ACTOR}.policy_loss.{name}=0 must be above 0")
    return problems


def _optim_problems(optim: OptimConfig, prefix: str) -> list[str]:
    problems = []
    if len(optim.betas) != 2 or any(beta >= 1 for beta in optim.betas):
        problems.append(f"{prefix}.betas={optim.betas} must be two numbers below 1")
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        problems.append(
            f"{prefix}.lr_warmup_steps ({optim.lr_warmup_steps}) and lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio}) both say how long to warm up: choose one"
        )
    if optim.min_lr_ratio and optim.lr_scheduler_type == "constant":
        problems.append(
            f"{prefix}.min_lr_ratio={optim.min_lr_ratio} has no effect with {prefix}.lr_scheduler_type=constant: set "
            "linear or cosine"
        )
    decay, is_wsd = optim.lr_decay_steps_ratio, optim.lr_scheduler_type == "wsd"
    if not is_wsd and decay != OptimConfig().lr_decay_steps_ratio:
        problems.append(
            f"{prefix}.lr_decay_steps_ratio has no effect with lr_scheduler_type={optim.lr_scheduler_type}: it is for "
            "wsd"
        )
    if is_wsd and (decay == 0 or optim.lr_warmup_steps_ratio + decay > 1):
        problems.append(
            f"{prefix}.lr_decay_steps_ratio ({decay}) must be above 0 and, with lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio}), at most 1"
        )
    return problems


def _run_problems(trainer: RunConfig) -> list[str]:
    problems = timeline_problems(trainer)
    if trainer.nnodes > 1 and trainer.backend != "ray":
        problems.append(f"trainer.nnodes={trainer.nnodes} needs trainer.backend=ray, not {trainer.backend}")
    if trainer.nan_gradient == "stop" and trainer.max_nan_steps is not None:
        problems.append(
            f"trainer.max_nan_steps={trainer.max_nan_steps} has no effect with trainer.nan_gradient=stop: set skip"
        )
    in_a_row = trainer.max_nan_steps_in_a_row or 0
    if in_a_row not in (0, RunConfig.max_nan_steps_in_a_row):
        earlier = "nan_gradient=stop" if trainer.nan_gradient == "stop" else f"max_nan_steps={trainer.max_nan_steps}"
        if earlier == "nan_gradient=stop" or (trainer.max_nan_steps is not None and trainer.max_nan_steps < in_a_row):
            problems.append(
                f"trainer.max_nan_steps_in_a_row={in_a_row} has no effect with trainer.{earlier}, which ends the run "
                "before: leave one of them out"
            )
    for name in ("test_freq", "save_freq", "memory_copy_freq"):
        if getattr(trainer, name) == 0:
            problems.append(f"trainer.{name}=0 must be -1 (never) or a number of steps")
    return problems


def _idle_engine_problems(
    config: PPOConfig | SupervisedConfig, engine: EngineConfig, prefix: str, model_prefix: str
) -> list[str]:
    """Settings of an engine that is not the chosen one would silently do nothing."""
    idle = "fsdp_config" if engine.strategy == "megatron" else "megatron"
    changed = changed_keys(config, f"{prefix}.{idle}.")
    if prefix == ACTOR and isinstance(config, PPOConfig) and reads_the_other_engine(config):
        changed = []
    elif engine.strategy == "megatron":
        changed += [name for key in FSDP_ONLY_KEYS for name in changed_keys(config, f"{prefix}.{key}")]
        changed += [name for key in FSDP_ONLY_MODEL_KEYS for name in changed_keys(config, f"{model_prefix}.{key}")]
    else:
        changed += changed_keys(config, f"{prefix}.fsdp_config.{IDLE_FSDP_KEYS[engine.strategy]}")
    problems = [
        (Note if name.endswith(".fsdp_config.use_orig_params") else str)(
            f"{name} has no effect with {prefix}.strategy={engine.strategy}"
        )
        for name in changed
    ]
    model: ModelConfig = get_value(config, model_prefix)
    for field in ("router_aux_loss_coef", "output_router_logits"):
        if model.override_config.get(field):
            key = f"{prefix}.megatron.override_transformer_config.moe_aux_loss_coeff"
            problems.append(
                f"{model_prefix}.override_config.{field} has no effect: the experts' balancing loss is that of "
                f"Megatron ({key}, with {prefix}.strategy=megatron); with FSDP there is none"
            )
    if prefix in ("critic", "reward_model") and model.custom_chat_template is not None:
        problems.append(f"{model_prefix}.custom_chat_template has no effect: it gets the policy's token ids")
    if not model.has_adapters:
        idle_keys = [
            n for key in ("lora_alpha", "target_modules") for n in changed_keys(config, f"{model_prefix}.{key}")
        ]
        problems += [f"{name} has no effect without {model_prefix}.lora_rank" for name in idle_keys]
    needs = {"activation_memory_budget": "use_torch_compile", "megatron.grad_offload": "megatron.optimizer_offload"}
    for name, needed in needs.items():
        given = changed_keys(config, f"{prefix}.{name}")
        if given and given[0] not in changed and not get_value(config, f"{prefix}.{needed}"):
            problems.append(f"{given[0]} has no effect without {prefix}.{needed}=true")
    return problems


def _idle_problems(config: PPOConfig | SupervisedConfig, engine: EngineConfig, prefix: str) -> list[str]:
    """Settings of an engine or backend that is not the chosen one would silently do nothing."""
    problems = _idle_engine_problems(config, engine, prefix, "model" if isinstance(config, SupervisedConfig) else MODEL)
    if isinstance(config, SupervisedConfig):
        used, instead = ("megatron", "") if engine.strategy == "megatron" else ("fsdp_config", ": use offload_policy")
        names = ("param_offload", "optimizer_offload", "grad_offload")
        offload = [name for key in names for name in changed_keys(config, f"{prefix}.{used}.{key}")]
        problems += [f"{name} has no effect here, where there are no phases{instead}" for name in offload]
    if config.ray_init.address is not None:
        started = [f"ray_init.{name}" for name in ("num_cpus", "num_gpus", "object_store_memory")]
        given = [name for name in started if get_value(config, name) is not None]
        problems += [
            f"{name} is for a Ray started here, not for ray_init.address={config.ray_init.address}" for name in given
        ]
    if config.trainer.backend == "ray" and importlib.util.find_spec("ray") is None:
        problems.append("trainer.backend=ray needs Ray: pip install 'meshrl[ray]'")
    return problems


def _file_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    has_own_rows = isinstance(config, PPOConfig) and config.data.custom_cls.path is not None
    problems = [] if config.data.train_files or has_own_rows else ["set data.train_files"]
    if config.trainer.test_freq > 0 and not config.data.val_files:
        problems.append(f"trainer.test_freq={config.trainer.test_freq} needs data.val_files")
    if isinstance(config, PPOConfig) and config.trainer.val_only and not config.data.val_files:
        problems.append("trainer.val_only=true needs data.val_files")
    if Path(config.trainer.run_dir).is_file():
        problems.append(f"trainer.default_local_dir={config.trainer.run_dir} is a file: name a folder")
    return problems + ([] if has_own_rows else data_file_problems(config))
