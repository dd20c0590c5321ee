"""The translation of verl's config keys (and of other spellings) into meshrl's keys.

`ALIASES` holds the rules, one group for each part of verl's configs. A rule reads a key as another key, ignores the
key with a note, or refuses the key with advice. `read_setting` applies the rules to a key and its value.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from meshrl.config.actor_critic import RefMegatronConfig
from meshrl.config.alias_rules import Alias, agree, fixed, gone, idle, read, same, unset
from meshrl.config.engine import FSDPConfig, MegatronConfig
from meshrl.config.keys import ACTOR, MODEL, REF, ROLLOUT

# Keys of verl's asynchronous trainers (`rollout.*`, `async_training.*`).

SYNC = "async_training"
MIGRATE = "the steps of the run follow from it together with other keys: meshrl migrate computes them"


def _versions(threshold: Any) -> Any:
    """Convert verl's `staleness_threshold` to `max_staleness`, by rounding up.

    verl's value is the share of samples whose generation may begin early. meshrl's value counts policy versions.
    """
    return math.ceil(threshold) if isinstance(threshold, int | float) and not isinstance(threshold, bool) else threshold


ASYNC: tuple[Alias, ...] = (
    *(read(f"rollout.{name}", f"{ROLLOUT}.{name}") for name in ("nnodes", "n_gpus_per_node", "n")),
    *(read(f"rollout.{name}", f"trainer.{name}") for name in ("total_epochs", "test_freq")),
    Alias("rollout.total_rollout_steps", instead=MIGRATE),
    read(f"{SYNC}.staleness_threshold", f"{SYNC}.max_staleness", convert=_versions),
    *(
        idle(f"{SYNC}.{name}", "a step trains one batch and then sends its weights", 1, instead=MIGRATE)
        for name in ("trigger_parameter_sync_step", "require_batches")
    ),
    read(f"{SYNC}.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode", weak=1),
    idle(f"{SYNC}.compute_prox_log_prob", "algorithm.rollout_correction.bypass_mode says it", False),
    read(f"{SYNC}.compute_prox_log_prob", "algorithm.rollout_correction.bypass_mode", {True: False}),
    idle(f"{SYNC}.use_trainer_do_validate", "rollouts validate", False, instead="rollouts validate; leave it out"),
    idle(f"{SYNC}.checkpoint_engine", "weights go by the quickest way that the two sides have"),
    idle("actor_rollout_ref.checkpoint_engine", "weights go by the quickest way that the two sides have"),
    idle("actor_rollout_ref.actor.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode says it"),
)


# Keys of verl's supervised trainers (`fsdp_sft_trainer`, `sft_trainer`), read by `meshrl sft`.

FSDP, MEGATRON = "engine.fsdp_config", "engine.megatron"
WHOLE = "micro-batches are packed rows without padding"
# Names of keys that both of verl's engines have: `engine.NAME` is read as FSDP's, `engine.megatron.NAME` as Megatron's.
SHARED = tuple(field.name for field in fields(FSDPConfig))
MEGATRON_ONLY = tuple(
    field.name for field in fields(MegatronConfig) if field.name not in (*SHARED, "context_parallel_size", "dtype")
)

SFT: tuple[Alias, ...] = (
    read("model.partial_pretrain", "model.path"),
    read("model.strategy", "engine.strategy"),
    *(read(f"model.fsdp_config.{name}", f"{FSDP}.offload_policy") for name in ("cpu_offload", "offload_params")),
    read("model.fsdp_config", FSDP),
    read("use_remove_padding", "model.use_remove_padding"),
    *(read(name, f"engine.{name}") for name in ("ulysses_sequence_parallel_size",)),
    # Hydra's config groups: the file of verl that a section comes from.
    read("engine", "engine.strategy", {}, "megatron", itself=True, weak=1),
    idle(
        "engine", "engine.strategy says it", "fsdp", "fsdp2", itself=True,
        instead="engines are engine.strategy=fsdp2, fsdp and megatron",
    ),
    idle(
        "optim", "there is one kind of optimizer sections", "fsdp", "megatron", itself=True,
        instead="there is one kind of optimizer sections; leave it out",
    ),
    *(read(f"engine.{name}", f"{FSDP}.{name}") for name in SHARED),
    read("engine.dtype", f"{FSDP}.mixed_precision.param_dtype"),
    *(read(f"engine.{name}", f"{MEGATRON}.{name}") for name in MEGATRON_ONLY),
    *(idle(f"engine.{name}", "weights go from and to Hugging Face files directly")
      for name in ("use_mbridge", "vanilla_mbridge")),
    *(idle(f"engine.dist_checkpointing_{name}", "weights are read from the model's Hugging Face folder",
           needs=(f"{MEGATRON}.use_dist_checkpointing", (False,)), instead="leave it out")
      for name in ("path", "prefix")),
    read("engine.override_ddp_config", f"{MEGATRON}.override_ddp_config"),
    idle("engine.override_mcore_model_config", "there is nothing in it", {}, instead="use override_transformer_config"),
    idle("engine.seed", "trainer.seed is the seed of everything", 42, instead="set trainer.seed"),
    fixed("engine.full_determinism", "kernels are chosen for speed", False),
    fixed("engine.forward_only", "the model is trained", False),
    *(read(f"trainer.checkpoint.{name}", f"checkpoint.{name}") for name in ("save_contents", "load_contents")),
    # Rows.
    read("data.multiturn.enable", "data.messages_key", {True: "messages"}, True, weak=2),
    read("data.multiturn.enable", "data.messages_key", {False: None}, False),
    read("data.multiturn.messages_key", "data.messages_key", weak=1),
    read("data.multiturn.tools_key", "data.tools_key"),
    read("data.multiturn.enable_thinking_key", "data.enable_thinking_key"),
    idle("data.pad_mode", WHOLE),
    idle("data.use_dynamic_bsz", "micro-batches are cut by tokens while micro_batch_size_per_gpu is null", True,
         instead="set data.micro_batch_size_per_gpu"),
    idle("data.balance_dp_token", "rows are always balanced over ranks by tokens"),
    read("data.chat_template", "model.custom_chat_template"),
    *(idle(f"data.custom_cls.{name}", "null names no class", None) for name in ("path", "name")),
    fixed("data.ignore_input_ids_mismatch", "a conversation is rendered whole, and its turns are found in it", False),
    idle("data.micro_batch_size", "verl's trainer does not read it; data.micro_batch_size_per_gpu does what it says"),
    *(unset(f"data.{name}_dict_keys", []) for name in ("prompt", "response")),
    idle("trainer.profile_interval", "nothing is profiled", instead="meshrl sft has no profiler"),
    fixed("profiler.enable", "meshrl sft has no profiler", False),
    idle("profiler", "nothing is profiled"),
)  # fmt: skip


TURNS = f"{ROLLOUT}.multi_turn"
ENGINES = (ACTOR, "critic", "reward_model", "engine")  # `engine` is the section of `meshrl sft`
OVERRIDE = "override_transformer_config"


CHUNKS = "log-probs and entropies are always computed in chunks"
SAVED = "weights are read from Hugging Face files, which meshrl convert makes of others; leave it out"
BUCKET = "update_weights_bucket_megabytes"
NO_WSD = ("constant", "linear", "cosine")
FORWARD = "values are computed in the micro-batches of the update"


def _reference() -> list[Alias]:
    """Return the rules for the reference's keys.

    The reference is a second model in the actor's engine. Its section may set its offload and its own layout; other
    engine keys must agree with the actor's.
    """
    shared = (
        "reshard_after_forward", "forward_prefetch", "model_dtype", "mixed_precision", "wrap_policy",
        "offload_policy", "use_orig_params", "entropy_checkpointing", "entropy_from_logits_with_chunking",
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
        *(
            idle(
                f"{REF}.{place}use_torch_compile", f"{ACTOR}.use_torch_compile compiles the reference's layers as well"
            )
            for place in ("", "fsdp_config.")
        ),
        idle(f"{REF}.fsdp_config.strategy", f"{REF}.strategy says it", "fsdp", "fsdp2"),
        agree(f"{REF}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"),
        idle(f"{REF}.rollout_n", f"{ROLLOUT}.n says it"),
        idle(f"{REF}.router_replay", f"{ACTOR}.router_replay says it", "disabled"),
        idle(f"{REF}.fsdp_config.seed", "trainer.seed is the seed of everything", 42, instead="set trainer.seed"),
        fixed(f"{REF}.fsdp_config.full_determinism", "kernels are chosen for speed", False),
        read(f"{REF}.fsdp_config.ulysses_sequence_parallel_size", f"{REF}.ulysses_sequence_parallel_size"),
        idle(f"{REF}.entropy_checkpointing", CHUNKS),
        idle(f"{REF}.entropy_from_logits_with_chunking", CHUNKS),
        Alias(f"{REF}.log_prob_micro_batch_size", f"{REF}.log_prob_micro_batch_size_per_gpu", over_ranks=True),
    ]


def _engine(role: str) -> list[Alias]:
    """Return the rules for the engine keys that the actor, the critic, the reward model and `sft` share."""
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
        idle(f"{fsdp}.strategy", f"{role}.strategy says it", "fsdp", "fsdp2"),
        idle(f"{fsdp}.seed", "trainer.seed is the seed of everything", 42, instead="set trainer.seed"),
        fixed(f"{fsdp}.full_determinism", "kernels are chosen for speed", False),
        idle(f"{fsdp}.grad_offload", "gradients are given up after every update"),
        fixed(f"{fsdp}.forward_only", "it follows from the role", False),
        *(
            idle(f"{place}.{name}", CHUNKS)
            for place in (role, fsdp)
            for name in ("entropy_checkpointing", "entropy_from_logits_with_chunking")
        ),
        *(idle(f"{megatron}.{name}", "weights go from and to Hugging Face files directly")
          for name in ("use_mbridge", "vanilla_mbridge")),
        *(idle(f"{megatron}.dist_checkpointing_{name}", "weights are read from the model's Hugging Face folder",
               needs=(f"{megatron}.use_dist_checkpointing", (False,)), instead=SAVED) for name in ("path", "prefix")),
        idle(f"{megatron}.use_remove_padding", "micro-batches are packed", True, instead="micro-batches are packed"),
        unset(f"{megatron}.override_transformer_config", {}),
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
        idle(f"{role}.data_loader_seed", "data.seed is the seed of all orders", 42, instead="set data.seed"),
    ]  # fmt: skip


def _optimizer(optim: str, role: str) -> list[Alias]:
    return [
        *(read(f"{optim}.{name}", f"{role}.grad_clip") for name in ("clip_grad", "grad_clip")),
        *(read(f"{optim}.{name}", f"{optim}.lr_scheduler_type")
          for name in ("warmup_style", "lr_decay_style", "lr_scheduler")),
        unset(f"{optim}.lr_warmup_steps", -1),
        read(f"{optim}.optimizer", f"{optim}.optimizer", {"adam": "AdamW"}),  # Megatron's adam decays as AdamW does
        fixed(f"{optim}.optimizer_impl", "it is the only one", "torch.optim"),
        idle(f"{optim}.total_training_steps", "the run counts its optimizer steps itself"),
        idle(
            f"{optim}.lr_decay_steps", "a constant schedule does not decay",
            needs=(f"{optim}.lr_scheduler_type", ("constant",)), instead="schedules end with the run; leave it out",
        ),
        idle(f"{optim}.num_cycles", "a cosine falls once", 0.5, instead="a cosine falls once, as with 0.5"),
        fixed(f"{optim}.lr_warmup_init", "warm-up begins near 0", 0),
        idle(f"{optim}.min_lr", "it is 0 anyway", 0, instead=f"set {optim}.min_lr_ratio, a share of lr"),
        fixed(f"{optim}.weight_decay_incr_style", "it is the only one", "constant"),
        idle(f"{optim}.lr_wsd_decay_style", "the decay of wsd is linear", "linear"),
        idle(
            f"{optim}.lr_wsd_decay_style", "it is for wsd", needs=(f"{optim}.lr_scheduler_type", NO_WSD),
            instead="the decay of wsd is linear; leave it out",
        ),
        gone(f"{optim}.lr_wsd_decay_steps", f"set {optim}.lr_decay_steps_ratio, a share of all steps"),
        idle(f"{optim}.use_checkpoint_opt_param_scheduler", "a resumed run goes on in its schedule"),
        idle(f"{optim}.override_optimizer_config.optimizer_cpu_offload", "optimizer states stay on the GPUs", False),
        read(f"{optim}.override_optimizer_config.optimizer_cpu_offload", f"{role}.megatron.optimizer_offload"),
        idle(
            f"{optim}.override_optimizer_config.optimizer_offload_fraction",
            f"{role}.megatron.optimizer_offload takes all states to host memory between updates", 0, 1,
        ),
        idle(
            f"{optim}.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
            f"the update runs on the GPUs, and {role}.megatron.optimizer_offload is for the time between",
        ),
        idle(
            f"{optim}.override_optimizer_config.use_precision_aware_optimizer",
            "optimizer states are float32, as with its defaults",
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
        unset(f"{model}.exclude_modules", []),
        *_adapters(model),
        gone(f"{model}.hf_config_path", f"put config.json into {model}.path"),
        fixed(f"{model}.tiled_mlp.enabled", "feed-forwards are computed whole", False),
        idle(f"{model}.tiled_mlp", "feed-forwards are computed whole"),
        *(fixed(f"{model}.mtp.{name}", "heads for several tokens are not trained or used", False)
          for name in ("enable", "enable_train", "enable_rollout")),
        idle(f"{model}.mtp", "heads for several tokens are not trained or used"),
        idle(
            f"{model}.override_config.moe_config.freeze_moe_router", "routers are trained", False,
            instead="routers are trained with the rest",
        ),
        read(f"{model}.override_config.model_config", f"{model}.override_config"),
    ]  # fmt: skip


# Megatron's names of a decoder's linear layers, and the names of these layers in Hugging Face's models.
MEGATRON_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def _layer_names(modules: Any) -> Any:
    """Translate Megatron's layer names into Hugging Face's. All four of Megatron's names become `all-linear`."""
    if not isinstance(modules, list):
        return modules
    if set(modules) == set(MEGATRON_LAYERS):
        return ["all-linear"]
    return [name for module in modules for name in MEGATRON_LAYERS.get(str(module), [module])]


