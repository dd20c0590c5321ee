"""8 bits in rollouts (`quantization`, `kv_cache_dtype`) and in training: who reads them, and what follows from them."""

import json

import pytest

from meshrl.config.keys import ACTOR
from meshrl.config.load import load_config
from meshrl.config.rl import correction_of
from meshrl.config.validate import check_config
from meshrl.config.validate_algorithm import reference_problems
from meshrl.config.validate_model import eight_bit_file_problems, eight_bit_problems, gpu_problems, training_problems

ROLLOUT = "actor_rollout_ref.rollout"
WEIGHTS, CACHE = f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.kv_cache_dtype=fp8"


def config_of(*overrides):
    return load_config("grpo", list(overrides)).config


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf"])
@pytest.mark.parametrize("key", [WEIGHTS, CACHE])
def test_only_the_embedded_rollout_reads_them(name, key):
    found = check_config(config_of(key, f"{ROLLOUT}.name={name}"), check_files=False)
    assert f"{key.split('=')[0]} is only read by {ROLLOUT}.name=embedded, but it is {name}" in found
    assert len(check_config(config_of(key), check_files=False)) < len(found)


def test_a_cache_of_8_bits_is_for_gpus():
    (problem,) = eight_bit_problems(config_of(CACHE, "trainer.device=cpu"))
    assert "is for GPUs, and trainer.device=cpu: set it to auto" in problem
    assert problem in check_config(config_of(CACHE, "trainer.device=cpu"), check_files=False)
    assert eight_bit_problems(config_of(WEIGHTS, "trainer.device=cpu")) == []
    assert eight_bit_problems(config_of(CACHE)) == []


def test_what_corrects_needs_log_probs_and_products_need_room():
    without = f"{ROLLOUT}.calculate_log_probs=false"
    for key in (WEIGHTS, CACHE):
        (problem,) = eight_bit_problems(config_of(key, without))
        assert "set it to true, or algorithm.rollout_correction.rollout_is=off" in problem
        assert eight_bit_problems(config_of(key, without, "algorithm.rollout_correction.rollout_is=off")) == []
    (problem,) = eight_bit_problems(config_of(WEIGHTS, f"{ROLLOUT}.dtype=fp16"))
    assert "too small for its products: set bfloat16" in problem
    assert eight_bit_problems(config_of(CACHE, f"{ROLLOUT}.dtype=fp16")) == []
    assert config_of(f"{ROLLOUT}.quantization=false").actor_rollout_ref.rollout.quantization is None


@pytest.mark.parametrize(
    ("kind", "can"), [("qwen3", True), ("llama", True), ("qwen3_vl", True), ("qwen3_moe", False), ("gemma2", False)]
)
def test_layers_must_be_known(tmp_path, kind, can):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    path = f"actor_rollout_ref.model.path={tmp_path}"
    found = eight_bit_file_problems(config_of(WEIGHTS, path))
    assert (found == []) == can
    words = f"qwen2, qwen3, qwen2_vl, qwen2_5_vl, qwen3_vl, and {path} is {kind}: leave it out"
    assert all(words in problem for problem in found)
    assert eight_bit_file_problems(config_of(CACHE, path)) == []


@pytest.mark.parametrize("key", [WEIGHTS, CACHE])
def test_a_policy_that_rounds_is_corrected_unless_that_is_switched_off(key):
    assert correction_of(config_of(key)).rollout_is == "token"
    assert correction_of(config_of(key, "algorithm.rollout_correction.rollout_is=off")).rollout_is is None
    assert correction_of(config_of(key, "algorithm.rollout_correction.bypass_mode=true")).rollout_is is None
    assert correction_of(config_of()).rollout_is is None


PRODUCTS = "actor_rollout_ref.actor.fsdp_config.mixed_precision.product_dtype=fp8"


def test_training_in_8_bits_is_corrected_for():
    assert correction_of(config_of()).rollout_is is None
    assert correction_of(config_of(PRODUCTS)).rollout_is == "token"
    assert correction_of(config_of(PRODUCTS, "algorithm.rollout_correction.rollout_is=off")).rollout_is is None
    (problem,) = eight_bit_problems(config_of(PRODUCTS, f"{ROLLOUT}.calculate_log_probs=false"))
    assert "what corrects for products in 8 bits" in problem


