"""Keys as other scripts and documents spell them: what each is read as here, or why it need not be set."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.config.actor import RefMegatronConfig
from meshrl.config.names import ACTOR, MODEL, REF, ROLLOUT

TURNS = f"{ROLLOUT}.multi_turn"
ENGINES = (ACTOR, "critic", "reward_model", "engine")  # the last is that of sft
OVERRIDE = "override_transformer_config"


@dataclass(frozen=True)
class Alias:
    """A key of others and everything below it; null always means that it is not set."""

    old: str
    new: str | None = None  # our key
    values: Mapping[Any, Any] = field(default_factory=dict)  # their words for a value, and ours
    agrees: bool = False  # it sets nothing: our key must say the same
    over_ranks: bool = False  # it counts over all data-parallel ranks, ours on one
    why: str = ""  # where there is no key of ours: why none is needed ...
    only: tuple[Any, ...] = ()  # ... and for which values (empty: all) ...
    instead: str = ""  # ... and what to do about the others (empty: see the rows below)
    besides: tuple[str, ...] = ()  # names below it that are ours


def read(old: str, new: str, values: Mapping[Any, Any] | None = None) -> Alias:
    """It is our key under another name."""
    return Alias(old, new, values or {})


def agree(old: str, new: str, values: Mapping[Any, Any] | None = None) -> Alias:
    """It may say what our key says: nothing else can be had."""
    return Alias(old, new, values or {}, agrees=True)


def idle(old: str, why: str, *only: Any, instead: str = "") -> Alias:
    """What it asks for, with these values or with any, is so anyway."""
    return Alias(old, why=why, only=only, instead=instead)


def fixed(old: str, why: str, *only: Any) -> Alias:
    """So it is, and nothing else can be had."""
    return Alias(old, why=why, only=only, instead=f"{why}; leave it out")


def gone(old: str, instead: str) -> Alias:
    """It may be null only."""
    return Alias(old, instead=instead)


CHUNKS = "log-probs and entropies are always computed in chunks"
SAVED = "weights are read from Hugging Face files, which meshrl convert makes of others; leave it out"
FORWARD = "values are computed in the micro-batches of the update"


def _reference() -> list[Alias]:
    """The reference is a second model in the actor's engine; where it rests and how it lies may be its own."""
    shared = (
        "reshard_after_forward", "forward_prefetch", "model_dtype", "mixed_precision", "wrap_policy",
        "offload_policy", "use_orig_params", "use_torch_compile",
        "entropy_checkpointing", "entropy_from_logits_with_chunking",
    )  # fmt: skip
    return [
        read(f"{REF}.megatron.param_offload", f"{REF}.fsdp_config.param_offload"),
        idle(f"{REF}.megatron.grad_offload", "a reference has no gradients"),
        idle(f"{REF}.megatron.optimizer_offload", "a reference has no optimizer"),
        idle(f"{REF}.fsdp_config.optimizer_offload", "a reference has no optimizer"),
        idle(f"{REF}.megatron.forward_only", "a reference is never trained"),
        idle(f"{REF}.fsdp_config.forward_only", "a reference is never trained"),
        fixed(f"{REF}.load_weight", "a reference always has weights", True),
        *(
            read(f"{REF}.megatron.{axis}_parallel_size", f"{REF}.megatron.{axis}_model_parallel_size")
            for axis in ("tensor", "pipeline", "expert")
        ),
        Alias(f"{REF}.megatron", f"{ACTOR}.megatron", agrees=True, besides=tuple(vars(RefMegatronConfig()))),
        *(agree(f"{REF}.fsdp_config.{name}", f"{ACTOR}.fsdp_config.{name}") for name in shared),
        agree(f"{REF}.use_torch_compile", f"{ACTOR}.use_torch_compile"),
        agree(f"{REF}.fsdp_config.strategy", f"{REF}.strategy"),
        read(f"{REF}.fsdp_config.ulysses_sequence_parallel_size", f"{REF}.ulysses_sequence_parallel_size"),
        idle(f"{REF}.entropy_checkpointing", CHUNKS),
        idle(f"{REF}.entropy_from_logits_with_chunking", CHUNKS),
        Alias(f"{REF}.log_prob_micro_batch_size", f"{REF}.log_prob_micro_batch_size_per_gpu", over_ranks=True),
    ]


