"""Overrides as well-known scripts of verl set them load and fit together; what cannot be had is still refused."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from meshrl.config import ConfigError, check_config, load_config, unsupported
from meshrl.config.keys import get_value
from meshrl.config.show import summary_lines, to_yaml
from meshrl.config.validate import check_notes

VALIDATES = "data.val_files=held_out.parquet"
BUCKET = "update_weights_bucket_megabytes"
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL, MEGATRON = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"

# What --config-name=ppo_megatron_trainer.yaml chooses there.
WITH_MEGATRON = [f"{ACTOR}.strategy=megatron", "critic.strategy=megatron"]
GRPO_WITH_MEGATRON = WITH_MEGATRON[:1]


def under(prefix: str, words: str) -> list[str]:
    """Overrides below one section."""
    return [f"{prefix}.{word}" for word in words.split()]


def trainer(name: str, words: str = "") -> list[str]:
    """What nearly every script says of the run."""
    return [
        *under("trainer", "critic_warmup=0 n_gpus_per_node=8 save_freq=20 test_freq=5 total_epochs=15"),
        *under("trainer", f"project_name=examples experiment_name={name} {words}"),
        "trainer.logger=['console','wandb']",
    ]


GSM8K = [
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    *under("data", "max_prompt_length=512 max_response_length=1024 filter_overlong_prompts=True truncation=error"),
]

GRPO_FSDP = [
    "algorithm.adv_estimator=grpo",
    *GSM8K,
    *under("data", "train_batch_size=1024 val_batch_size=1312 train_max_samples=-1 val_max_samples=256"),
    *under(MODEL, "path=MODEL use_remove_padding=True enable_gradient_checkpointing=True use_shm=False"),
    *under(ACTOR, "optim.lr=1e-6 ppo_mini_batch_size=256 ppo_micro_batch_size_per_gpu=40 use_kl_loss=True"),
    *under(ACTOR, "kl_loss_coef=0.001 kl_loss_type=low_var_kl entropy_coeff=0 fsdp_config.param_offload=False"),
    *under(ACTOR, "fsdp_config.grad_offload=False fsdp_config.optimizer_offload=False"),
    *under(ROLLOUT, "log_prob_micro_batch_size_per_gpu=40 tensor_model_parallel_size=2 name=vllm n=5"),
    *under(ROLLOUT, "gpu_memory_utilization=0.6 mode=async load_format=dummy_dtensor enforce_eager=False"),
    *under(REF, "log_prob_micro_batch_size_per_gpu=40 fsdp_config.param_offload=True strategy=fsdp2"),
    "algorithm.use_kl_in_reward=False",
    *trainer("grpo_fsdp", "nnodes=1 default_hdfs_dir=null"),
]

# As it was before sizes were given for one GPU.
OLD_GRPO_FSDP = [
    *(line for line in GRPO_FSDP if "micro_batch_size" not in line and "n=5" not in line),
    *under(ACTOR, "ppo_micro_batch_size=128 optim.warmup_style=constant optim.total_training_steps=-1"),
    *under(ROLLOUT, "log_prob_micro_batch_size=128 n=8 disable_log_stats=True ignore_eos=False"),
    f"{REF}.log_prob_micro_batch_size=128",
    "+trainer.val_before_train=False",
    "ray_init.num_cpus=16",
]

LORA = [
    *(line for line in GRPO_FSDP if "load_format" not in line),
    *under(MODEL, "use_shm=True lora_rank=64 lora_alpha=32 target_modules=all-linear exclude_modules=null"),
    *under(ROLLOUT, "load_format=safetensors layered_summon=True free_cache_engine=True"),
    "data.shuffle=False",
]

PPO_FSDP = [
    "algorithm.adv_estimator=gae",
    *GSM8K,
    *under("data", "train_batch_size=1024 return_raw_chat=True dataloader_num_workers=8"),
    *under(MODEL, "path=MODEL use_remove_padding=True use_fused_kernels=True fused_kernel_options.impl_backend=triton"),
    *under(ACTOR, "optim.lr=1e-6 ppo_mini_batch_size=256 use_dynamic_bsz=True ppo_max_token_len_per_gpu=24000"),
    *under(ACTOR, "use_kl_loss=False profiler.enable=True profiler.ranks=[0,1] profiler.all_ranks=False"),
    *under(ACTOR, "ulysses_sequence_parallel_size=2 entropy_checkpointing=True optim.lr_warmup_steps_ratio=0.1"),
    *under(
        REF, "ulysses_sequence_parallel_size=2 profiler.enable=True profiler.ranks=[0,1] entropy_checkpointing=True"
    ),
    *under(ROLLOUT, "tensor_model_parallel_size=2 name=vllm gpu_memory_utilization=0.5 max_num_batched_tokens=9000"),
    *under(ROLLOUT, "log_prob_max_token_len_per_gpu=24000 agent.num_workers=8 cudagraph_capture_sizes=null"),
    *under("critic", "optim.lr=1e-5 model.path=MODEL model.use_remove_padding=True use_dynamic_bsz=True"),
    *under("critic", "ppo_max_token_len_per_gpu=98304 forward_max_token_len_per_gpu=98304"),
    *under("critic", "model.fsdp_config.param_offload=False model.fsdp_config.optimizer_offload=True"),
    *under("critic", "ulysses_sequence_parallel_size=2 profiler.enable=True"),
    "algorithm.use_kl_in_reward=False",
    *under("global_profiler", "tool=nsys steps=[1,2,5] global_tool_config.nsys.discrete=True"),
    "global_profiler.global_tool_config.nsys.worker_nsight_options.trace='cuda,nvtx'",
    *trainer("ppo_fsdp", "nnodes=1 use_legacy_worker_impl=auto"),
]

PPO_MEGATRON = [
    *WITH_MEGATRON,
    "algorithm.adv_estimator=gae",
    "data.train_files=['gsm8k/train.parquet', 'math/train.parquet']",
    "data.val_files=['gsm8k/test.parquet', 'math/test.parquet']",
    *under("data", "train_batch_size=1024 max_prompt_length=1024 max_response_length=512 truncation=error"),
    *under(ACTOR, "optim.lr=1e-6 ppo_mini_batch_size=256 ppo_micro_batch_size_per_gpu=4 use_kl_loss=False"),
    *under(MEGATRON, "pipeline_model_parallel_size=2 tensor_model_parallel_size=2 use_mbridge=True seed=42"),
    *under(MEGATRON, "override_transformer_config.bf16=true override_transformer_config.fp16=false"),
    *under(f"+{MEGATRON}.override_ddp_config", "overlap_grad_reduce=True grad_reduce_in_fp32=True"),
    *under(ROLLOUT, "log_prob_micro_batch_size_per_gpu=4 tensor_model_parallel_size=4 name=vllm"),
    *under(f"{REF}.megatron", "pipeline_model_parallel_size=2 tensor_model_parallel_size=2 use_mbridge=True"),
    *under("critic", "optim.lr=1e-5 model.path=MODEL ppo_micro_batch_size_per_gpu=4 nccl_timeout=1200"),
    *under("critic.megatron", "tensor_parallel_size=2 pipeline_parallel_size=2"),
    "algorithm.use_kl_in_reward=False",
    *trainer("ppo_megatron", "nnodes=1 max_actor_ckpt_to_keep=1 max_critic_ckpt_to_keep=1"),
]

DAPO = [
    "data.train_files=dapo.parquet",
    "data.val_files=aime.parquet",
    *under("data", "prompt_key=prompt truncation=left max_prompt_length=2048 max_response_length=20480"),
    *under("data", "gen_batch_size=1536 train_batch_size=512"),
    *under("algorithm", "adv_estimator=grpo use_kl_in_reward=False kl_ctrl.kl_coef=0.0 filter_groups.enable=True"),
    *under("algorithm", "filter_groups.max_num_gen_batches=10 filter_groups.metric=acc"),
    *under(ACTOR, "use_kl_loss=False kl_loss_coef=0.0 clip_ratio_low=0.2 clip_ratio_high=0.28 clip_ratio_c=10.0"),
    *under(ACTOR, "use_dynamic_bsz=True ppo_max_token_len_per_gpu=22528 optim.lr=1e-6 optim.lr_warmup_steps=10"),
    *under(ACTOR, "optim.weight_decay=0.1 ppo_mini_batch_size=32 fsdp_config.param_offload=True entropy_coeff=0"),
    *under(ACTOR, "fsdp_config.optimizer_offload=True fsdp_config.fsdp_size=-1 grad_clip=1.0"),
    *under(ACTOR, "loss_agg_mode=token-mean ulysses_sequence_parallel_size=8"),
    *under(REF, "log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528 fsdp_config.param_offload=True"),
    *under(REF, "ulysses_sequence_parallel_size=8 fsdp_config.fsdp_size=-1"),
    *under(ROLLOUT, "n=16 log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528 name=vllm"),
    *under(ROLLOUT, "gpu_memory_utilization=0.80 tensor_model_parallel_size=4 enable_chunked_prefill=True"),
    *under(ROLLOUT, "max_num_batched_tokens=22528 temperature=1.0 top_p=1.0 top_k=-1"),
    *under(f"{ROLLOUT}.val_kwargs", "temperature=1.0 top_p=0.7 top_k=-1 do_sample=True n=1"),
    *under(f"+{MODEL}.override_config", "attention_dropout=0. embd_pdrop=0. resid_pdrop=0."),
    "reward_model.reward_manager=dapo",
    *under("reward_model.overlong_buffer", "enable=True len=4096 penalty_factor=1.0"),
    *under("trainer", "nnodes=16 val_before_train=True resume_mode=auto default_local_dir=ckpts"),
    *trainer("dapo", "backend=ray"),
]

# Of 64 GPUs 4 share a sequence and 32 a copy of the weights.
DAPO_7B = [
    *(line for line in DAPO if "fsdp_size" not in line and "ulysses" not in line and "length=" not in line
      and "max_token" not in line and "max_num_batched_tokens" not in line and "filter_groups" not in line
      and "gen_batch_size" not in line and "pdrop" not in line and "attention_dropout" not in line
      and "overlong_buffer" not in line and "nnodes" not in line and "clip_ratio" not in line),
    *under("data", "max_prompt_length=2048 max_response_length=8192"),
    *under(ACTOR, "ulysses_sequence_parallel_size=4 fsdp_config.fsdp_size=32 ppo_max_token_len_per_gpu=20480"),
    *under(ACTOR, "use_kl_loss=False kl_loss_coef=0.0 clip_ratio_low=0.4 clip_ratio_high=0.4"),
    # Here a loss of whole sequences says so; see the page on migration.
    *under(ACTOR, "policy_loss.loss_mode=geo_mean loss_agg_mode=seq-mean-token-mean"),
    *under(REF, "ulysses_sequence_parallel_size=4 log_prob_max_token_len_per_gpu=30720"),
    *under(ROLLOUT, "log_prob_max_token_len_per_gpu=30720 max_num_batched_tokens=10240"),
    f"+{MODEL}.override_config.max_position_embeddings=32768",
    *under("+reward_model.reward_kwargs.overlong_buffer_cfg", "enable=True len=4096 penalty_factor=1.0 log=False"),
    "+reward_model.reward_kwargs.max_resp_len=8192",
    *under("trainer", "nnodes=8 total_training_steps=200 log_val_generations=10"),
]  # fmt: skip

QWEN3_MOE = [
    *GRPO_WITH_MEGATRON,
    *(line for line in DAPO if "fsdp_config" not in line and "ulysses" not in line and "filter_groups" not in line
      and "overlong_buffer" not in line and "gen_batch_size" not in line and "embd_pdrop" not in line),
    f"+{MODEL}.override_config.model_config.max_position_embeddings=32768",
    *under(ACTOR, "optim.lr_decay_style=constant optim.clip_grad=1.0 nccl_timeout=1800"),
    *under(MEGATRON, "use_dist_checkpointing=False param_offload=True grad_offload=True optimizer_offload=True"),
    *under(MEGATRON, "tensor_model_parallel_size=4 pipeline_model_parallel_size=2 expert_model_parallel_size=8"),
    *under(MEGATRON, "virtual_pipeline_model_parallel_size=null context_parallel_size=1 dtype=bfloat16"),
    *under(f"+{MEGATRON}.override_transformer_config", "apply_rope_fusion=True moe_grouped_gemm=True"),
    *under(f"+{MEGATRON}.override_transformer_config", "moe_permute_fusion=True variable_seq_lengths=True"),
    *under(f"{REF}.megatron", "use_dist_checkpointing=False param_offload=True expert_model_parallel_size=8"),
    *under(f"{REF}.megatron", "tensor_model_parallel_size=4 pipeline_model_parallel_size=2 dtype=bfloat16"),
    *under(f"{REF}.megatron", "virtual_pipeline_model_parallel_size=null context_parallel_size=1"),
    *under("+reward_model.reward_kwargs.overlong_buffer_cfg", "enable=True len=4096 penalty_factor=1.0 log=False"),
    "+reward_model.reward_kwargs.max_resp_len=20480",
    *under(ROLLOUT, "calculate_log_probs=True enforce_eager=True free_cache_engine=True mode=async"),
]  # fmt: skip

MULTI_TURN = [
    *(line for line in GRPO_FSDP if "n=5" not in line and "tensor_model_parallel_size" not in line),
    *under("data", "return_raw_chat=True tool_config_path=tools.yaml"),
    *under(ROLLOUT, "name=sglang_async n=16 multi_stage_wake_up=True agent.default_agent_loop=tool_agent"),
    *under(f"{ROLLOUT}.multi_turn", "enable=True max_turns=5 tool_config_path=tools.yaml max_user_turns=1"),
    f"{ROLLOUT}.multi_turn.interaction_config_path=null",
    f"{ROLLOUT}.trace.backend=null",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
    "ray_kwargs.ray_init.num_cpus=null",
]

IMAGES = [
    *(line for line in GRPO_FSDP if "load_format" not in line),
    *under("data", "image_key=images max_prompt_length=1024 max_response_length=2048"),
    *under(ACTOR, "freeze_vision_tower=False ppo_micro_batch_size_per_gpu=10"),
    *under(ROLLOUT, "enable_chunked_prefill=False enforce_eager=False free_cache_engine=True"),
    f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
]

SCRIPTS = {
    "grpo_fsdp": GRPO_FSDP,
    "old_grpo_fsdp": OLD_GRPO_FSDP,
    "lora": LORA,
    "ppo_fsdp": PPO_FSDP,
    "ppo_megatron": PPO_MEGATRON,
    "dapo": DAPO,
    "dapo_7b": DAPO_7B,
    "qwen3_moe": QWEN3_MOE,
    "multi_turn": MULTI_TURN,
    "images": IMAGES,
}


def problems_of(*overrides: str) -> list[str]:
    try:
        config = load_config(None, list(overrides)).config
    except ConfigError as error:
        return error.problems
    return [*unsupported(config), *check_config(config, check_files=False)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_loads_and_fits_together(name: str) -> None:
    assert problems_of(*SCRIPTS[name]) == []


def test_shards_count_ranks_of_a_sequence_as_they_do_there() -> None:
    lines = summary_lines(load_config(None, DAPO_7B).config)
    (actor,) = (line for line in lines if line.startswith("actor: "))
    assert actor == "actor: fsdp2 on 64 ranks = dp 16 * cp 1 * sp 4; weights sharded over 32, 2 copies"
    everything = load_config(None, [*DAPO_7B, f"{ACTOR}.fsdp_config.fsdp_size=-1"]).config
    assert any(line.endswith("sp 4; weights sharded over 64") for line in summary_lines(everything))
    # Fewer than those of a sequence are as good as any; what does not divide all ranks is refused.
    assert problems_of(*DAPO_7B, f"{ACTOR}.fsdp_config.fsdp_size=2") == []
    (problem,) = problems_of(*DAPO_7B, f"{ACTOR}.fsdp_config.fsdp_size=24")
    assert problem == (
        f"n_gpus (64 = trainer.nnodes * n_gpus_per_node) must be divisible by {ACTOR}.fsdp_config.fsdp_size (24)"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_each_a_misspelt_key_is_found(name: str) -> None:
    (problem,) = problems_of(*SCRIPTS[name], f"{ROLLOUT}.tensor_model_paralel_size=2")
    assert f"did you mean {ROLLOUT}.tensor_model_parallel_size?" in problem


def value_after(name: str, *overrides: str) -> object:
    return get_value(load_config(None, list(overrides)).config, name)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64", f"{ROLLOUT}.{BUCKET}", 64),
        (f"{ACTOR}.tau_pos=2", f"{ACTOR}.policy_loss.tau_pos", 2.0),
        (f"{ACTOR}.tau_neg=2", f"{ACTOR}.policy_loss.tau_neg", 2.0),
        (f"{MODEL}.lora.rank=8", f"{MODEL}.lora_rank", 8),
        (f"{MODEL}.lora.alpha=8", f"{MODEL}.lora_alpha", 8.0),
        (f"{MODEL}.lora.merge=True", f"{ROLLOUT}.update_weights_adapters", "merged"),
        (f"{MODEL}.lora.target_modules=[linear_qkv,linear_fc2]", f"{MODEL}.target_modules",
         ["q_proj", "k_proj", "v_proj", "down_proj"]),
        (f"{MODEL}.lora.exclude_modules=[linear_proj]", f"{MODEL}.exclude_modules", ["o_proj"]),
        (f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", f"{MEGATRON}.optimizer_offload", True),
        ("trainer.test_freq=False", "trainer.test_freq", -1),
        ("trainer.save_freq=null", "trainer.save_freq", -1),
        (f"{ACTOR}.optim.lr_warmup_steps=null", f"{ACTOR}.optim.lr_warmup_steps", -1),
        ("custom_reward_function.name=null", "custom_reward_function.name", "compute_score"),
        (f"{ROLLOUT}.enable_sleep_mode=False", f"{ROLLOUT}.free_cache_engine", False),
        (f"{ROLLOUT}.disable_log_stats=False", f"{ROLLOUT}.engine_kwargs.vllm", {"disable_log_stats": False}),
        ("rollout.nnodes=2", f"{ROLLOUT}.nnodes", 2),
        ("rollout.n=2", f"{ROLLOUT}.n", 2),
        ("async_training.staleness_threshold=0.5", "async_training.max_staleness", 1),
        ("async_training.staleness_threshold=1.5", "async_training.max_staleness", 2),
        ("async_training.compute_prox_log_prob=True", "algorithm.rollout_correction.bypass_mode", False),
        ("async_training.use_rollout_log_probs=True", "algorithm.rollout_correction.bypass_mode", True),
        (f"{ACTOR}.nccl_timeout=1800", "trainer.deadlines.collective", 1800.0),
        ("critic.megatron.tensor_parallel_size=4", "critic.megatron.tensor_model_parallel_size", 4),
        ("critic.model.fsdp_config.optimizer_offload=True", "critic.fsdp_config.optimizer_offload", True),
        ("reward_model.model.fsdp_config.param_offload=True", "reward_model.fsdp_config.param_offload", True),
        (f"{REF}.megatron.param_offload=True", f"{REF}.fsdp_config.param_offload", True),
        (f"{ROLLOUT}.name=hf_transformers", f"{ROLLOUT}.name", "hf"),
        (f"{ROLLOUT}.load_format=dummy_megatron", f"{ROLLOUT}.load_format", "dummy"),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        ("critic.optim.lr_decay_style=linear", "critic.optim.lr_scheduler_type", "linear"),
        (f"{ACTOR}.optim.optimizer=adam", f"{ACTOR}.optim.optimizer", "AdamW"),
        (f"{ACTOR}.optim.grad_clip=0.5", f"{ACTOR}.grad_clip", 0.5),
        ("data.pack_sequences=false", f"{MODEL}.use_remove_padding", False),
        (f"{ACTOR}.use_token_level_loss=False", f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=64", "reward_manager.overlong_buffer.len", 64),
        ("custom_reward_function.overlong_buffer.len=64", "reward_manager.overlong_buffer.len", 64),
        ("ray_kwargs.ray_init.num_cpus=4", "ray_init.num_cpus", 4),
        ("trainer.default_hdfs_dir=hdfs://here/runs", "trainer.remote_dir", "hdfs://here/runs"),
        ("trainer.resume_from_path=False", "trainer.resume_from_path", None),
        (f"{ACTOR}.profiler.all_ranks=True", "global_profiler.ranks", []),
        ("global_profiler.steps=null", "global_profiler.steps", []),
        (f"{REF}.model=null", f"{REF}.model.path", None),
        (f"{ACTOR}.checkpoint.contents=['model']", f"{ACTOR}.checkpoint.save_contents", ["model"]),
        (f"{MEGATRON}.override_ddp_config={{overlap_param_gather: true}}", f"{MEGATRON}.overlap_param_gather", True),
    ],
)  # fmt: skip
def test_what_is_read_has_its_effect(override: str, name: str, value: object) -> None:
    assert value_after(name, override) == value
    assert load_config(None, [override]).notes or value in (None, []) or override.endswith("=null")


@pytest.mark.parametrize(
    "override",
    [
        "reward_model.use_reward_loop=True", "reward_model.rollout.name=vllm", "reward_model.num_workers=8",
        f"{REF}.use_torch_compile=True", f"{ACTOR}.optim.lr_decay_steps=99", f"{MEGATRON}.dist_checkpointing_path=x",
        f"{ACTOR}.calculate_sum_pi_squared=True", f"{ROLLOUT}.over_sample_rate=0.1", "hydra.run.dir=x",
        f"{ROLLOUT}.mode=async", f"{ROLLOUT}.layered_summon=true", f"{ROLLOUT}.data_parallel_size=2",
        f"{MODEL}.use_fused_kernels=true", f"{ACTOR}.model.use_flash_attention_2=true", "data.return_raw_chat=True",
        "global_profiler.global_tool_config.nsys.discrete=true", f"{ACTOR}.profiler.tool_config.torch.with_stack=true",
        f"{ACTOR}.optim.total_training_steps=100", f"{ACTOR}.optim.num_cycles=0.5",
        f"{MEGATRON}.override_transformer_config.fp16=false", "global_profiler._target_=some.Class",
    ],
)  # fmt: skip
def test_what_is_so_anyway_changes_nothing(override: str) -> None:
    loaded = load_config(None, [override])
    assert loaded.config == load_config().config
    assert set(loaded.sources.values()) == {"default"} | {s for s in loaded.sources.values() if s.startswith("follows")}
    assert len(loaded.notes) == (not override.startswith("hydra") and "_target_" not in override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{REF}.strategy=fsdp"], [f"{REF}.strategy=fsdp", f"{ACTOR}.strategy says (fsdp2)"]),
        ([f"{REF}.megatron.tensor_model_parallel_size=2"], ["=2 must say what", "tensor_model_parallel_size says (1)"]),
        ([f"{REF}.fsdp_config.fsdp_size=4", f"{ACTOR}.fsdp_config.fsdp_size=8"], ["=4 must say what", "says (8)"]),
        (["+reward_model.reward_kwargs.max_resp_len=64"], ["data.max_response_length says (512)"]),
        ([f"{MEGATRON}.override_transformer_config.fp16=true"], [f"{MEGATRON}.dtype says (bf16)"]),
        ([f"{ROLLOUT}.agent.default_agent_loop=tool_agent"], [f"{ROLLOUT}.multi_turn.enable says (False)"]),
        ([f"{ACTOR}.optim.num_cycles=2"], ["num_cycles=2 is not supported", "0.5"]),
        (
            [f"{ACTOR}.optim.lr_wsd_decay_style=exponential", f"{ACTOR}.optim.lr_scheduler_type=wsd"],
            ["the decay of wsd is linear"],
        ),
        ([f"{ACTOR}.optim.lr_decay_steps=9", f"{ACTOR}.optim.lr_decay_style=cosine"], ["schedules end with the run"]),
        ([f"{ACTOR}.optim.lr_wsd_decay_steps=10"], [f"set {ACTOR}.optim.lr_decay_steps_ratio"]),
        ([f"{ACTOR}.optim.min_lr=1e-7"], [f"set {ACTOR}.optim.min_lr_ratio"]),
        ([f"{MEGATRON}.dist_checkpointing_path=ckpt", f"{MEGATRON}.use_dist_checkpointing=true"], ["meshrl convert"]),
        ([f"+{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction=0.5"], ["megatron.optimizer_offload"]),
        (["algorithm.kl_ctrl.kl_coef=0.5"], ["kl_ctrl.kl_coef has no effect"]),
        (["data.train_files="], ["is a variable of the shell empty?"]),
        (["trainer.nnodes= "], ["is a variable of the shell empty?"]),
        ([f"{ACTOR}.fixed_num_micro_batches=16"], ["ppo_max_token_len_per_gpu"]),
        ([f"{ROLLOUT}.multi_turn.interaction_config_path=x.yaml"], [f"set {ROLLOUT}.multi_turn.environment"]),
        (["data.train_max_samples=0"], ["-1 takes all"]),
        (["data.train_max_samples=2048", "data.streaming=true"], ["does not go with data.streaming=true"]),
        (["data.train_max_samples=100"], ["fewer than one batch of 1024"]),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_what_to_do(overrides: list[str], words: Iterable[str]) -> None:
    refused = [problem for problem in problems_of(*overrides) if words[0] in problem]
    assert len(refused) == 1
    assert all(word in refused[0] for word in words)


def test_agreement_does_not_depend_on_the_order() -> None:
    both = [f"{REF}.ulysses_sequence_parallel_size=4", f"{ACTOR}.ulysses_sequence_parallel_size=4"]
    for overrides in (both, both[::-1]):
        assert load_config(None, overrides).config.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 4


def test_a_recipe_may_hold_them_too(tmp_path) -> None:
    recipe = tmp_path / "verl.yaml"
    recipe.write_text(
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    megatron:\n"
        "      override_transformer_config: {bf16: true, fp16: false, apply_rope_fusion: true}\n"
        "      override_ddp_config: {}\n"
        "  ref: {model: null, megatron: {override_transformer_config: {apply_rope_fusion: true}}}\n"
        "global_profiler:\n"
        "  _target_: some.Class\n"
        "  steps: [5]\n"
        "  global_tool_config: {nsys: {discrete: true, worker_nsight_options: {trace: cuda}}}\n"
    )
    loaded = load_config(recipe)
    megatron = loaded.config.actor_rollout_ref.actor.megatron
    assert megatron.override_transformer_config == {"apply_rope_fusion": True}
    assert loaded.config.global_profiler.steps == [5]
    assert [note for note in loaded.notes if "global_tool_config" in note] == [
        "global_profiler.global_tool_config is not needed: you start nsys yourself and give it its options there"
    ]


def notes_of(*overrides: str) -> list[str]:
    loaded = load_config("grpo", list(overrides))
    assert check_config(loaded.config, check_files=False) == []
    return check_notes(loaded.config, loaded.sources)


def test_a_whole_config_in_a_file_is_not_noted(tmp_path: Path) -> None:
    """As `meshrl config` prints it."""
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(load_config("grpo").config))
    loaded = load_config(str(file), ["ray_init.num_cpus=4"])
    assert [*loaded.notes, *check_notes(loaded.config, loaded.sources)] == [
        "ray_init.num_cpus is for trainer.backend=ray: no Ray is started"
    ]


def test_a_default_that_somebody_wrote_for_nothing_is_noted() -> None:
    name = f"{ROLLOUT}.enable_prefix_caching"
    assert notes_of() == []
    assert notes_of(f"{ROLLOUT}.name=hf") == []
    (note,) = notes_of(f"{ROLLOUT}.name=hf", f"{name}=true")
    assert note == f"{name} is only read by {ROLLOUT}.name=embedded or vllm or sglang, but it is hf"
    assert notes_of(f"{name}=true") == []
    assert any(name in problem for problem in problems_of(f"{ROLLOUT}.name=hf", f"{name}=false"))
    clips = [f"{ACTOR}.clip_ratio={low}" for low in (0.2, 0.3)]
    sides = [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"]
    assert all("has no effect beside" in notes_of(clip, *sides)[0] for clip in clips)
    assert notes_of(clips[1], sides[1]) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{ROLLOUT}.load_format=safetensors"], "the trainer's weights"),
        ([f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.enable_chunked_prefill=False"], "only read by"),
        ([f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True"], "only read"),
        ([f"{ROLLOUT}.name=vllm", f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3"], "only read by"),
        ([f"{ROLLOUT}.name=hf", f"{ROLLOUT}.gpu_memory_utilization=0.8"], "only read by"),
        ([VALIDATES, f"{ROLLOUT}.val_kwargs.temperature=0.6"], "which takes the likeliest token"),
        ([VALIDATES, f"{ROLLOUT}.val_kwargs.top_p=0.9"], "which takes the likeliest token"),
        ([f"{ACTOR}.kl_loss_type=k1"], "without actor_rollout_ref.actor.use_kl_loss=true"),
        ([f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_c=5"], "it is for vanilla"),
        (["algorithm.lam=0.95"], "it is for gae"),
        (["algorithm.kl_penalty=k3"], "with algorithm.use_kl_in_reward=false"),
        (["critic.strategy=fsdp"], "it has no critic"),
        (["critic.ppo_max_token_len_per_gpu=99"], "it has no critic"),
        ([f"{ACTOR}.fsdp_config.use_orig_params=true"], "with actor_rollout_ref.actor.strategy=fsdp2"),
        ([f"{MODEL}.exclude_modules=x"], "lora_rank"),
        ([f"{ACTOR}.checkpoint.save_contents=[model]"], "without trainer.save_freq"),
        ([f"{ROLLOUT}.name=hf", f"{ROLLOUT}.enforce_eager=True"], "no CUDA graphs"),
        (["ray_init.num_cpus=8"], "no Ray is started"),
        (["trainer.max_actor_ckpt_to_keep=1"], "writes none"),
    ],
)
def test_what_could_do_no_harm_is_noted(overrides: list[str], words: str) -> None:
    (note,) = notes_of(*overrides)
    assert words in note


def test_a_coefficient_of_a_kl_that_is_off_may_be_zero_only() -> None:
    assert problems_of("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", f"{ACTOR}.use_dynamic_bsz=true",
                       "algorithm.kl_ctrl.kl_coef=0", f"{ACTOR}.kl_loss_coef=0") == []  # fmt: skip
    for key in ("algorithm.kl_ctrl.kl_coef", f"{ACTOR}.kl_loss_coef"):
        assert any(key in problem for problem in problems_of(f"{key}=0.5"))


def test_replay_of_routes_has_one_key() -> None:
    mode, enabled = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
    known = problems_of(*PPO_MEGATRON)
    for agreeing in ([f"{mode}=R3", f"{enabled}=true"], [f"{mode}=R2", f"{enabled}=false"]):
        assert [line for line in problems_of(*PPO_MEGATRON, *agreeing) if line not in known] == []
    refused = [line for line in problems_of(*PPO_MEGATRON, f"{mode}=R2", f"{enabled}=true") if enabled in line]
    assert len(refused) == 1
    assert mode in refused[0]
    key = f"{MEGATRON}.override_transformer_config.moe_enable_routing_replay"
    refused = [line for line in problems_of(*PPO_MEGATRON, f"+{key}=true") if key in line]
    assert len(refused) == 1
    assert "set actor.router_replay.mode" in refused[0]


def test_a_micro_batch_in_samples_is_noted_where_tokens_count() -> None:
    name = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    (note,) = notes_of(f"{name}=4")
    assert note == f"{name} has no effect with {ACTOR}.use_dynamic_bsz=true: it is for {ACTOR}.use_dynamic_bsz=false"
    assert notes_of(f"{name}=4", f"{ACTOR}.use_dynamic_bsz=false") == []
    assert len(notes_of(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4")) == 1
