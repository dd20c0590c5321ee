"""The tree itself: the field's names and defaults, a line of documentation per key, names that other rooms know."""

import inspect
import pickle
import re
from dataclasses import fields
from pathlib import Path

import pytest

import meshrl
from meshrl.config import PPOConfig, PreferenceConfig, SFTConfig, load_config
from meshrl.config.actor_critic import KL_CHOICES, LOSS_AGG_MODES, POLICY_LOSSES
from meshrl.config.keys import changed_keys, fill_followers, get_value, leaves, set_value, type_name
from meshrl.config.rl import AlgorithmConfig
from meshrl.config.trainer import RayInitConfig

# The keys that scripts of the field set most, with the defaults they count on.
KNOWN_DEFAULTS = """
data.prompt_key prompt
data.reward_fn_key data_source
data.max_prompt_length 512
data.max_response_length 512
data.train_batch_size 1024
data.gen_batch_size None
data.val_batch_size None
data.shuffle True
data.filter_overlong_prompts False
data.truncation error
data.custom_cls.path None
data.custom_cls.name None
actor_rollout_ref.hybrid_engine True
actor_rollout_ref.model.path None
actor_rollout_ref.model.tokenizer_path None
actor_rollout_ref.model.trust_remote_code False
actor_rollout_ref.model.external_lib None
actor_rollout_ref.model.override_config {}
actor_rollout_ref.model.enable_gradient_checkpointing True
actor_rollout_ref.model.enable_activation_offload False
actor_rollout_ref.model.use_remove_padding True
actor_rollout_ref.model.use_liger False
actor_rollout_ref.model.lora_rank 0
actor_rollout_ref.model.lora_alpha 16.0
actor_rollout_ref.model.lora_adapter_path None
actor_rollout_ref.actor.strategy fsdp2
actor_rollout_ref.actor.ppo_mini_batch_size 256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu None
actor_rollout_ref.actor.use_dynamic_bsz False
actor_rollout_ref.actor.ppo_max_token_len_per_gpu 16384
actor_rollout_ref.actor.clip_ratio 0.2
actor_rollout_ref.actor.clip_ratio_low None
actor_rollout_ref.actor.clip_ratio_high None
actor_rollout_ref.actor.loss_agg_mode token-mean
actor_rollout_ref.actor.loss_scale_factor None
actor_rollout_ref.actor.entropy_coeff 0.0
actor_rollout_ref.actor.use_kl_loss False
actor_rollout_ref.actor.kl_loss_coef 0.001
actor_rollout_ref.actor.kl_loss_type low_var_kl
actor_rollout_ref.actor.ppo_epochs 1
actor_rollout_ref.actor.shuffle False
actor_rollout_ref.actor.grad_clip 1.0
actor_rollout_ref.actor.ulysses_sequence_parallel_size 1
actor_rollout_ref.actor.policy_loss.loss_mode vanilla
actor_rollout_ref.actor.optim.lr 1e-06
actor_rollout_ref.actor.optim.optimizer AdamW
actor_rollout_ref.actor.optim.weight_decay 0.01
actor_rollout_ref.actor.optim.betas [0.9, 0.999]
actor_rollout_ref.actor.optim.lr_warmup_steps -1
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio 0.0
actor_rollout_ref.actor.optim.lr_scheduler_type constant
actor_rollout_ref.actor.optim.min_lr_ratio 0.0
actor_rollout_ref.actor.fsdp_config.param_offload False
actor_rollout_ref.actor.fsdp_config.optimizer_offload False
actor_rollout_ref.actor.fsdp_config.offload_policy False
actor_rollout_ref.actor.fsdp_config.reshard_after_forward True
actor_rollout_ref.actor.fsdp_config.fsdp_size -1
actor_rollout_ref.actor.fsdp_config.forward_prefetch False
actor_rollout_ref.actor.fsdp_config.model_dtype fp32
actor_rollout_ref.actor.fsdp_config.use_orig_params False
actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params 0
actor_rollout_ref.actor.fsdp_config.wrap_policy.disable False
actor_rollout_ref.actor.megatron.tensor_model_parallel_size 1
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size 1
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size None
actor_rollout_ref.actor.megatron.context_parallel_size 1
actor_rollout_ref.actor.megatron.expert_model_parallel_size 1
actor_rollout_ref.actor.megatron.expert_tensor_parallel_size None
actor_rollout_ref.actor.megatron.sequence_parallel True
actor_rollout_ref.actor.megatron.use_distributed_optimizer True
actor_rollout_ref.actor.megatron.param_offload False
actor_rollout_ref.actor.megatron.grad_offload False
actor_rollout_ref.actor.megatron.optimizer_offload False
actor_rollout_ref.actor.megatron.use_dist_checkpointing False
actor_rollout_ref.actor.megatron.override_transformer_config {}
actor_rollout_ref.actor.megatron.schedule_type auto
actor_rollout_ref.actor.megatron.balance_algorithm kk
actor_rollout_ref.actor.checkpoint.save_contents ['model', 'optimizer', 'extra']
actor_rollout_ref.actor.checkpoint.async_save False
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu None
actor_rollout_ref.ref.log_prob_use_dynamic_bsz None
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu None
actor_rollout_ref.ref.fsdp_config.param_offload False
actor_rollout_ref.rollout.name embedded
actor_rollout_ref.rollout.n 1
actor_rollout_ref.rollout.temperature 1.0
actor_rollout_ref.rollout.top_k -1
actor_rollout_ref.rollout.top_p 1.0
actor_rollout_ref.rollout.do_sample True
actor_rollout_ref.rollout.prompt_length None
actor_rollout_ref.rollout.response_length None
actor_rollout_ref.rollout.dtype bfloat16
actor_rollout_ref.rollout.gpu_memory_utilization 0.5
actor_rollout_ref.rollout.max_num_batched_tokens 8192
actor_rollout_ref.rollout.max_num_seqs 256
actor_rollout_ref.rollout.max_model_len None
actor_rollout_ref.rollout.enforce_eager False
actor_rollout_ref.rollout.free_cache_engine True
actor_rollout_ref.rollout.enable_chunked_prefill True
actor_rollout_ref.rollout.enable_prefix_caching True
actor_rollout_ref.rollout.load_format dummy
actor_rollout_ref.rollout.calculate_log_probs True
actor_rollout_ref.rollout.val_kwargs.temperature 0.0
actor_rollout_ref.rollout.val_kwargs.n 1
actor_rollout_ref.rollout.val_kwargs.do_sample False
actor_rollout_ref.rollout.val_kwargs.top_p 1.0
actor_rollout_ref.rollout.engine_kwargs.vllm {}
actor_rollout_ref.rollout.engine_kwargs.sglang {}
actor_rollout_ref.rollout.multi_turn.enable False
actor_rollout_ref.rollout.multi_turn.max_assistant_turns None
actor_rollout_ref.rollout.multi_turn.max_user_turns None
actor_rollout_ref.rollout.multi_turn.tool_config_path None
actor_rollout_ref.rollout.multi_turn.format hermes
actor_rollout_ref.rollout.multi_turn.max_parallel_calls 1
actor_rollout_ref.rollout.multi_turn.max_tool_response_length 256
critic.enable None
critic.optim.lr 1e-05
critic.ppo_max_token_len_per_gpu 32768
critic.cliprange_value 0.5
critic.model.path None
algorithm.adv_estimator gae
algorithm.gamma 1.0
algorithm.lam 1.0
algorithm.norm_adv_by_std_in_grpo True
algorithm.use_kl_in_reward False
algorithm.kl_penalty kl
algorithm.kl_ctrl.type fixed
algorithm.kl_ctrl.kl_coef 0.001
algorithm.kl_ctrl.horizon 10000.0
algorithm.kl_ctrl.target_kl 0.1
algorithm.filter_groups.enable False
algorithm.filter_groups.metric None
algorithm.filter_groups.max_num_gen_batches 0
algorithm.rollout_correction.rollout_is None
algorithm.rollout_correction.rollout_is_threshold 2.0
algorithm.rollout_correction.rollout_rs None
algorithm.rollout_correction.bypass_mode False
custom_reward_function.path None
custom_reward_function.name compute_score
reward_manager.name naive
trainer.nnodes 1
trainer.n_gpus_per_node 8
trainer.total_epochs 30
trainer.total_training_steps None
trainer.save_freq -1
trainer.test_freq -1
trainer.val_before_train True
trainer.val_only False
trainer.critic_warmup 0
trainer.balance_batch True
trainer.resume_mode auto
trainer.resume_from_path None
trainer.max_actor_ckpt_to_keep None
trainer.rollout_data_dir None
trainer.validation_data_dir None
trainer.log_val_generations 0
trainer.backend local
trainer.seed 1
trainer.deadlines.start 600.0
trainer.deadlines.call 7200.0
trainer.deadlines.collective 600.0
global_profiler.save_path outputs/profile
ray_init.num_cpus None
"""