def _engine(role: str) -> list[Alias]:
    """What actor, critic, reward model and `sft` have in common."""
    megatron, fsdp = f"{role}.megatron", f"{role}.fsdp_config"
    return [
        read(f"{role}.model.fsdp_config", fsdp),
        read(f"{role}.megatron_config", megatron),
        *(
            read(f"{megatron}.{axis}_parallel_size", f"{megatron}.{axis}_model_parallel_size")
            for axis in ("tensor", "pipeline", "expert")
        ),
        *(read(f"{fsdp}.{name}", f"{role}.{name}") for name in ("ulysses_sequence_parallel_size", "use_torch_compile")),
        read(f"{role}.ulysses_sp_size", f"{role}.ulysses_sequence_parallel_size"),
        read(f"{fsdp}.dtype", f"{fsdp}.mixed_precision.param_dtype"),
        agree(f"{fsdp}.strategy", f"{role}.strategy"),
        idle(f"{fsdp}.grad_offload", "gradients are given up after every update"),
        fixed(f"{fsdp}.forward_only", "it follows from the role", False),
        *(
            idle(f"{place}.{name}", CHUNKS)
            for place in (role, fsdp)
            for name in ("entropy_checkpointing", "entropy_from_logits_with_chunking")
        ),
        *(idle(f"{megatron}.{name}", "weights go from and to Hugging Face files directly")
          for name in ("use_mbridge", "vanilla_mbridge")),
        gone(f"{megatron}.dist_checkpointing_path", SAVED),
        idle(f"{megatron}.dist_checkpointing_prefix", "nothing is read from such checkpoints", "", instead=SAVED),
        fixed(f"{megatron}.forward_only", "it follows from the role", False),
        idle(f"{megatron}.seed", "trainer.seed is the seed of everything", 42, instead="set trainer.seed"),
        *(read(f"{megatron}.override_ddp_config.{name}", f"{megatron}.{name}")
          for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")),
        idle(f"{megatron}.override_ddp_config.grad_reduce_in_fp32", "gradients are always summed in float32", True),
        idle(f"{megatron}.override_ddp_config.average_in_collective", "gradients are summed, not averaged", False),
        idle(
            f"{megatron}.override_ddp_config", "there is nothing in it", {},
            instead="of it overlap_grad_reduce, overlap_param_gather and use_distributed_optimizer can be set",
        ),
        idle(f"{megatron}.override_mcore_model_config", "there is nothing in it", {}, instead=f"use {OVERRIDE}"),
        *(idle(f"{megatron}.{OVERRIDE}.{name}", f"{megatron}.dtype says it", False) for name in ("bf16", "fp16")),
        *(agree(f"{megatron}.{OVERRIDE}.{name}", f"{megatron}.dtype", {True: name}) for name in ("bf16", "fp16")),
        idle(f"{megatron}.{OVERRIDE}.variable_seq_lengths", "micro-batches are packed rows of any length", True),
        idle(f"{megatron}.{OVERRIDE}.moe_grouped_gemm", "experts are modules of their own, one after the other"),
        read(f"{role}.nccl_timeout", "trainer.deadlines.collective"),
        idle(f"{role}.load_weight", "models always start from their weights", True, instead=f"see {MODEL}.random_init"),
        gone(f"{role}.data_loader_seed", "set data.seed"),
    ]  # fmt: skip


def _optimizer(optim: str, role: str) -> list[Alias]:
    return [
        *(read(f"{optim}.{name}", f"{role}.grad_clip") for name in ("clip_grad", "grad_clip")),
        *(read(f"{optim}.{name}", f"{optim}.lr_scheduler_type") for name in ("warmup_style", "lr_decay_style")),
        read(f"{optim}.optimizer", f"{optim}.optimizer", {"adam": "AdamW"}),  # Megatron's adam decays as AdamW does
        fixed(f"{optim}.optimizer_impl", "it is the only one", "torch.optim"),
        idle(f"{optim}.total_training_steps", "the run counts its optimizer steps itself"),
        gone(f"{optim}.lr_decay_steps", "schedules end with the run"),
        idle(f"{optim}.num_cycles", "a cosine falls once", 0.5, instead="a cosine falls once, as with 0.5"),
        fixed(f"{optim}.lr_warmup_init", "warm-up begins near 0", 0),
        idle(f"{optim}.min_lr", "it is 0 anyway", 0, instead=f"set {optim}.min_lr_ratio, a share of lr"),
        fixed(f"{optim}.weight_decay_incr_style", "it is the only one", "constant"),
        fixed(f"{optim}.lr_wsd_decay_style", "the decay of wsd is linear", "linear"),
        gone(f"{optim}.lr_wsd_decay_steps", f"set {optim}.lr_decay_steps_ratio, a share of all steps"),
        idle(f"{optim}.use_checkpoint_opt_param_scheduler", "a resumed run goes on in its schedule"),
        *(
            idle(f"{optim}.override_optimizer_config.{name}", "the optimizer works where the weights are", False)
            for name in ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
        ),
        idle(
            f"{optim}.override_optimizer_config", "there is nothing in it", {},
            instead=f"leave it out; {role}.megatron.optimizer_offload keeps optimizer states in host memory",
        ),
    ]  # fmt: skip


def _model(model: str) -> list[Alias]:
    return [
        idle(f"{model}.use_shm", "files are read where they are"),
        idle(f"{model}.use_fused_kernels", "log-probs always run in the engine's own kernels"),
        idle(f"{model}.fused_kernel_options", "log-probs always run in the engine's own kernels"),
        idle(
            f"{model}.use_flash_attention_2", "packed sequences always use flash attention where there is one", True,
            instead=f"{model}.use_remove_padding=false takes the model's own attention",
        ),
        gone(f"{model}.exclude_modules", f"name those that get an adapter in {model}.target_modules"),
        gone(f"{model}.custom_chat_template", f"put it into the tokenizer's folder ({model}.tokenizer_path)"),
        idle(
            f"{model}.override_config.moe_config.freeze_moe_router", "routers are trained", False,
            instead="routers are trained with the rest",
        ),
        read(f"{model}.override_config.model_config", f"{model}.override_config"),
    ]  # fmt: skip


def _profiler(role: str) -> list[Alias]:
    how = read if role == ACTOR else agree  # there is one set of ranks
    return [
        idle(f"{role}.profiler.enable", "global_profiler.steps says whether and when"),
        read(f"{role}.profiler.tool", "global_profiler.tool"),
        read(f"{role}.profiler.save_path", "global_profiler.save_path"),
        idle(f"{role}.profiler.all_ranks", "global_profiler.ranks says which", False),
        how(f"{role}.profiler.all_ranks", "global_profiler.ranks", {True: []}),
        idle(f"{role}.profiler.ranks", "global_profiler.ranks says which", []),
        how(f"{role}.profiler.ranks", "global_profiler.ranks"),
        idle(f"{role}.profiler", "profilers have no further settings"),
    ]


def _rollout() -> list[Alias]:
    return [
        read(f"{ROLLOUT}.tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
        read(
            f"{ROLLOUT}.name", f"{ROLLOUT}.name",
            {"hf_transformers": "hf", "sglang_async": "sglang", "vllm_async": "vllm"},
        ),
        read(
            f"{ROLLOUT}.load_format", f"{ROLLOUT}.load_format",
            {**dict.fromkeys(("dummy_dtensor", "dummy_megatron", "dummy_hf"), "dummy"),
             **dict.fromkeys(("dtensor", "megatron", "hf"), "auto")},
        ),
        idle(f"{ROLLOUT}.mode", "turns and servers work without it; to generate beside updates see async_training"),
        idle(f"{ROLLOUT}.layered_summon", "weights always go layer by layer, or part by part"),
        idle(f"{ROLLOUT}.data_parallel_size", "ranks that tensor_model_parallel_size leaves are further rollouts"),
        fixed(f"{ROLLOUT}.pipeline_model_parallel_size", "a rollout has no stages", 1),
        idle(f"{ROLLOUT}.multi_stage_wake_up", "a rollout that sleeps gets its weights first and its KV cache last"),
        idle(f"{ROLLOUT}.skip_tokenizer_init", "rollouts take and give token ids"),
        idle(
            f"{ROLLOUT}.disable_log_stats", "the run has statistics of its own", True,
            instead=f"set {ROLLOUT}.engine_kwargs.vllm.disable_log_stats=false",
        ),
        gone(f"{ROLLOUT}.cudagraph_capture_sizes", f"set it in {ROLLOUT}.engine_kwargs.vllm.compilation_config"),
        fixed(f"{ROLLOUT}.over_sample_rate", "all answers are waited for", 0),
        idle(f"{ROLLOUT}.agent.num_workers", "turns run inside the rollout's processes"),
        agree(
            f"{ROLLOUT}.agent.default_agent_loop", f"{TURNS}.enable",
            {"tool_agent": True, "single_turn_agent": False},
        ),
        gone(f"{ROLLOUT}.agent.agent_loop_config_path", f"see {TURNS}.environment"),
        gone(f"{ROLLOUT}.agent.custom_async_server", "leave it out: a run starts its engines itself"),
        gone(f"{ROLLOUT}.chat_scheduler", f"see {TURNS}.environment"),
        fixed(f"{ROLLOUT}.use_fire_sampling", "there is none", False),
        gone(f"{ROLLOUT}.trace.backend", "set trainer.rollout_data_dir to keep all samples"),
        idle(f"{ROLLOUT}.trace.token2text", "nothing is traced; trainer.rollout_data_dir keeps all samples"),
        idle(f"{ROLLOUT}.skip_rollout", "samples are always generated", False, instead="see meshrl replay"),
        read(f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization", {False: None}),
        idle(f"{ROLLOUT}.skip_dump_dir", "samples are always generated"),
        idle(f"{ROLLOUT}.prometheus.enable", "there is none", False, instead="see trainer.logger"),
        idle(f"{ROLLOUT}.prometheus", "there is none"),
        read(f"{TURNS}.max_turns", f"{TURNS}.max_assistant_turns"),
        idle(
            f"{TURNS}.use_inference_chat_template", "turns go on from the tokens that were sampled", False,
            instead="turns go on from the tokens that were sampled",
        ),
        gone(f"{TURNS}.interaction_config_path", f"set {TURNS}.environment"),
        Alias(f"{ROLLOUT}.log_prob_micro_batch_size", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", over_ranks=True),
    ]  # fmt: skip


def _data() -> list[Alias]:
    return [
        *(
            idle(f"data.{name}", "rewards and turns get the prompt as it stands in the row")
            for name in ("return_raw_chat", "return_raw_input_ids", "return_full_prompt")
        ),
        read("data.tokenizer", f"{MODEL}.tokenizer_path"),
        idle("data.trust_remote_code", f"{MODEL}.trust_remote_code says it", False),
        agree("data.trust_remote_code", f"{MODEL}.trust_remote_code"),
        agree("data.tool_config_path", f"{TURNS}.tool_config_path"),
        idle("data.use_shm", "files are read where they are"),
        idle("data.dataloader_num_workers", "the controller reads the data itself"),
        read("data.pack_sequences", f"{MODEL}.use_remove_padding"),
        gone("data.max_packed_seq_len", f"set {ACTOR}.use_dynamic_bsz=true and ppo_max_token_len_per_gpu"),
        fixed("data.validation_shuffle", "validation keeps the files' order", False),
        gone("data.datagen.path", "write a file, and order its rows with data.sampler"),
        gone("data.datagen.name", "write a file, and order its rows with data.sampler"),
    ]  # fmt: skip


def _rewards() -> list[Alias]:
    return [
        read("reward_model.overlong_buffer", "reward_manager.overlong_buffer"),
        read("custom_reward_function.overlong_buffer", "reward_manager.overlong_buffer"),
        *(
            alias
            for place in ("reward_model", "reward")
            for alias in (
                read(f"{place}.reward_kwargs.overlong_buffer_cfg", "reward_manager.overlong_buffer"),
                agree(f"{place}.reward_kwargs.max_resp_len", "data.max_response_length"),
            )
        ),
        read("reward_model.reward_manager", "reward_manager.name"),
        read("reward.custom_reward_function", "custom_reward_function"),
        read("reward.reward_manager", "reward_manager"),
        idle("reward.num_workers", "functions run in the controller, or in reward_manager.num_processes"),
        read("reward_model.launch_reward_fn_async", "reward_manager.overlap"),
        gone("reward_model.sandbox_fusion.url", "the reward function code has a sandbox of its own"),
        idle("reward_model.sandbox_fusion", "the reward function code has a sandbox of its own"),
        idle("reward_model.enable_resource_pool", "reward_model.nnodes says whether it has devices of its own"),
        gone("reward_model.max_length", "samples are scored whole"),
        agree("reward_model.model.input_tokenizer", f"{MODEL}.path"),
        Alias("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu", over_ranks=True),
    ]


def _run() -> list[Alias]:
    return [
        read("actor_rollout_ref.nccl_timeout", "trainer.deadlines.collective"),
        read("trainer.default_hdfs_dir", "trainer.remote_dir"),
        read("trainer.ray_wait_register_center_timeout", "trainer.deadlines.start"),
        read("trainer.resume_from_path", "trainer.resume_from_path", {"False": None, "false": None, False: None}),
        read("trainer.remove_previous_ckpt_in_save", "trainer.max_ckpt_to_keep", {True: 1, False: None}),
        read("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
        idle(
            "trainer.del_local_ckpt_after_load", "checkpoints stay", False,
            instead="trainer.max_ckpt_to_keep bounds how many there are",
        ),
        fixed("trainer.esi_redundant_time", "SIGTERM saves the run", 0),
        idle("trainer.use_legacy_worker_impl", "there is one kind of workers"),
        read("trainer.profile_steps", "global_profiler.steps", {None: []}),
        read("global_profiler.steps", "global_profiler.steps", {None: []}),
        idle("global_profiler.profile_continuous_steps", "each step has a profile of its own"),
        idle("global_profiler.global_tool_config", "you start nsys yourself and give it its options there"),
        read("ray_kwargs.ray_init", "ray_init"),
        gone("ray_kwargs.timeline_json_file", "set trainer.timeline=true"),
        gone("ray_init.timeline_json_file", "set trainer.timeline=true"),
        fixed("algorithm.use_pf_ppo", "there is none", False),
    ]  # fmt: skip


# Tried in order, each on the result of those before.
ALIASES: tuple[Alias, ...] = (
    *_reference(),
    *(alias for role in (ACTOR, REF, ROLLOUT, "critic", "reward_model") for alias in _profiler(role)),
    read(f"{ACTOR}.fsdp_config.gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing"),
    *(alias for role in ENGINES for alias in _engine(role)),
    *(alias for role in (ACTOR, "critic") for alias in _optimizer(f"{role}.optim", role)),
    *_optimizer("optim", "engine"),
    *(read(f"{role}.checkpoint.contents", f"{role}.checkpoint.save_contents") for role in (ACTOR, "critic")),
    read(f"{ACTOR}.model", MODEL),
    *(alias for model in (MODEL, "critic.model", "reward_model.model", "model") for alias in _model(model)),
    agree(f"{ACTOR}.use_remove_padding", f"{MODEL}.use_remove_padding"),
    idle(f"{ACTOR}.use_fused_kernels", "log-probs always run in the engine's own kernels"),
    agree(f"{ACTOR}.rollout_n", f"{ROLLOUT}.n"),
    read(f"{ACTOR}.use_token_level_loss", f"{ACTOR}.loss_agg_mode", {True: "token-mean", False: "seq-mean-token-mean"}),
    idle(f"{ACTOR}.tis_imp_ratio_cap", "it is off", -1, instead="set algorithm.rollout_correction.rollout_is=token"),
    *(
        Alias(f"{ROLLOUT}.{name}", f"{ACTOR}.router_replay.mode", {True: "R3", False: None}, agrees=True)
        for name in ("enable_rollout_routing_replay", "enable_return_routed_experts")
    ),
    gone(f"{ACTOR}.fixed_num_micro_batches", f"bound them: {ACTOR}.ppo_max_token_len_per_gpu with use_dynamic_bsz"),
    Alias(f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu", over_ranks=True),
    Alias("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu", over_ranks=True),
    agree("critic.rollout_n", f"{ROLLOUT}.n"),
    *(
        idle(f"critic.forward_{name}", FORWARD)
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
    ),
    *_rollout(),
    *_data(),
    *_rewards(),
    *_run(),
)
PLACES: dict[str, list[int]] = {}  # of the aliases of a key
for _place, _alias in enumerate(ALIASES):
    PLACES.setdefault(_alias.old, []).append(_place)


@dataclass(frozen=True)
class Reading:
    """What becomes of a setting: `name` is ours, or None where nothing is to be set."""

    name: str | None
    value: Any
    agrees: bool = False
    over_ranks: bool = False
    note: str | None = None
    problem: str | None = None


def read_setting(name: str, value: Any) -> Reading:
    """How a key and its value are understood here."""
    written, agrees, over_ranks = name, False, False
    if name.rpartition(".")[2] == "_target_":
        return Reading(None, value)  # Hydra's word for a class, where there is none to choose
    place = 0
    while (place := _next_match(name, place)) < len(ALIASES):
        alias = ALIASES[place]
        place += 1
        value = next((ours for theirs, ours in alias.values.items() if value == theirs), value)
        if alias.new is not None:
            name = alias.new + name[len(alias.old) :]
            agrees, over_ranks = agrees or alias.agrees, over_ranks or alias.over_ranks
        elif value is None:
            return Reading(None, value)
        elif alias.why and (not alias.only or value in alias.only):
            return Reading(None, value, note=f"{alias.old} is not needed: {alias.why}")
        elif alias.instead:
            return Reading(None, value, problem=f"{written}={value} is not supported: {alias.instead}")
    if value is None and (agrees or over_ranks):
        return Reading(None, value)
    return Reading(name, value, agrees, over_ranks)


def canonical(name: str) -> str:
    """The project's spelling of a dotted key."""
    place = 0
    while (place := _next_match(name, place)) < len(ALIASES):
        alias = ALIASES[place]
        place += 1
        if alias.new is not None:
            name = alias.new + name[len(alias.old) :]
    return name


def has_alias(name: str) -> bool:
    """Whether others have this key, or one below it, and it is not simply ours."""
    return _next_match(name, 0) < len(ALIASES) or any(alias.old.startswith(f"{name}.") for alias in ALIASES)


def _next_match(name: str, start: int) -> int:
    """The place of the first alias from `start` on that a key falls under; the number of aliases if there is none."""
    found, above = len(ALIASES), name
    while above:
        for place in PLACES.get(above, ()):
            if start <= place < found and _matches(ALIASES[place], name):
                found = place
        above = above.rpartition(".")[0]
    return found


def _matches(alias: Alias, name: str) -> bool:
    if name == alias.old:
        return not alias.besides
    below = name.removeprefix(f"{alias.old}.")
    return below != name and below.split(".")[0] not in alias.besides


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name most like a misspelt one: the first that ends so, or alike as a whole and in the last component."""
    names = list(names)
    if (longer := next((candidate for candidate in names if candidate.endswith(f".{name}")), None)) is not None:
        return longer
    parent, _, last = name.rpartition(".")

    def likeness(candidate: str) -> float:
        candidate_parent, _, candidate_last = candidate.rpartition(".")
        return (
            difflib.SequenceMatcher(None, name, candidate).ratio()
            + difflib.SequenceMatcher(None, last, candidate_last).ratio()
            + (candidate_last == last)
            + 0.5 * bool(parent and candidate_parent == parent)
        )

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) > 1.1 else None