def _adapters(model: str) -> list[Alias]:
    """Return the rules for the section `lora` below a model's section, which Megatron's configs in verl have."""
    lora = f"{model}.lora"
    return [
        read(f"{lora}.rank", f"{model}.lora_rank"),
        read(f"{lora}.alpha", f"{model}.lora_alpha"),
        read(f"{lora}.target_modules", f"{model}.target_modules", convert=_layer_names),
        read(f"{lora}.exclude_modules", f"{model}.exclude_modules", convert=_layer_names),
        read(f"{lora}.adapter_path", f"{model}.lora_adapter_path"),
        fixed(f"{lora}.type", "adapters are plain LoRA", "lora"),
        fixed(f"{lora}.dropout", "adapters have no dropout", 0),
        idle(f"{lora}.dropout_position", "adapters have no dropout"),
        idle(f"{lora}.lora_A_init_method", "adapters begin as peft's do: A as Kaiming's", "kaiming", "xavier"),
        fixed(f"{lora}.lora_B_init_method", "adapters begin as peft's do: B at zero", "zero"),
        fixed(f"{lora}.a2a_experimental", "adapters are exchanged as weights are", False),
        gone(f"{lora}.dtype", "adapters are float32"),
        *(fixed(f"{lora}.freeze_{name}", "all but adapters is frozen", True)
          for name in ("vision_model", "vision_projection", "language_model")),
        read(f"{lora}.merge", f"{ROLLOUT}.update_weights_adapters", {True: "merged", False: "alone"}, weak=1),
    ]  # fmt: skip


