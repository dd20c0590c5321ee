"""A config that is fine passes; each thing that can be wrong, alone, gives its one line with the numbers and keys."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.config import ConfigError, PPOConfig, SFTConfig, check_config, ensure_runnable, load_config, model_folder
from meshrl.config.model_folder import written_stages

MakePPO = Callable[..., PPOConfig]
MakeSFT = Callable[..., SFTConfig]
MakeModel = Callable[..., Path]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
WSD = f"{ACTOR}.optim.lr_scheduler_type=wsd"
MEGATRON = [f"{ACTOR}.strategy=megatron"]
GAE = ["algorithm.adv_estimator=gae"]
CORRECTION = "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss"
SAPO = [f"{LOSS}.loss_mode=sapo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]
EXPERTS = ["actor_rollout_ref.model.override_config.num_experts=16"]


def test_a_config_that_is_fine(fine: MakePPO, fine_sft: MakeSFT) -> None:
    for config in (fine(), fine_sft()):
        assert check_config(config) == []
        ensure_runnable(config)


BROKEN = [
    # sizes
    (["trainer.n_gpus_per_node=6", f"{ACTOR}.ulysses_sequence_parallel_size=4"], "n_gpus (6 = ", "(4)"),
    ([f"{ACTOR}.fsdp_config.fsdp_size=3"], "n_gpus (8 = ", f"by {ACTOR}.fsdp_config.fsdp_size (3)"),
    ([f"{ACTOR}.fsdp_config.fsdp_size=16"], "n_gpus (8 = ", f"by {ACTOR}.fsdp_config.fsdp_size (16)"),
    (
        [f"{ACTOR}.fsdp_config.fsdp_size=3", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        "n_gpus (8 = ",
        f"by {ACTOR}.fsdp_config.fsdp_size (3)",
    ),
    ([f"{ACTOR}.fsdp_config.fsdp_size=0"], "fsdp_size=0", "-1"),
    ([*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=3"], "n_gpus (8 = ", "3 * 1 * 1 = 3"),
    ([*MEGATRON, *EXPERTS, f"{ACTOR}.megatron.expert_model_parallel_size=16"], "expert_model_parallel_size", "= 16"),
    ([*MEGATRON, f"{ACTOR}.megatron.expert_model_parallel_size=2"], "expert_model_parallel_size=2", "with experts"),
    ([*MEGATRON, f"{ACTOR}.megatron.schedule_type=interleaved"], "schedule_type=interleaved", "no-pipelining"),
    (
        [
            *MEGATRON,
            f"{ACTOR}.megatron.overlap_param_gather=true",
            f"{ACTOR}.megatron.overlap_grad_reduce=true",
            f"{ACTOR}.megatron.use_distributed_optimizer=false",
        ],
        "overlap_param_gather",
        "use_distributed_optimizer",
    ),
    (
        [*MEGATRON, f"{ACTOR}.megatron.override_transformer_config.recompute_granularty=full"],
        "has no field 'recompute_granularty'",
        "recompute_granularity",
    ),
    (
        [*MEGATRON, f"{ACTOR}.megatron.override_transformer_config.num_layers=3"],
        "cannot be set here",
        "override_config",
    ),
    (
        [
            *MEGATRON,
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
            f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2",
            f"{ACTOR}.megatron.override_transformer_config.batch_p2p_comm=true",
        ],
        "batch_p2p_comm=true",
        "wrong numbers",
    ),
    ([*MEGATRON, f"{ACTOR}.context_parallel_size=2"], "context_parallel_size has no effect", "strategy=megatron"),
    ([*MEGATRON, "actor_rollout_ref.model.lora_rank=4"], "lora_rank has no effect", "strategy=megatron"),
    ([*MEGATRON, f"{ACTOR}.keep_logits_megabytes=9"], "keep_logits_megabytes has no effect", "strategy=megatron"),
    ([*MEGATRON, f"{ACTOR}.megatron.grad_offload=true"], "grad_offload has no effect", "optimizer_offload=true"),
    ([f"{ACTOR}.activation_memory_budget=0.3"], "activation_memory_budget has no effect", "use_torch_compile=true"),
    (
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,embed_tokens,lm_head]"],
        "model.target_modules: adapters of lm_head and embed_tokens",
        "name linear layers",
    ),
    (
        [*GAE, "critic.strategy=megatron", "critic.model.lora_rank=8"],
        "critic.model.lora_rank has no effect",
        "megatron",
    ),
    ([*GAE, "critic.megatron.param_offload=true"], "critic.megatron.param_offload has no effect", "strategy=fsdp2"),
    (
        [f"{ACTOR}.policy_loss.loss_mode=icepop", f"{CORRECTION}.rollout_is=sequence"],
        "rollout_is has no effect",
        "icepop",
    ),
    ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "loss of whole sequences", "loss_agg_mode=seq-mean-token-mean"),
    (["algorithm.kl_ctrl.kl_coef=0.1"], "kl_ctrl.kl_coef has no effect", "use_kl_in_reward=false"),
    ([*MEGATRON, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"], "pipeline_model_parallel_size > 1", ""),
    ([f"{ROLLOUT}.tensor_model_parallel_size=6"], "n_gpus (8 = ", f"{ROLLOUT}.tensor_model_parallel_size (6)"),
    # batches
    (["data.train_batch_size=1000"], "data.train_batch_size (1000 prompts)", "ppo_mini_batch_size (256 prompts)"),
    (["data.train_batch_size=128"], "data.train_batch_size (128 prompts)", "ppo_mini_batch_size (256 prompts)"),
    (
        [f"{ROLLOUT}.n=3", f"{ACTOR}.ppo_mini_batch_size=1"],
        "(1 * 3 = 3 samples)",
        "data-parallel size (8 = trainer.nn",
    ),
    ([f"{ACTOR}.use_dynamic_bsz=false"], "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz=true"),
    (
        [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=7"],
        "(256 * 8 / 8 = 256)",
        "ppo_micro_batch_size_per_gpu (7)",
    ),
    (
        [
            "data.max_response_length=3000",
            f"{ACTOR}.ppo_max_token_len_per_gpu=3511",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=3512",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=3512",
        ],
        f"{ACTOR}.ppo_max_token_len_per_gpu (3511)",
        "512 + 3000 = 3512",
    ),
    ([f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1000"], f"{ROLLOUT}.log_prob_max_token_len_per_gpu (1000)", "1024"),
    (["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9"], "ref.log_prob_max_token_len_per_gpu (9)", "1024"),
    ([f"{ROLLOUT}.log_prob_use_dynamic_bsz=false"], f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", ""),
    (["actor_rollout_ref.model.lora_alpha=32"], "lora_alpha has no effect", "model.lora_rank"),
    (["actor_rollout_ref.model.target_modules=[q_proj]"], "target_modules has no effect", "model.lora_rank"),
    ([f"{ACTOR}.optim.min_lr_ratio=0.1"], "min_lr_ratio=0.1 has no effect", "lr_scheduler_type=constant"),
    (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=9"], "kl_ctrl.horizon has no effect", "fixed"),
    (["trainer.nan_gradient=stop", "trainer.max_nan_steps=3"], "max_nan_steps=3 has no effect", "nan_gradient=stop"),
    (
        ["trainer.nan_gradient=stop", "trainer.max_nan_steps_in_a_row=3"],
        "in_a_row=3 has no effect",
        "nan_gradient=stop",
    ),
    (["trainer.max_nan_steps=2", "trainer.max_nan_steps_in_a_row=3"], "in_a_row=3 has no effect", "max_nan_steps=2"),
    # contradictions
    (["algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"], "use_kl_in_reward", "choose one"),
    ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature=0", "n=8"),
    ([f"{ROLLOUT}.do_sample=false"], f"{ROLLOUT}.do_sample=false", "n=8"),
    ([f"{ROLLOUT}.val_kwargs.n=4"], "val_kwargs.do_sample=false", "n=4"),
    ([f"{ROLLOUT}.val_kwargs.do_sample=true"], "val_kwargs.temperature > 0", ""),
    ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k=0", "-1"),
    ([f"{ROLLOUT}.val_kwargs.top_p=0"], "val_kwargs.top_p=0", ""),
    ([f"{ROLLOUT}.repetition_penalty=0"], f"{ROLLOUT}.repetition_penalty=0", "above 0"),
    ([f"{ROLLOUT}.min_tokens=600"], f"{ROLLOUT}.min_tokens (600)", "data.max_response_length (512)"),
    ([f"{ROLLOUT}.val_kwargs.min_tokens=600"], f"{ROLLOUT}.val_kwargs.min_tokens (600)", "(512)"),
    ([f"{ROLLOUT}.stop=['']"], f"{ROLLOUT}.stop=['']", "empty text"),
    ([f"{ROLLOUT}.val_kwargs.stop=['']"], f"{ROLLOUT}.val_kwargs.stop=['']", "empty text"),
    (
        [f"{ROLLOUT}.ignore_eos=true", f"{ROLLOUT}.min_tokens=5"],
        f"{ROLLOUT}.min_tokens=5 has no effect",
        f"{ROLLOUT}.ignore_eos=true",
    ),
    (
        [f"{ROLLOUT}.ignore_eos=true", "algorithm.mask_truncated_responses=true"],
        "algorithm.mask_truncated_responses=true",
        f"no {ROLLOUT}.stop",
    ),
    ([f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.min_tokens=5"], f"{ROLLOUT}.min_tokens is only read by", "it is sglang"),
    (
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.val_kwargs.repetition_penalty=1.1"],
        f"{ROLLOUT}.val_kwargs.repetition_penalty is only read by",
        "it is sglang",
    ),
    ([f"{ROLLOUT}.prompt_length=100"], f"{ROLLOUT}.prompt_length (100)", "data.max_prompt_length (512)"),
    ([f"{ROLLOUT}.max_model_len=1023"], f"{ROLLOUT}.max_model_len (1023)", "(1024)"),
    (
        [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.memory_budget_gigabytes=40"],
        "memory_budget_gigabytes cannot be held to",
        f"{ROLLOUT}.as_server=true",
    ),
    ([f"{ROLLOUT}.update_weights_delta=true"], f"{ROLLOUT}.update_weights_delta=true", "free_cache_engine"),
    (
        ["algorithm.rollout_correction.bypass_mode=true", f"{ROLLOUT}.calculate_log_probs=false"],
        "bypass_mode",
        "calculate_log_probs must be true",
    ),
    (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0"],
        "kl_ctrl.type=adaptive",
        "above 0",
    ),
    ([f"{ROLLOUT}.n=1"], "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n (1)"),
    (["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=1"], "algorithm.adv_estimator=rloo", "at least 2"),
    (
        ["custom_reward_function.path=meshrl.rewards.functions", "custom_reward_function.name=exact_match"],
        "reward.name=exact_match",
        "choose one",
    ),
    ([f"{ACTOR}.loss_scale_factor=10"], "loss_scale_factor=10", "seq-mean-token-sum-norm"),
    ([f"{ACTOR}.clip_ratio_c=1"], "clip_ratio_c=1", "above 1"),
    ([f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_lb=6"], "clip_cov_lb (6.0)", "clip_cov_ub (5.0)"),
    ([*SAPO, f"{LOSS}.tau_pos=0"], "tau_pos=0", "above 0"),
    ([f"{ACTOR}.optim.betas=[0.9]"], "optim.betas=[0.9]", "two numbers"),
    ([f"{ACTOR}.optim.betas=[0.9,1]"], "optim.betas=[0.9, 1.0]", "below 1"),
    ([f"{ACTOR}.optim.lr_decay_steps_ratio=0.5"], "has no effect with lr_scheduler_type=constant", "it is for wsd"),
    ([WSD, f"{ACTOR}.optim.lr_decay_steps_ratio=0"], "lr_decay_steps_ratio (0.0)", "must be above 0"),
    ([WSD, f"{ACTOR}.optim.lr_decay_steps_ratio=0.7", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.4"], "(0.7)", "(0.4)"),
    ([f"{ACTOR}.optim.lr_warmup_steps=5", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], "lr_warmup_steps (5)", "0.1"),
    (["trainer.nnodes=2"], "trainer.nnodes=2", "trainer.backend=ray"),
    (["trainer.test_freq=0"], "trainer.test_freq=0", "-1"),
    (["trainer.test_freq=5"], "trainer.test_freq=5", "data.val_files"),
    (["trainer.val_only=true"], "trainer.val_only=true", "data.val_files"),
    ([f"{ACTOR}.megatron.sequence_parallel=false"], "megatron.sequence_parallel has no effect", "strategy=fsdp2"),
    ([*MEGATRON, f"{ACTOR}.fsdp_config.reshard_after_forward=false"], "has no effect", "strategy=megatron"),
    ([*MEGATRON, f"{ACTOR}.ulysses_sequence_parallel_size=2"], "ulysses_sequence_parallel_size has no effect", ""),
    # files
    (["data.train_files=[]"], "set data.train_files", ""),
    (["data.val_files=/no/such.parquet"], "data.val_files", "/no/such.parquet"),
    (["actor_rollout_ref.model.path=null"], "set actor_rollout_ref.model.path", ""),
    (["actor_rollout_ref.model.path=/no/model"], "actor_rollout_ref.model.path=/no/model", "not a folder"),
    (["trainer.default_local_dir=/etc/hostname"], "trainer.default_local_dir=/etc/hostname is a file", ""),
    # rewards
    (["reward.name=format_match"], "reward.kwargs: reward function 'format_match' needs pattern", ""),
    (["reward.kwargs.patern=a"], "takes no argument patern", "it has extract, ignore_case"),
    (
        ["reward.name=null", "reward.functions={form: {name: format_match, kwargs: {pattern: a, hole: true}}}"],
        "reward.functions.form.kwargs",
        "takes no argument hole: it has pattern, whole",
    ),
    (["reward.name=null", "reward.functions.format_match=1"], "reward.functions.format_match.kwargs", "needs pattern"),
    (["reward.kwargs.ignore_case=-3"], "reward.kwargs.ignore_case must be true or false, not -3", ""),
    (["reward.name=code", "reward.kwargs.strict=0"], "reward.kwargs.strict must be true or false, not 0", ""),
    (
        ["reward.name=format_match", "reward.kwargs.pattern='('"],
        "reward.kwargs.pattern='(' is no regular",
        "position 0",
    ),
    (["reward.name=null"], "set reward.name, reward.functions or custom_reward_function.path, or reward_model", ""),
    # the model
    (["data.max_prompt_length=4000"], "(4512)", "max_position_embeddings (4096)"),
    ([f"{ACTOR}.ulysses_sequence_parallel_size=8"], "num_attention_heads (12)", "(8)"),
    ([*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=8"], "num_attention_heads (12)", "(8)"),
    ([*MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=8"], "num_hidden_layers (12 layers)", "(8 * 1)"),
]


@pytest.mark.parametrize(("overrides", "first", "second"), BROKEN, ids=lambda part: str(part)[:60])
def test_one_thing_wrong_gives_one_line(fine: MakePPO, overrides: list[str], first: str, second: str) -> None:
    problems = check_config(fine(*overrides))
    assert len(problems) == 1, problems
    assert first in problems[0]
    assert second in problems[0]


BROKEN_SFT = [
    (
        ["data.train_batch_size=12"],
        "data.train_batch_size (12 sequences)",
        "data-parallel size (8 = trainer.nn",
    ),
    (["data.micro_batch_size_per_gpu=5"], "(256 / 8 = 32)", "data.micro_batch_size_per_gpu (5)"),
    (["data.max_token_len_per_gpu=1000"], "data.max_token_len_per_gpu (1000)", "data.max_length (1024)"),
    (["engine.fsdp_config.fsdp_size=3"], "n_gpus (8 = ", "by engine.fsdp_config.fsdp_size (3)"),
    (["engine.megatron.tensor_model_parallel_size=2"], "has no effect", "engine.strategy=fsdp2"),
    (["trainer.nnodes=2"], "trainer.nnodes=2", "trainer.backend=ray"),
    (["data.train_files=[]"], "set data.train_files", ""),
    (["model.path=/no/model"], "model.path=/no/model", "not a folder"),
    (["data.max_length=5000"], "data.max_length (5000)", "max_position_embeddings (4096)"),
]


@pytest.mark.parametrize(("overrides", "first", "second"), BROKEN_SFT, ids=lambda part: str(part)[:60])
def test_one_thing_wrong_in_sft(fine_sft: MakeSFT, overrides: list[str], first: str, second: str) -> None:
    problems = check_config(fine_sft(*overrides))
    assert len(problems) == 1, problems
    assert first in problems[0]
    assert second in problems[0]


def test_several_problems_come_together(fine: MakePPO) -> None:
    config = fine("trainer.nnodes=2", f"{ROLLOUT}.top_k=0", "actor_rollout_ref.model.use_liger=true")
    with pytest.raises(ConfigError) as error:
        ensure_runnable(config)
    assert len(error.value.problems) == 3
    assert [line for line in error.value.problems if line.startswith("not supported yet: ")] == error.value.problems[:1]


def test_file_checks_can_be_switched_off() -> None:
    from meshrl.config import load_config

    config = load_config("grpo").config
    assert check_config(config, check_files=False) == []
    assert len(check_config(config)) == 3  # data, model, reward


def test_checking_changes_nothing(fine: MakePPO) -> None:
    bare = PPOConfig()
    check_config(bare)
    assert bare == PPOConfig()
    assert bare.actor_rollout_ref.actor.clip_ratio_low is None


def test_values_are_checked_in_configs_made_by_hand(fine: MakePPO) -> None:
    config = fine()
    config.actor_rollout_ref.rollout.n = 0
    config.algorithm.adv_estimator = "gropo"
    assert check_config(config) == [
        f"{ROLLOUT}.n=0 must be at least 1",
        "algorithm.adv_estimator=gropo: did you mean grpo? choices are "
        + ", ".join(line for line in check_config(config)[1].partition("choices are ")[2].split(", ")),
    ]


# Files


def test_model_folder_without_config_or_tokenizer(fine: MakePPO, tmp_path: Path) -> None:
    config = fine()
    model = Path(config.actor_rollout_ref.model.path or "")
    (model / "tokenizer.json").unlink()
    assert len(check_config(config)) == 1
    assert "has no tokenizer" in check_config(config)[0]
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    (elsewhere / "tokenizer.model").touch()
    config.actor_rollout_ref.model.tokenizer_path = str(elsewhere)
    assert check_config(config) == []
    (model / "config.json").write_text("{broken")
    assert "is not valid JSON" in check_config(config)[0]
    (model / "config.json").unlink()
    assert "has no config.json" in check_config(config)[0]


def test_states_are_shared_by_heads_and_not_rounded(fine: MakePPO) -> None:
    config = fine()
    actor = config.actor_rollout_ref.actor
    shape = {"model_type": "qwen3_5_text", "linear_num_value_heads": 6, "num_attention_heads": 8}
    (Path(config.actor_rollout_ref.model.path or "") / "config.json").write_text(json.dumps(shape))
    config.trainer.n_gpus_per_node, actor.context_parallel_size, actor.ulysses_sequence_parallel_size = 4, 2, 2
    (problem,) = check_config(config)
    assert "linear_num_value_heads (6) must be divisible by" in problem
    assert "ulysses_sequence_parallel_size * context_parallel_size (4)" in problem
    config.trainer.n_gpus_per_node, actor.ulysses_sequence_parallel_size = 2, 1
    assert check_config(config) == []
    for path in (config.actor_rollout_ref.model.path, None):  # None: the critic begins as the policy
        config.algorithm.adv_estimator, config.critic.model.path = "gae", path
        assert any("of the kind qwen3_5_text with a head for scores" in problem for problem in check_config(config))
    config.algorithm.adv_estimator, config.critic.model.path = "grpo", None
    config.actor_rollout_ref.model.use_remove_padding = False
    assert any("the embedded rollout cannot generate: leave it true" in problem for problem in check_config(config))
    config.actor_rollout_ref.model.use_remove_padding = True
    actor.fsdp_config.mixed_precision.product_dtype, actor.use_torch_compile = "fp8", True
    assert any("has not been tried on linear attention" in problem for problem in check_config(config))


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ({"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]}, "carry a state"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 16}}, "carry a state"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, None),
        ({"model_type": "olmo_hybrid", "linear_num_key_heads": 16}, None),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "carry a state"),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 16}, "carry a state"),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]}, "of the kind mamba"),
        ({"model_type": "granitemoehybrid"}, "of the kind mamba"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"], "mamba_d_state": 8}, None),
    ],
)
def test_models_whose_layers_carry_a_state_do_not_pack(fine: MakePPO, shape: dict[str, Any], found: str | None) -> None:
    config = fine()
    policy = config.actor_rollout_ref
    (Path(policy.model.path or "") / "config.json").write_text(json.dumps(shape))
    if found is None:
        assert check_config(config) == []
        return
    packing, generating = check_config(config)
    assert found in packing
    assert "set actor_rollout_ref.model.use_remove_padding=false" in packing
    assert f"rollout.name=embedded cannot generate with a {shape['model_type']} model" in generating
    assert found in generating
    policy.model.use_remove_padding, policy.rollout.name = False, "hf"
    assert check_config(config) == []


def test_model_folder_without_weights(fine: MakePPO) -> None:
    config = fine()
    (Path(config.actor_rollout_ref.model.path or "") / "model.safetensors").unlink()
    (problem,) = check_config(config)
    assert "has no weights" in problem
    config.actor_rollout_ref.model.random_init = True
    assert check_config(config) == []


def test_quantized_weights_are_refused(fine: MakePPO) -> None:
    config = fine()
    file = Path(config.actor_rollout_ref.model.path or "") / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    (problem,) = check_config(config)
    assert "quant_method=fp8" in problem
    assert "bfloat16" in problem
    file.write_text(json.dumps(values | {"quantization_config": None}))
    assert check_config(config) == []


def test_a_classifier_is_no_policy(fine: MakePPO) -> None:
    config = fine()
    file = Path(config.actor_rollout_ref.model.path or "") / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"architectures": ["Qwen3ForTokenClassification"]}))
    (problem,) = check_config(config)
    assert problem.startswith("actor_rollout_ref.model.path: ")
    assert "holds Qwen3ForTokenClassification, a model that scores" in problem
    config.actor_rollout_ref.model.random_init = True
    assert check_config(config) == []
    file.write_text(json.dumps(values | {"architectures": ["Qwen3ForCausalLM"]}))
    config.actor_rollout_ref.model.random_init = False
    assert check_config(config) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "(0 bytes) has no header of safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "has no header of safetensors"),
        (b"\x02" + bytes(7) + b"[]", "has no header of safetensors"),
        (b"\x1f" + bytes(7) + b'{"a": {"data_offsets": [0, 4]}}' + bytes(3), "has 42 of 43 bytes"),
        (b"\x1f" + bytes(7) + b'{"a": {"data_offsets": [0, 4]}}' + bytes(4), None),
    ],
)
def test_damaged_weights_are_named(fine: MakePPO, content: bytes, words: str | None) -> None:
    config = fine()
    file = Path(config.actor_rollout_ref.model.path or "") / "model.safetensors"
    file.write_bytes(content)
    problems = check_config(config)
    assert len(problems) == (0 if words is None else 1)
    assert words is None or f"actor_rollout_ref.model.path: {file} " in problems[0]
    assert words is None or words in problems[0]


def test_a_download_that_was_cut_off_is_named(fine: MakePPO) -> None:
    config = fine()
    folder = Path(config.actor_rollout_ref.model.path or "")
    parts = [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"layer.{at}": part for at, part in enumerate(parts)}}))
    (folder / "model.safetensors").rename(folder / parts[0])
    (problem,) = check_config(config)
    assert problem == (
        f"actor_rollout_ref.model.path: {index} names 3 files of weights, of which 2 are not there, such as {parts[1]}"
    )
    for part in parts[1:]:
        (folder / part).write_bytes((folder / parts[0]).read_bytes())
    (problem,) = check_config(config)
    assert "index.json names 3 tensors, such as 'layer.0', which its file does not hold" in problem
    for at, part in enumerate(parts):
        header = json.dumps({f"layer.{at}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (folder / part).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert check_config(config) == []
    index.write_text("{")
    assert "names no files of weights" in check_config(config)[0]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", '{"model": {"vocab"', "version https://git-lfs.github.com/spec/v1", "[]", "\xff"])
def test_a_broken_tokenizer_is_named(fine: MakePPO, name: str, text: str) -> None:
    config = fine("critic.enable=true", "algorithm.adv_estimator=gae")
    file = Path(config.actor_rollout_ref.model.path or "") / name
    file.write_bytes(text.encode("latin-1"))
    problems = check_config(config)
    assert problems
    assert all(f"{file} " in problem and "JSON" in problem for problem in problems)
    assert problems[0].startswith("actor_rollout_ref.model.path: ")
    file.write_text("{}")
    assert check_config(config) == []


def test_of_a_huge_tokenizer_only_the_ends_are_read(fine: MakePPO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "MOST_PARSED", 10)
    config = fine()
    file = Path(config.actor_rollout_ref.model.path or "") / "tokenizer.json"
    file.write_text('{"model": {"vocab": {"a": 1,')
    (problem,) = check_config(config)
    assert f"{file} (28 bytes) is no whole JSON object" in problem
    file.write_text('{"model": {"vocab": {"a": 1}}}\n')
    assert check_config(config) == []


def test_what_is_no_checkpoint_is_told(fine: MakePPO, tmp_path: Path) -> None:
    def problems(folder: Path) -> list[str]:
        return check_config(fine("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"))

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    assert "the folder of a run that has no checkpoints" in problems(run)[0]
    for step in (2, 10):
        (run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    newest = run / "checkpoints" / "global_step_10"
    assert problems(run)[0].endswith(f"is the folder of a run, not one checkpoint: name {newest}")
    assert problems(newest.parent)[0].endswith(f"holds checkpoints, not one checkpoint: name {newest}")
    (newest / "manifest.json").touch()
    assert problems(newest) == []
    model = fine().actor_rollout_ref.model.path
    assert "is a Hugging Face model, not a checkpoint" in problems(Path(model or ""))[0]


def test_seed_fits_into_63_bits(fine: MakePPO) -> None:
    assert check_config(fine(f"trainer.seed={2**63 - 1}")) == []
    with pytest.raises(ConfigError, match=r"trainer.seed=9223372036854775808 must be at most 9223372036854775807"):
        fine(f"trainer.seed={2**63}")


def test_arguments_of_own_reward_functions(fine: MakePPO, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(solution_str, *, scale=1.0, data_source, ground_truth, extra_info): ...\n"
    )
    own = ["reward.name=null", f"custom_reward_function.path={tmp_path / 'own.py'}"]
    assert check_config(fine(*own, "custom_reward_function.reward_kwargs.scale=3")) == []
    (problem,) = check_config(fine(*own, "custom_reward_function.reward_kwargs.foo=3"))
    assert problem == "custom_reward_function: reward function 'compute_score' takes no argument foo: it has scale"


def test_adapters_go_onto_layers_that_the_model_has(fine: MakePPO, tmp_path: Path) -> None:
    names = [f"model.layers.{at}.{name}.weight" for at in range(12) for name in ("self_attn.q_proj", "mlp.up_proj")]
    header = json.dumps({name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]} for name in names}).encode()

    def problems(target: str) -> list[str]:
        config = fine("actor_rollout_ref.model.lora_rank=4", f"actor_rollout_ref.model.target_modules={target}")
        file = tmp_path / "model" / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        return check_config(config)

    (problem,) = problems("[q_proj,query]")
    assert problem == (
        f"actor_rollout_ref.model.target_modules: {tmp_path / 'model'} has no linear layer query: name some of q_proj, "
        "up_proj, or all of them as [all-linear]"
    )
    assert problems("[self_attn.q_proj,up_proj]") == problems("[all-linear]") == []


def test_a_reward_function_must_take_what_it_is_called_with(fine: MakePPO, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def score(x): ...\n"
        "def many(data_sources, solution_strs, ground_truths, extra_infos): ...\n"
        "def at_once(**kwargs): ...\n"
        "at_once.per_batch = True\n"
        "def by_name(*, solution_str, prompt, **kwargs): ...\n"
        "def more(data_source, solution_str, ground_truth, extra_info, bonus): ...\n"
    )

    def problems(name: str, *overrides: str) -> list[str]:
        own = f"custom_reward_function.path={tmp_path / 'own.py'}", f"custom_reward_function.name={name}"
        return check_config(fine("reward.name=null", *own, *overrides))

    (problem,) = problems("score")
    assert problem.startswith(
        "custom_reward_function: reward function 'score' takes x, but it is called by name with data_source, "
        "solution_str, ground_truth, extra_info (with prompt, response_ids, turn_rewards too, where it names them): "
    )
    (problem,) = problems("many")
    assert problem.endswith("set reward_manager.name=batch, which calls it as it is written")
    batch = "reward_manager.name=batch"
    assert problems("many", batch) == problems("at_once") == problems("by_name") == []
    (problem,) = problems("by_name", batch)
    assert "called by name with data_sources, solution_strs, ground_truths, extra_infos" in problem
    (problem,) = problems("more")
    assert "takes data_source, solution_str, ground_truth, extra_info, bonus" in problem
    assert problems("more", "custom_reward_function.reward_kwargs.bonus=1") == []


def test_override_config_counts(fine: MakePPO) -> None:
    config = fine("data.max_prompt_length=4000", "actor_rollout_ref.model.override_config.max_position_embeddings=9999")
    assert check_config(config) == []


def test_data_of_an_unknown_kind(fine: MakePPO, tmp_path: Path) -> None:
    (tmp_path / "x.csv").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").touch()
    (problem,) = check_config(fine(f"data.val_files=[{tmp_path}/x.csv,{tmp_path}/saved]"))
    assert "x.csv is none of .parquet, .jsonl, .json" in problem


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def compute_score(**kwargs):\n    return 1.0\n", ""),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\ndef compute_score(**_): ...\n", ""),
        ("def compute_score(*, foo): ...\n", "reward function 'compute_score' needs foo"),
        ("def other():\n    return 1\n", "has no function 'compute_score'; it has other"),
        ("compute_score = 3\n", "is a int, not a function"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def compute_score(:\n", "SyntaxError"),
        ("raise RuntimeError('boom')\n", "my_reward.py:1 in <module>: raise RuntimeError('boom'))"),
        (None, "there is no file"),
    ],
)
def test_own_reward_function_is_really_imported(fine: MakePPO, tmp_path: Path, code: str | None, words: str) -> None:
    file = tmp_path / "my_reward.py"
    if code is not None:
        file.write_text(code)
    problems = check_config(fine("reward.name=null", f"custom_reward_function.path={file}"))
    assert len(problems) == (1 if words else 0), problems
    assert not words or words in problems[0]


def test_own_reward_function_by_module_name(fine: MakePPO) -> None:
    own = ["reward.name=null", "custom_reward_function.path=meshrl.rewards.functions", "custom_reward_function.name="]
    assert check_config(fine(*own[:2], own[2] + "exact_match")) == []
    assert "has no function 'exakt_match'" in check_config(fine(*own[:2], own[2] + "exakt_match"))[0]


# Pipelines


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "extra", "is_fine"),
    [
        (40, 4, None, {}, True),
        (40, 4, 2, {}, True),
        (42, 4, None, {}, False),
        (40, 4, 4, {}, False),
        (40, 4, None, {"num_layers_in_first_pipeline_stage": 8, "num_layers_in_last_pipeline_stage": 8}, True),
        (40, 4, None, {"num_layers_in_first_pipeline_stage": 8, "num_layers_in_last_pipeline_stage": 7}, False),
        (42, 4, 2, {"num_layers_in_first_pipeline_stage": 6}, True),
        (42, 4, 2, {"num_layers_in_first_pipeline_stage": 9}, False),
        (45, 4, 2, {"num_layers_in_first_pipeline_stage": 9}, False),
        (45, 4, 1, {"num_layers_in_first_pipeline_stage": 9}, True),
        (10, 2, None, {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 6}, True),
        (10, 2, None, {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 5}, False),
        (7, 2, 2, {"pipeline_model_parallel_layout": "Et|(tt|)*2ttL"}, True),
        (7, 2, 2, {"pipeline_model_parallel_layout": "Et|(tt|)*2,tL"}, False),
        (7, 2, None, {"pipeline_model_parallel_layout": "Et|(tt|)*2ttL"}, False),
        (7, 2, None, {"pipeline_model_parallel_layout": "Et*3|t*4,L"}, True),
        (3, 2, None, {"pipeline_model_parallel_layout": [["E", "t"], ["t", "t", "L"]]}, True),
    ],
)
def test_layers_per_stage(
    fine: MakePPO, make_model: MakeModel, layers: int, pp: int, vpp: int | None, extra: dict[str, object], is_fine: bool
) -> None:
    config = fine(*MEGATRON)
    make_model(num_hidden_layers=layers)
    megatron = config.actor_rollout_ref.actor.megatron
    megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size = pp, vpp
    megatron.override_transformer_config = extra
    assert (check_config(config) == []) is is_fine


def test_written_stages() -> None:
    assert written_stages("Et*2|(t|)*2,(tt|)*2L") == ["Ett", "t", "t", "tt", "tt", "L"]
    assert written_stages("(t*2|)*2L") == ["tt", "tt", "L"]


def test_nothing_heavy_is_imported_and_it_is_quick() -> None:
    code = (
        "import sys, time\n"
        "from meshrl.config import check_config, load_config\n"
        "check_config(load_config('grpo').config)\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy', 'tensordict'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(time.process_time())\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert float(answer.stdout) < 1.0  # of the processor: others may be using it, too


CRITIC = ["algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "trainer.n_gpus_per_node=4"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["critic.ppo_mini_batch_size=7"], "critic.ppo_mini_batch_size (7 prompts)"),
        (["critic.ulysses_sequence_parallel_size=3"], "must be divisible by critic.ulysses_sequence_parallel_size (3)"),
        (["critic.ppo_max_token_len_per_gpu=10"], "critic.ppo_max_token_len_per_gpu (10) must hold the longest sample"),
        (
            [f"{name}.use_torch_compile=true" for name in ("actor_rollout_ref.actor", "critic")]
            + ["critic.activation_memory_budget=0.3"],
            "activation_memory_budget (1.0) and critic.activation_memory_budget (0.3) must be equal",
        ),
        (["critic.enable=false"], "critic.enable=false does not go with algorithm.adv_estimator=gae"),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "critic.optim.lr=1e-4"], "has no effect"),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.critic_warmup=2"], "has no effect"),
        (["critic.optim.betas=[0.9]"], "critic.optim.betas"),
    ],
)
def test_a_critic_is_checked_as_the_policy_is(overrides: list[str], words: str) -> None:
    problems = check_config(load_config("grpo", CRITIC + overrides).config, check_files=False)
    assert any(words in problem for problem in problems), problems


def test_a_critic_runs_with_gae() -> None:
    assert check_config(load_config("grpo", CRITIC).config, check_files=False) == []


def test_coroutines_as_reward_functions(fine, tmp_path):
    plain, awaited = tmp_path / "plain_score.py", tmp_path / "awaited_score.py"
    plain.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n")
    awaited.write_text("async " + plain.read_text())
    own, more = "custom_reward_function.path=", "reward_manager.max_concurrent_calls=8"
    assert check_config(fine("reward.name=null", f"{own}{awaited}", more)) == []
    (problem,) = check_config(fine("reward.name=null", f"{own}{awaited}", "reward_manager.name=prime"))
    assert "compute_score is a coroutine (async def), which reward_manager.name=prime cannot call" in problem
    (problem,) = check_config(fine("reward.name=null", f"{own}{plain}", more))
    assert problem.startswith("reward_manager.max_concurrent_calls=8 has no effect: no reward function is a coroutine")