@pytest.mark.parametrize("line", KNOWN_DEFAULTS.strip().splitlines())
def test_known_key_has_its_known_default(line: str) -> None:
    name, _, expected = line.partition(" ")
    assert str(get_value(PPOConfig(), name)) in (expected, f"{expected}.0")


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, PreferenceConfig])
def test_every_key_is_documented_in_one_sentence(root: type) -> None:
    for leaf in leaves(root).values():
        doc = leaf.info.doc
        assert 8 <= len(doc) <= 110, leaf.name
        assert doc.endswith("."), leaf.name
        assert "\n" not in doc, leaf.name


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, PreferenceConfig])
def test_what_keys_refer_to_exists(root: type) -> None:
    known = leaves(root)
    for leaf in known.values():
        if leaf.info.follows:
            assert leaf.default is None, leaf.name
            assert leaf.info.follows in known, leaf.name
            assert known[leaf.info.follows].info.follows is None, f"{leaf.name}: chains are not followed"
        if leaf.info.choices and leaf.default is not None:
            defaults = leaf.default if isinstance(leaf.default, list) else [leaf.default]
            assert set(defaults) <= set(leaf.info.choices), leaf.name


def test_followers_take_the_value_they_follow_and_own_values_stay() -> None:
    config = PPOConfig()
    config.actor_rollout_ref.actor.clip_ratio = 0.5
    config.actor_rollout_ref.actor.clip_ratio_high = 0.28
    filled = fill_followers(config)
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.5
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28
    assert "actor_rollout_ref.actor.clip_ratio_low" in filled
    assert "actor_rollout_ref.actor.clip_ratio_high" not in filled