def _profiler(role: str) -> list[Alias]:
    if role != ACTOR:  # meshrl has one set of profiled ranks for all roles, and reads it from the actor's keys
        ranks = [idle(f"{role}.profiler.{name}", "global_profiler.ranks says which") for name in ("all_ranks", "ranks")]
    else:
        ranks = [
            idle(f"{role}.profiler.all_ranks", "global_profiler.ranks says which", False),
            read(f"{role}.profiler.all_ranks", "global_profiler.ranks", {True: []}),
            idle(f"{role}.profiler.ranks", "global_profiler.ranks says which", []),
            read(f"{role}.profiler.ranks", "global_profiler.ranks"),
        ]
    return [
        idle(f"{role}.profiler.enable", "global_profiler.steps says whether and when"),
        read(f"{role}.profiler.tool", "global_profiler.tool"),
        read(f"{role}.profiler.save_path", "global_profiler.save_path"),
        *ranks,
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
        ),
        read(f"{ROLLOUT}.disable_log_stats", f"{ROLLOUT}.engine_kwargs.vllm.disable_log_stats"),
        read(f"{ROLLOUT}.checkpoint_engine.{BUCKET}", f"{ROLLOUT}.{BUCKET}"),
        idle(f"{ROLLOUT}.checkpoint_engine.backend", "weights go by the quickest way that the two sides have"),
        idle(f"{ROLLOUT}.checkpoint_engine.engine_kwargs", "there is nothing in it", {}, instead="leave it out"),
        read(f"{ROLLOUT}.enable_sleep_mode", f"{ROLLOUT}.free_cache_engine", weak=1),
        fixed(f"{ROLLOUT}.logprobs_mode", "log-probs are those of the distribution that was sampled from",
              "processed_logprobs"),
        fixed(f"{ROLLOUT}.scheduling_policy", "requests are served as they come", "fcfs"),
        idle(f"{ROLLOUT}.sglang_rollout_mode", "SGLang is a server beside each rank", "server"),
        idle(f"{ROLLOUT}.server", "trainer.deadlines and the rollout's own retries say how long it is waited for"),
        gone(f"{ROLLOUT}.quantization_config_file", f"see {ROLLOUT}.quantization"),
        gone(f"{ROLLOUT}.mtp", "rollouts do not speculate"),
        idle(f"{ROLLOUT}.layer_name_map", "weights are matched by the families' own names"),
        idle(f"{ROLLOUT}.engine_kwargs.trtllm", "there is nothing in it", {},
             instead=f"there is no TensorRT-LLM: {ROLLOUT}.name is embedded, vllm, sglang or hf"),
        idle(f"{ROLLOUT}.trace.max_samples_per_step_per_worker", "nothing is traced"),
        gone(f"{ROLLOUT}.cudagraph_capture_sizes", f"set it in {ROLLOUT}.engine_kwargs.vllm.compilation_config"),
        idle(f"{ROLLOUT}.over_sample_rate", "no prompt is begun to be given up: all answers are waited for"),
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
        gone(f"{TURNS}.num_repeat_rollouts", f"set {ROLLOUT}.n"),
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
        idle("data.image_patch_size", "the model's own processor says it"),
        idle("data.return_multi_modal_inputs", "images travel with their prompts"),
        idle("data.video_key", "there are no videos", "videos", instead="videos are not read: leave it out"),
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
        *_reward_service(),
        idle("reward_model.enable_resource_pool", "reward_model.nnodes says whether it has devices of its own"),
        gone("reward_model.max_length", "samples are scored whole"),
        agree("reward_model.model.input_tokenizer", f"{MODEL}.path"),
        Alias("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu", over_ranks=True),
    ]


