"""Every key that is not built yet is refused, all of them together; those that work are not."""

from collections.abc import Callable
from typing import Any

import pytest

from meshrl.config import ConfigError, PPOConfig, PreferenceConfig, SFTConfig, ensure_runnable, load_config, unsupported
from meshrl.config.keys import Leaf, fill_followers, get_value, leaves, set_value

ACTOR = "actor_rollout_ref.actor"


def other_value(leaf: Leaf, present: Any) -> Any:
    """A value that is not the present one."""
    if leaf.base_type is bool:
        return not present
    if leaf.base_type in (int, float):
        return (present or 0) + 1
    if leaf.info.choices and leaf.base_type is str:
        return next((choice for choice in leaf.info.choices if choice != present), "something")
    return {str: "something", list: ["something"], dict: {"some": "thing"}}[leaf.base_type]


def runnable(root: type) -> Any:
    config = root()
    if root is PPOConfig:
        config.algorithm.adv_estimator = "grpo"
    fill_followers(config)
    return config


CASES = [(root, leaf) for root in (PPOConfig, SFTConfig, PreferenceConfig) for leaf in leaves(root).values()]


@pytest.mark.parametrize(("root", "leaf"), CASES, ids=lambda part: getattr(part, "name", None) or part.__name__)
def test_each_key_is_refused_exactly_if_it_is_marked(root: type, leaf: Leaf) -> None:
    config = runnable(root)
    assert unsupported(config) == []
    set_value(config, leaf.name, other_value(leaf, get_value(config, leaf.name)))
    refused = [line for line in unsupported(config) if line.startswith(f"not supported yet: {leaf.name}=")]
    assert len(refused) == (1 if leaf.pending else 0)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.use_liger=true", f"{ACTOR}.megatron.use_dist_checkpointing=true",
    ],
)  # fmt: skip
def test_what_later_work_brings_is_refused(override: str) -> None:
    (line,) = unsupported(load_config("grpo", [override]).config)
    name, _, _ = override.partition("=")
    assert line.startswith(f"not supported yet: {name}=")


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{ACTOR}.fsdp_config.reshard_after_forward=false", f"{ACTOR}.use_kl_loss=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false", f"{ACTOR}.loss_agg_mode=token-sum",
        f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.optim.lr_scheduler_type=cosine",
        "algorithm.use_kl_in_reward=true", "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.adv_estimator=rloo", "trainer.backend=ray",
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.max_model_len=4096",
        "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.val_kwargs.n=4", "trainer.test_freq=5",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "reward_manager.name=dapo", "reward_manager.name=prime", "reward.functions.exact_match=1",
        "trainer.resume_mode=disable", "trainer.save_freq=10", "trainer.resume_mode=resume_path",
        f"{ACTOR}.checkpoint.async_save=true", "trainer.max_actor_ckpt_to_keep=3",
        "algorithm.kl_ctrl.type=adaptive", f"{ACTOR}.skip_zero_advantage=false", "global_profiler.tool=torch",
    ],
)  # fmt: skip
def test_what_works_is_not_refused(override: str) -> None:
    assert unsupported(load_config("grpo", [override]).config) == []


def test_changing_what_a_pending_key_follows_is_fine() -> None:
    config = load_config("grpo", [f"{ACTOR}.ppo_mini_batch_size=64"]).config
    assert get_value(config, "critic.ppo_mini_batch_size") == 64
    assert unsupported(config) == []


def test_refusals_come_as_one_error(fine: Callable[..., PPOConfig]) -> None:
    with pytest.raises(ConfigError) as error:
        ensure_runnable(fine(f"{ACTOR}.megatron.use_dist_checkpointing=true", "actor_rollout_ref.model.use_liger=true"))
    first, second = sorted(line for line in error.value.problems if line.startswith("not supported yet: "))
    assert f"{ACTOR}.megatron.use_dist_checkpointing=True" in first
    assert "actor_rollout_ref.model.use_liger=True: Liger kernels" in second
