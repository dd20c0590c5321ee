"""The fields of TRL 1.16's GRPOConfig that TrainingArguments has not, with their defaults."""

OWN: dict[str, object] = {
    "model_init_kwargs": None, "trust_remote_code": False, "router_aux_loss_coef": None, "disable_dropout": False,
    "cast_lm_head_to_fp32": False, "num_generations": 8, "num_generations_eval": None, "max_completion_length": 512,
    "ds3_gather_for_generation": True, "shuffle_dataset": True, "pad_to_multiple_of": "auto",
    "generation_batch_size": None, "steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "min_p": None, "generation_kwargs": None, "chat_template_kwargs": None, "repetition_penalty": 1.0,
    "cache_implementation": None, "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": None, "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1, "beta": 0.0,
    "num_iterations": 1, "epsilon": 0.2, "delta": None, "epsilon_high": None, "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "importance_sampling_level": "token", "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "loss_type": "dapo",
    "mask_truncated_completions": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None, "use_bias_correction_kl": True,
    "log_completions": False, "log_multimodal": True, "num_completions_to_print": None, "log_unique_prompts": False,
    "log_completions_hub_repo": None, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
    "vllm_importance_sampling_cap": None,
}  # fmt: skip
# Those of TrainingArguments that the page names.
INHERITED = (
    "learning_rate", "gradient_checkpointing", "bf16", "max_steps", "num_train_epochs", "seed", "output_dir",
    "report_to", "save_steps", "save_total_limit", "eval_steps", "max_grad_norm", "weight_decay", "warmup_steps",
    "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