def test_training_in_8_bits_is_for_fsdp_and_bf16():
    found = check_config(config_of(PRODUCTS, "actor_rollout_ref.actor.strategy=megatron"), check_files=False)
    assert f"{PRODUCTS.split('=')[0]} has no effect with actor_rollout_ref.actor.strategy=megatron" in found
    half = config_of(PRODUCTS, PRODUCTS.replace("product_dtype=fp8", "param_dtype=fp16"))
    (problem,) = training_problems({}, half.actor_rollout_ref.actor, "actor", "model")
    assert problem == "actor.fsdp_config.mixed_precision.product_dtype=fp8 gives bf16, not param_dtype=fp16: set bf16"


def test_what_training_in_8_bits_needs_of_gpus():
    compiled, whole = f"{ACTOR}.use_torch_compile=true", PRODUCTS.replace("product_dtype=fp8", "param_dtype=fp32")
    assert gpu_problems(config_of()) == []
    assert gpu_problems(config_of(PRODUCTS, compiled)) == []
    assert gpu_problems(config_of(PRODUCTS)) == [
        f"{PRODUCTS} gains nothing on GPUs without compiled layers: set use_torch_compile=true"
    ]
    assert gpu_problems(config_of(PRODUCTS, compiled, whole)) == [
        f"{PRODUCTS} gives bf16 on GPUs, not param_dtype=fp32: set bf16"
    ]
    critic = PRODUCTS.replace(ACTOR, "critic")
    assert gpu_problems(config_of(critic)) == []  # there is none
    (problem,) = gpu_problems(config_of(critic, "algorithm.adv_estimator=gae"))
    assert problem.startswith(critic)


def test_training_in_8_bits_takes_sizes_that_are_multiples(tmp_path):
    shape = {"model_type": "qwen3", "hidden_size": 40, "intermediate_size": 64}
    (problem,) = training_problems(shape, config_of(PRODUCTS).actor_rollout_ref.actor, "actor", "model")
    assert "sizes are multiples of 16, and model has hidden_size=40: leave it out" in problem


def test_a_reference_computes_as_the_policy_does():
    apart = "actor_rollout_ref.ref.nnodes=1", "actor_rollout_ref.ref.n_gpus_per_node=1"
    uses = "actor_rollout_ref.actor.use_kl_loss=true", *apart, PRODUCTS
    assert reference_problems(config_of(*uses)) == []
    (problem,) = reference_problems(config_of(*uses, "actor_rollout_ref.ref.strategy=megatron"))
    assert "actor.strategy=fsdp2 and actor_rollout_ref.ref.strategy=megatron: the policy would not begin" in problem


@pytest.mark.parametrize("role", ["policy", "reference", "critic"])
def test_training_in_8_bits_takes_no_experts(tmp_path, role):
    plain, mixture = tmp_path / "plain", tmp_path / "mixture"
    for folder, shape in ((plain, {"model_type": "qwen3"}), (mixture, {"model_type": "qwen3_moe", "num_experts": 4})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape))
    own = {
        "policy": (PRODUCTS, f"actor_rollout_ref.model.path={mixture}"),
        "reference": (
            PRODUCTS,
            f"actor_rollout_ref.model.path={plain}",
            f"actor_rollout_ref.ref.model.path={mixture}",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ),
        "critic": (
            PRODUCTS.replace("actor_rollout_ref.actor", "critic"),
            f"actor_rollout_ref.model.path={plain}",
            f"critic.model.path={mixture}",
            "algorithm.adv_estimator=gae",
        ),
    }
    found = [problem for problem in check_config(config_of(*own[role])) if "takes no experts" in problem]
    name = {"policy": "actor_rollout_ref.model", "reference": "actor_rollout_ref.ref.model", "critic": "critic.model"}
    assert len(found) == 1
    assert f"{name[role]} has num_experts=4: leave it out" in found[0]
    assert found[0].startswith("critic" if role == "critic" else "actor_rollout_ref.actor")  # who has the key
