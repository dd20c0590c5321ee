"""All checks of a config that run before a worker starts. Pure Python: no torch, no transformers, no Ray.

`ensure_runnable`, `check_config`, `check_notes` and `unsupported` are the entry points. The checks of single subjects
are in the other `validate_*` modules. A check returns one message for each problem.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import (
    batch_problems,
    engine_problems,
    reference_layout_problems,
    rollout_problems,
    sequence_ranks,
)
from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.config.families import GATED_DELTA, engine_problem, gpu_problem
from meshrl.config.keys import (
    ACTOR,
    COMMAND_LINE,
    MODEL,
    REF,
    ROLLOUT,
    ConfigError,
    Note,
    changed_keys,
    counted_as_changed,
    fill_followers,
    get_value,
    is_default,
    leaves,
)
from meshrl.config.load import unread_notes, unread_problems, value_problems
from meshrl.config.model_folder import read_model_config
from meshrl.config.recipe import VERL_CONFIGS
from meshrl.config.reward import reward_file_problems, reward_problems
from meshrl.config.rl import (
    ESTIMATORS,
    PPOConfig,
    async_problems,
    pool_problems,
    ranks_of,
    whose,
)
from meshrl.config.rollout import UNNEEDED
from meshrl.config.supervised import PreferenceConfig, SupervisedConfig, preference_problems
from meshrl.config.trainer import gate_problems
from meshrl.config.validate_algorithm import (
    algorithm_problems,
    bypass_problems,
    distillation_problems,
    estimator_problems,
    external_lib_problems,
    filter_groups_problems,
    first_kl_problems,
    idle_key_problems,
    loss_problems,
    own_function_problems,
    reference_problems,
    threshold_problems,
)
from meshrl.config.validate_data import (
    chat_template_problems,
    custom_class_problems,
    data_file_problems,
    data_problems,
    sample_problems,
    sampler_file_problems,
)
from meshrl.config.validate_model import (
    adapter_problems,
    eight_bit_file_problems,
    eight_bit_problems,
    model_problems,
    replay_file_problems,
    replay_problems,
    scoring_problems,
    seeing_problems,
)
from meshrl.config.validate_rollout import (
    budget_problems,
    engine_argument_problems,
    multi_turn_file_problems,
    multi_turn_problems,
    reader_problems,
    rollout_size_problems,
    sampling_problems,
    split_engine_problems,
    split_file_problems,
    split_problems,
)
from meshrl.config.validate_training import (
    checkpoint_notes,
    checkpoint_problems,
    epoch_problems,
    idle_engine_problems,
    idle_problems,
    optim_problems,
    package_problems,
    profiler_problems,
    run_problems,
)

# Keys of a critic's layout and batch sizes. Without a critic they cause a note and no error, because they do no harm.
CRITIC_PLACES = (
    "critic.strategy", "critic.fsdp_config.", "critic.megatron.", "critic.ulysses_sequence_parallel_size",
    "critic.ppo_micro_batch_size_per_gpu", "critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu",
)  # fmt: skip
# Engine keys that are read only if the model is trained.
TRAINING_KEYS = (
    "grad_clip", "keep_logits_megabytes", "fsdp_config.optimizer_offload", "model.enable_gradient_checkpointing",
    "model.enable_activation_offload", "model.lora_rank", "megatron.use_distributed_optimizer",
    "megatron.overlap_grad_reduce", "megatron.overlap_param_gather", "megatron.grad_offload",
    "megatron.optimizer_offload",
)  # fmt: skip


def ensure_runnable(config: PPOConfig | SupervisedConfig, check_files: bool = True) -> None:
    """Raise one `ConfigError` with all problems of a config, if there are any.

    The problems are unsupported keys and failed checks. With `check_files` they include files and missing packages.
    """
    problems = unsupported(config) + check_config(config, check_files)
    problems += package_problems(config) if check_files else []
    if problems:
        raise ConfigError(problems)


def check_config(config: PPOConfig | SupervisedConfig, check_files: bool = True) -> list[str]:
    """Return all problems of a config, one line each.

    With `check_files` the data files, the model folders, the reward functions and other user code are checked as well.
    """
    return [line for line in _checked(config, check_files) if not isinstance(line, Note)]


def _checked(config: PPOConfig | SupervisedConfig, check_files: bool) -> list[str]:
    """Return all problems of a config, and a `Note` for each key that has no effect and does no harm."""
    config = copy.deepcopy(config)
    fill_followers(config)
    problems = [problem for _, problem in value_problems(config)]
    if problems:
        return problems  # the checks below rely on numbers in their ranges
    return (
        _check_supervised(config, check_files)
        if isinstance(config, SupervisedConfig)
        else _check_ppo(config, check_files)
    )


def check_notes(config: PPOConfig | SupervisedConfig, sources: Mapping[str, str]) -> list[str]:
    """Return one line for each set key that has no effect and does no harm. `sources` has the source of each key."""
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
    # A key without effect deserves a note even if the command line sets it to its default. Keys in a file do not count,
    # because a file may hold the whole config, as `meshrl config` prints it.
    written = {name for name, source in sources.items() if source == COMMAND_LINE}
    if {f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")} <= written:
        notes.append(
            f"{ACTOR}.clip_ratio has no effect beside clip_ratio_low and clip_ratio_high, which say both sides"
        )
    if isinstance(config, PPOConfig) and f"{ROLLOUT}.enable_prefix_caching" in written:
        notes += _prefix_notes(config)
    # A switch that is set to false requests nothing.
    written -= {name for name in written if name.endswith(".enable") and not get_value(config, name)}
    known = _checked(config, check_files=False)
    with counted_as_changed(written):
        notes += unread_notes(config)
        more = _checked(config, check_files=False)
    problems = [line for line in known if not isinstance(line, Note)]
    found = [line for line in [*known, *more] if line not in problems]
    # Keys that one of verl's own config files sets were not written by the user.
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
        *rollout_size_problems(config),
        *reader_problems(config),
        *budget_problems(config),
        *engine_argument_problems(config),
        *adapter_problems(config),
        *multi_turn_problems(config),
        *algorithm_problems(config),
        *estimator_problems(config),
        *distillation_problems(config),
        *idle_key_problems(config),
        *filter_groups_problems(config),
        *first_kl_problems(config),
        *reference_problems(config),
        *bypass_problems(config),
        *threshold_problems(config),
        *loss_problems(config),
        *optim_problems(actor.optim, f"{ACTOR}.optim"),
        *run_problems(config.trainer),
        *profiler_problems(config),
        *checkpoint_problems(config),
        *idle_problems(config, actor, ACTOR),
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
    """Return the values of a model's config.json, or an empty dict if it cannot be read.

    `model_problems` reports a file that cannot be read.
    """
    try:
        return read_model_config(model)
    except ValueError:
        return {}


def _balance_notes(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return a note if the model's config.json asks for a load-balancing loss of experts, which is not added."""
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
    """Return one message for each generation engine (rollout or judge) that cannot reproduce its model's log-probs."""
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
    """Return one message for each model that the embedded engine (rollout or judge) supports on a CPU only."""
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
    """Check by the table of families that an engine can generate with a model. `key` sets the engine."""
    if "model_type" not in shape or (why := engine_problem(engine, shape)) is None:
        return []
    others = [name for name in ("hf", "vllm", "sglang") if engine_problem(name, shape) is None]
    return [f"{key}={engine} cannot generate with a {shape['model_type']} model ({why}): use {' or '.join(others)}"]