def test_changed_keys_are_those_that_say_something() -> None:
    config = PPOConfig()
    fill_followers(config)
    assert changed_keys(config) == []
    set_value(config, "trainer.seed", 7)
    fill_followers(config)
    set_value(config, "critic.optim.lr", 1e-6)
    assert changed_keys(config) == ["data.seed", "critic.optim.lr", "trainer.seed"]
    assert changed_keys(config, "critic.") == ["critic.optim.lr"]


def test_lists_and_dicts_are_not_shared_between_configs() -> None:
    PPOConfig().trainer.logger.append("wandb")
    PPOConfig().actor_rollout_ref.model.override_config["x"] = 1
    assert PPOConfig().trainer.logger == ["console", "file"]
    assert PPOConfig().actor_rollout_ref.model.override_config == {}


def test_config_crosses_process_borders() -> None:
    config = PPOConfig()
    config.trainer.seed = 9
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(config)) != PPOConfig()


@pytest.mark.parametrize(
    ("hint", "name"), [(int, "int"), (int | None, "int or null"), (list[str], "list of str"), (dict[str, int], "dict")]
)
def test_type_name(hint: object, name: str) -> None:
    assert type_name(hint) == name


def test_choices_are_the_names_that_the_algorithms_know() -> None:
    from meshrl.registry import ADVANTAGE_ESTIMATORS
    from meshrl.registry import POLICY_LOSSES as REGISTERED_LOSSES

    assert set(leaves(AlgorithmConfig)["adv_estimator"].info.choices) == set(ADVANTAGE_ESTIMATORS)
    assert set(POLICY_LOSSES) == set(REGISTERED_LOSSES)


