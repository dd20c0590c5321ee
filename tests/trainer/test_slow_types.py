"""A run on CPUs is told which of its types the processor is slow at, and by which keys to change them."""

import pytest
import torch

from meshrl.config.load import load_config
from meshrl.config.supervised import SFTConfig
from meshrl.trainer import launch as module
from meshrl.trainer.launch import slow_types, times_slower

ACTOR = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
ROLLOUT = "actor_rollout_ref.rollout.dtype"
CRITIC = "critic.fsdp_config.mixed_precision.param_dtype"


@pytest.fixture(autouse=True)
def slow_at_bfloat16(monkeypatch):
    monkeypatch.setattr(module, "times_slower", lambda dtype: 120.4 if dtype == torch.bfloat16 else 1.0)


def told(recipe, *overrides):
    return slow_types(load_config(recipe, ["trainer.device=cpu", *overrides]).config)


def test_the_keys_that_ask_for_it_are_named():
    (line,) = told("demo_ppo", f"{ACTOR}=bf16", f"{ROLLOUT}=bfloat16", f"{CRITIC}=bf16")
    assert line.startswith("products of bfloat16 take 120 times as long as float32's")
    # What it says to set is what ends it.
    words = line.partition(" set ")[2].split()
    assert {word.partition("=")[0] for word in words} == {ACTOR, ROLLOUT, CRITIC}
    assert told("demo_ppo", *words) == []


def test_only_what_is_computed_here_counts():
    assert told("demo_grpo") == []
    assert told("demo_grpo", f"{CRITIC}=bf16") == []  # without a critic
    scoring = "reward_model.fsdp_config.mixed_precision.param_dtype"
    assert told("demo_grpo", f"{scoring}=bf16") == []
    (line,) = told("demo_grpo", f"{scoring}=bf16", "reward_model.enable=true", "reward_model.model.path=scorer")
    assert line.endswith(f"set {scoring}=float32")
    assert told("demo_grpo", f"{ACTOR}=bf16", "trainer.device=cuda") == []
    assert told("demo_grpo", f"{ACTOR}=bf16", "trainer.backend=ray") == []
    assert told("demo_grpo", f"{ACTOR}=float16") == []  # not slow
    (line,) = told("demo_grpo", "actor_rollout_ref.actor.strategy=megatron")
    assert line.endswith("actor_rollout_ref.actor.megatron.dtype=float32")


def test_fine_tuning_is_told_as_well():
    loaded = load_config("demo_sft", ["trainer.device=cpu", "engine.strategy=megatron"], root=SFTConfig)
    (line,) = slow_types(loaded.config)
    assert line.endswith("engine.megatron.dtype=float32")


def test_it_is_measured():
    assert times_slower(torch.float32) == 1.0
    assert 0.05 < times_slower(torch.bfloat16) < 1e5