def _prefix_notes(config: PPOConfig) -> list[str]:
    """Return a note if prefix caching is requested for a model with linear attention, which does not support it."""
    rollout, kind = config.actor_rollout_ref.rollout, _shape_of(config.actor_rollout_ref.model).get("model_type")
    if rollout.name != "embedded" or not rollout.enable_prefix_caching or kind not in GATED_DELTA:
        return []
    return [
        f"{ROLLOUT}.enable_prefix_caching=true has no effect with a model of type {kind}: of a prefix, its linear "
        "attention would need the state, which is not kept"
    ]


def _reference_file_problems(config: PPOConfig) -> list[str]:
    """Check the model folder of a reference with its own path or devices, for the engine that runs it.

    The reference reads the policy's token ids, so that it needs no tokenizer.
    """
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
    """Check the critic's engine, optimizer, token budget and model. Without a critic its keys must not be set."""
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
        *idle_engine_problems(config, critic, "critic", "critic.model"),
        *optim_problems(critic.optim, "critic.optim"),
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
    elif check_files:  # the critic starts from the policy's model, which has its own checks
        problems += scoring_problems(_shape_of(config.actor_rollout_ref.model), "critic.model")
    return problems


def _read_by_ids(model: ModelConfig, config: PPOConfig) -> ModelConfig:
    """Return the model config with the policy's tokenizer, for a model that reads the policy's token ids."""
    policy = config.actor_rollout_ref.model
    return replace(model, tokenizer_path=model.tokenizer_path or policy.tokenizer_path or policy.path)


def _reward_model_problems(config: PPOConfig, check_files: bool) -> list[str]:
    model = config.reward_model
    if not model.enable:
        changed = changed_keys(config, "reward_model.")
        return [f"{name} has no effect without reward_model.enable=true" for name in changed]
    problems = engine_problems(model, "reward_model", ranks_of(config, model), whose(model, "reward_model"))
    problems += idle_engine_problems(config, model, "reward_model", "reward_model.model")
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


def _check_supervised(config: SupervisedConfig, check_files: bool) -> list[str]:
    data, engine = config.data, config.engine
    problems = [
        *epoch_problems(config),
        *engine_problems(engine, "engine", config.trainer.world_size),
        *batch_problems(config),
        *sample_problems(config),
        *optim_problems(config.optim, "optim"),
        *run_problems(config.trainer),
        *checkpoint_problems(config),
        *idle_problems(config, engine, "engine"),
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
    """Check the micro-batches of the actor, of the old log-probs and of the reference.

    Micro-batches that are cut by tokens must hold the longest sample. Those cut by samples need a number of samples.
    """
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


def unsupported(config: Any) -> list[str]:
    """Return one line for each set key or combination that is declared but not implemented yet."""
    return [*_unsupported(config), *(split_engine_problems(config) if isinstance(config, PPOConfig) else [])]


def _unsupported(config: Any) -> Iterator[str]:
    for leaf in leaves(type(config)).values():
        if leaf.pending and not is_default(config, leaf):
            yield f"not supported yet: {leaf.name}={get_value(config, leaf.name)}: {leaf.pending}"
