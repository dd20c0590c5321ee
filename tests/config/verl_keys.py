"""The most used keys of verl's `ppo_trainer` (0.9), with the defaults it gives them; an empty default: unset."""

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"

GROUPS: dict[str, str] = {
    "data": """train_files val_files train_max_samples=-1 val_max_samples=-1 prompt_key=prompt
        apply_chat_template_kwargs={} reward_fn_key=data_source max_prompt_length=512 max_response_length=512
        train_batch_size=1024 gen_batch_size val_batch_size shuffle=true seed filter_overlong_prompts=false
        truncation=error custom_cls.path
        custom_cls.name dataloader_num_workers=8""",
    "actor_rollout_ref": "hybrid_engine=true nccl_timeout=600",
    M: """path tokenizer_path trust_remote_code=false custom_chat_template external_lib override_config={}
        enable_gradient_checkpointing=true enable_activation_offload=false use_remove_padding=true
        use_fused_kernels=false use_liger=false lora_rank=0 lora_alpha=16 target_modules=all-linear
        exclude_modules lora_adapter_path""",
    A: """strategy=fsdp ppo_mini_batch_size=256 ppo_micro_batch_size_per_gpu use_dynamic_bsz=false
        ppo_max_token_len_per_gpu=16384 clip_ratio=0.2 clip_ratio_low=0.2 clip_ratio_high=0.2 clip_ratio_c=3.0
        loss_agg_mode=token-mean loss_scale_factor entropy_coeff=0 use_kl_loss=false kl_loss_coef=0.001
        kl_loss_type=low_var_kl ppo_epochs=1 shuffle=false grad_clip=1.0 use_torch_compile=true
        ulysses_sequence_parallel_size=1 policy_loss.loss_mode=vanilla""",
    f"{A}.optim": """lr=1e-6 optimizer=AdamW weight_decay=0.01 betas=[0.9,0.999] lr_warmup_steps=-1
        lr_warmup_steps_ratio=0.0 lr_scheduler_type=constant min_lr_ratio=0.0""",
    f"{A}.fsdp_config": """param_offload=false optimizer_offload=false offload_policy=false reshard_after_forward=true
        fsdp_size=-1 forward_prefetch=false model_dtype=fp32 mixed_precision.param_dtype mixed_precision.reduce_dtype
        mixed_precision.buffer_dtype wrap_policy.transformer_layer_cls_to_wrap wrap_policy.min_num_params=0
        wrap_policy.disable use_orig_params=false""",
    f"{A}.megatron": """tensor_model_parallel_size=1 pipeline_model_parallel_size=1
        virtual_pipeline_model_parallel_size context_parallel_size=1 expert_model_parallel_size=1
        expert_tensor_parallel_size sequence_parallel=true use_distributed_optimizer=true param_offload=false
        grad_offload=false optimizer_offload=false use_dist_checkpointing=false override_transformer_config={}""",
    f"{A}.checkpoint": "save_contents=[model,optimizer,extra] load_contents async_save=false",
    "actor_rollout_ref.ref": """log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
        log_prob_max_token_len_per_gpu fsdp_config.param_offload""",
    R: """name mode n=1 temperature=1.0 top_k=-1 top_p=1 ignore_eos=false do_sample=true
        prompt_length response_length dtype=bfloat16
        gpu_memory_utilization=0.5 tensor_model_parallel_size data_parallel_size=1 max_num_batched_tokens=8192
        max_num_seqs=256 max_model_len enforce_eager=false free_cache_engine=true enable_chunked_prefill=true
        enable_prefix_caching=true load_format=dummy layered_summon=false calculate_log_probs=true
        update_weights_bucket_megabytes val_kwargs.temperature=0 val_kwargs.n=1 val_kwargs.do_sample=false
        val_kwargs.top_p=1.0 engine_kwargs.vllm engine_kwargs.sglang""",
    f"{R}.multi_turn": """enable=false max_assistant_turns max_user_turns tool_config_path format=hermes
        max_parallel_calls=1 max_tool_response_length=256""",
    "critic": """enable strategy optim.lr=1e-5 ppo_max_token_len_per_gpu=32768 cliprange_value=0.5 ppo_epochs
        model.path""",
    "algorithm": """adv_estimator=gae gamma=1.0 lam=1.0 norm_adv_by_std_in_grpo=true use_kl_in_reward=false
        kl_penalty=kl kl_ctrl.type=fixed kl_ctrl.kl_coef=0.001 kl_ctrl.horizon=10000 kl_ctrl.target_kl=0.1
        filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches rollout_correction.rollout_is
        rollout_correction.rollout_is_threshold=2.0 rollout_correction.rollout_rs rollout_correction.bypass_mode
        rollout_correction.loss_type""",
    "custom_reward_function": "path name=compute_score",
    "reward_manager": "name=naive",
    "trainer": """nnodes=1 n_gpus_per_node=8 total_epochs=30 total_training_steps project_name experiment_name
        logger save_freq=-1 test_freq=-1 val_before_train=true val_only=false critic_warmup=0 balance_batch=true
        resume_mode=auto resume_from_path default_local_dir max_actor_ckpt_to_keep rollout_data_dir
        validation_data_dir log_val_generations=0 device""",
    "global_profiler": "tool steps save_path=outputs/profile",
    "ray_init": "num_cpus",
}

VERL_KEYS: dict[str, str] = {
    f"{group}.{word.partition('=')[0]}": word.partition("=")[2]
    for group, words in GROUPS.items()
    for word in words.split()
}