def test_presets_are_keys_and_values_that_load() -> None:
    from meshrl.algorithms.presets import PRESETS

    for preset in PRESETS.values():
        config = load_config(None, [f"{name}={value}" for name, value in preset.items()]).config
        assert {name: get_value(config, name) for name in preset} == preset


def test_kl_and_aggregation_choices_compute() -> None:
    import torch

    from meshrl import algorithms

    logprob, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    for name in KL_CHOICES:
        assert algorithms.kl_penalty(logprob, ref, name).shape == logprob.shape
    for mode in LOSS_AGG_MODES:
        assert algorithms.agg_loss(logprob, torch.ones_like(logprob), mode).ndim == 0


def test_policy_loss_keys_are_those_that_the_losses_read() -> None:
    from dataclasses import asdict

    from meshrl.algorithms.policy_config import PolicyLossConfig

    config = PPOConfig()
    assert PolicyLossConfig.read(config.actor_rollout_ref.actor) == PolicyLossConfig()
    for name, default in asdict(PolicyLossConfig()).items():
        changed = PPOConfig().actor_rollout_ref.actor
        target = changed if hasattr(changed, name) else changed.policy_loss
        assert hasattr(target, name), f"there is no key for {name}"
        setattr(target, name, (default or 1.0) + 0.25)
        assert getattr(PolicyLossConfig.read(changed), name) == (default or 1.0) + 0.25


def test_names_shared_with_other_rooms() -> None:
    from meshrl.config.engine import DTYPES
    from meshrl.config.reward import NEEDED_OPTIONS, REWARD_OPTIONS
    from meshrl.config.trainer import LOGGERS
    from meshrl.models.loading import DTYPES as TORCH_DTYPES
    from meshrl.rewards.functions import BUILT_IN
    from meshrl.telemetry.trackers import LOGGERS as TRACKERS

    assert set(DTYPES) == set(TORCH_DTYPES)
    kinds = {name: inspect.signature(function).parameters.values() for name, function in BUILT_IN.items()}
    options = {name: {p.name: p.default for p in of if p.kind is p.KEYWORD_ONLY} for name, of in kinds.items()}
    assert {name: set(of) for name, of in REWARD_OPTIONS.items()} == {name: set(of) for name, of in options.items()}
    needed = {
        name: [key for key, default in of.items() if default is inspect.Parameter.empty] for name, of in options.items()
    }
    assert needed.pop("judge") == ["url", "model"]
    assert {name: tuple(of) for name, of in needed.items() if of} == NEEDED_OPTIONS
    assert set(LOGGERS) == set(TRACKERS)


def test_every_key_that_is_not_refused_is_read_somewhere() -> None:
    """By name: an attribute of that name occurs outside the declarations."""
    package = Path(meshrl.__file__).parent
    readers = [path for path in package.rglob("*.py") if package / "config" not in path.parents]
    readers += [
        package / "config" / name
        for name in (
            "batch_sizes.py",
            "validate.py",
            "validate_training.py",
            "validate_rollout.py",
            "validate_algorithm.py",
        )
    ]
    attributes = set(re.findall(r"\.(\w+)", "\n".join(path.read_text() for path in readers)))
    attributes |= {field.name for field in fields(RayInitConfig)}  # handed on as a whole
    only_one_value = {"optimizer", "resume_mode", "prompt_length"}  # their other values are refused
    for root in (PPOConfig, SFTConfig):
        unread = {
            leaf.name
            for leaf in leaves(root).values()
            if not leaf.pending
            and leaf.name.rpartition(".")[2] not in attributes | only_one_value
            and ".megatron." not in leaf.name  # refused with any strategy but megatron, which is refused
        }
        assert unread == set()