def _reward_service() -> list[Alias]:
    """Return the rules for a reward model that verl serves by a rollout engine.

    In meshrl a reward model runs in a training engine, forward only.
    """
    return [
        idle("reward_model.use_reward_loop", "functions and models score in one way"),
        idle("reward_model.num_workers", "functions run in the controller, or in reward_manager.num_processes"),
        idle("reward_model.rollout", "a reward model scores whole samples in the engine of reward_model.strategy"),
        unset("reward_model.forward_max_token_len_per_gpu", 32768),
        unset("reward_manager.name", "naive"),
        *(fixed(f"{place}source", "managers are named, or file.py:name", "register")
          for place in ("reward_model.reward_loop_", "reward_manager.")),
        *(gone(f"reward_model.reward_loop_{name}", "set reward_manager.name=file.py:name")
          for name in ("module_path", "class_name")),
        gone("reward_manager.module.path", "set reward_manager.name=file.py:name"),
        idle("reward_manager.module.name", "no file is named", "custom_reward_manager",
             instead="set reward_manager.name=file.py:name"),
        unset("custom_reward_function.name", "compute_score"),
    ]  # fmt: skip


def _run() -> list[Alias]:
    return [
        *(read(f"trainer.{name}", f"trainer.{name}", {False: -1, None: -1}, itself=True)
          for name in ("test_freq", "save_freq")),
        *(read(f"trainer.{name}_freq", f"trainer.{name}_after_epoch", {"after_each_epoch": True}, "after_each_epoch")
          for name in ("test", "save")),
        unset("data.val_files", []),
        unset("critic.model.trust_remote_code", False),
        unset("algorithm.rollout_correction.rollout_is_threshold", 2.0),
        fixed("transfer_queue.enable", "batches go from the controller to the workers", False),
        idle("transfer_queue", "batches go from the controller to the workers"),
        idle("algorithm.pf_ppo", "algorithm.use_pf_ppo is off"),
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


# The rules are tried in order. A rule that translates a key passes the new name and value on to the later rules.
ALIASES: tuple[Alias, ...] = (
    *SFT,
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
    *(read(f"{ACTOR}.{name}", f"{ACTOR}.policy_loss.{name}") for name in ("tau_pos", "tau_neg")),
    idle(f"{ACTOR}.use_prefix_grouper", "each sample is computed with its own prompt: the same numbers, more slowly"),
    idle(f"{ACTOR}.calculate_entropy", "the entropy is always in the metrics"),
    idle(f"{ACTOR}.calculate_sum_pi_squared", "it follows from algorithm.adv_estimator"),
    idle(f"{ACTOR}.sum_pi_squared_checkpointing", CHUNKS),
    *(gone(f"{ACTOR}.router_replay.{name}_file", "routes stay in memory") for name in ("record", "replay")),
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
    *ASYNC,
)
PLACES: dict[str, list[int]] = {}  # `Alias.old` -> indices of its rules in `ALIASES`
for _place, _alias in enumerate(ALIASES):
    PLACES.setdefault(_alias.old, []).append(_place)


@dataclass(frozen=True)
class Reading:
    """The translation of one setting. `name` is meshrl's key, or None if there is nothing to set.

    `agrees`, `over_ranks`, `weak` and `needs` are those of the rules that matched (see `Alias`).
    """

    name: str | None
    value: Any
    agrees: bool = False
    over_ranks: bool = False
    weak: int = 0
    needs: tuple[str, tuple[Any, ...]] | None = None  # if this key of the finished config has another value: `problem`
    note: str | None = None
    problem: str | None = None


def read_setting(name: str, value: Any) -> Reading:
    """Translate a key and its value by the rules in `ALIASES`. A key without a matching rule stays as it is."""
    written, agrees, over_ranks, weak = name, False, False, 0
    if name.rpartition(".")[2] == "_target_" or name.partition(".")[0] == "hydra":
        return Reading(None, value)  # keys of Hydra itself: the class of a section, and Hydra's own settings
    place = 0
    while (place := _next_match(name, place)) < len(ALIASES):
        alias = ALIASES[place]
        place += 1
        fits = not alias.only or any(same(value, known) for known in alias.only)
        if alias.new is not None and not fits:
            continue
        if alias.new is not None and value is None and not alias.values:
            return Reading(None, value)  # null under another name always means that the key is not set
        value = next((ours for theirs, ours in alias.values.items() if same(value, theirs)), value)
        if alias.new is not None and alias.convert is not None:
            value = alias.convert(value)
        if alias.new is not None:
            name = alias.new + name[len(alias.old) :]
            agrees, over_ranks, weak = agrees or alias.agrees, over_ranks or alias.over_ranks, weak or alias.weak
        elif value is None:
            return Reading(None, value)
        elif alias.why and fits:
            problem = f"{written}={value} is not supported: {alias.instead}" if alias.needs else None
            note = f"{alias.old} is not needed: {alias.why}"
            return Reading(None, value, needs=alias.needs, note=note, problem=problem)
        elif alias.instead:
            return Reading(None, value, problem=f"{written}={value} is not supported: {alias.instead}")
    if value is None and (agrees or over_ranks):
        return Reading(None, value)
    return Reading(name, value, agrees, over_ranks, weak)


def canonical(name: str) -> str:
    """Return meshrl's name of a dotted key. Rules for single values are skipped."""
    place = 0
    while (place := _next_match(name, place)) < len(ALIASES):
        alias = ALIASES[place]
        place += 1
        if alias.new is not None and not alias.only:
            name = alias.new + name[len(alias.old) :]
    return name


def has_alias(name: str) -> bool:
    """Return whether a rule exists for this key or for a key below it."""
    return _next_match(name, 0) < len(ALIASES) or any(alias.old.startswith(f"{name}.") for alias in ALIASES)


def _next_match(name: str, start: int) -> int:
    """Return the index in `ALIASES` of the first rule from `start` on that matches a key, else `len(ALIASES)`."""
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
    return below != name and not alias.itself and below.split(".")[0] not in alias.besides
